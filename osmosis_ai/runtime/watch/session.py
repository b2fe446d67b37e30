"""A watch session: each iteration brings the run up to date with the files, and redoes only what is stale.

An iteration doesn't reason about the effects of a change. It reloads what is stale, runs the rollouts without a record
for this code, model and dataset, and computes the scores missing for the functions' code. So it doesn't matter how far
an earlier iteration got before the next save cancelled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4

import anyio
import msgspec
from anyio.abc import TaskGroup

from osmosis_ai.code_hashes import file_hash, function_code
from osmosis_ai.config import RunConfig
from osmosis_ai.data.dataset import DatasetSummary
from osmosis_ai.data.kept_rows import KeptRows
from osmosis_ai.discovery.repository import Repository
from osmosis_ai.errors import RepositoryError, StartError
from osmosis_ai.records import Outcome, Record, Rollout
from osmosis_ai.reward_rubric.resolve import rubric_files
from osmosis_ai.runtime.pool.base import Pool, PoolOptions
from osmosis_ai.runtime.pool.kept import KeptPool
from osmosis_ai.runtime.pool.pool import WorkerPool
from osmosis_ai.runtime.protocol import Progress, Ready, RolloutJob, WorkerSpec, agent_part, scorer_part
from osmosis_ai.runtime.run.plan import POLICY, RunPlan
from osmosis_ai.runtime.run.prepare import Prepared, check_judges, prepare
from osmosis_ai.runtime.run.report import Report, build_report, run_summary, score_names
from osmosis_ai.runtime.run.results import Flip, Flipped, Flips, Redone, ToolChanges, WatchIteration
from osmosis_ai.runtime.run.resume import run_config, run_identity
from osmosis_ai.runtime.run.rows import lacking, telling_functions
from osmosis_ai.runtime.run.run import Run, RunListener
from osmosis_ai.runtime.run.scoring import Scored
from osmosis_ai.runtime.watch.changes import Stale, Watched, from_root, repository_files
from osmosis_ai.store.queries import Completed, RolloutKey
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.text import excerpt

__all__ = ["Iteration", "Rerun", "WatchSession"]

PROMPT_CHARACTERS = 60


class Rerun(Record, frozen=True):
    """The user's request to run rollouts again, whether or not files changed."""

    everything: bool = False
    failed: bool = False


class Iteration(Record, frozen=True):
    """One finished iteration.

    `before` is the previous one's report. `prompts` has the start of the prompt of the rows that fall short, by row id.
    """

    done: WatchIteration
    run_id: str
    plan: RunPlan
    report: Report
    before: Report | None
    prompts: dict[str, str]


class _Verdict(NamedTuple):
    """A rollout's result, for comparison with the next iteration. It falls short by functions that tell rows apart.

    One that its grader removed neither passes nor falls short.
    """

    passed: bool
    reward: float | None
    scores: dict[str, float | None]
    short: bool
    removed: bool = False


class _Place(NamedTuple):
    """A row's index in the dataset, and the start of its prompt."""

    row_index: int
    prompt: str


class _Last(NamedTuple):
    """An iteration's results, for comparison with the next one."""

    number: int = 0
    report: Report | None = None
    tools: dict[str, Any] = {}
    verdicts: dict[RolloutKey, _Verdict] = {}


class _Side(KeptPool):
    """The workers for the tools, or for the functions. `late` maps files that code imports only as it runs, known from
    the previous workers, to the hash of their content."""

    def __init__(self, group: TaskGroup, spec: WorkerSpec, options: PoolOptions, late: Mapping[str, str]) -> None:
        super().__init__(group, spec, options)
        self._late = late
        self._at_start: dict[str, str] = {}

    async def opened(self) -> None:
        await super().opened()
        self._at_start = _sources(self.pool)

    def sources(self) -> dict[str, str]:
        """The files that the code depends on, imported or not."""
        return {**self._late, **_sources(self.pool)}

    def late(self) -> set[str]:
        """Those of the files that were not imported when the code was loaded."""
        return self.sources().keys() - self._at_start.keys()


class _BothSides(WorkerPool):
    """A session's workers as one pool; each side is replaced by itself. `data` maps files beside modules to hashes."""

    def __init__(self, agents: _Side, scorers: _Side | None, data: Mapping[str, str]) -> None:
        self._sides = agents, scorers
        self._data = data
        if scorers is None:
            super().__init__(agents.spec, agents.pool.agents, None)
        else:
            spec = msgspec.structs.replace(agents.spec, functions=scorers.spec.functions)
            super().__init__(spec, agents.pool.agents, scorers.pool.scorers)

    @property
    def loaded(self) -> Ready:
        agents, scorers = self._sides
        sources = {} if scorers is None else {**self._data, **scorers.sources()}
        return msgspec.structs.replace(super().loaded, tool_sources=agents.sources(), function_sources=sources)


class _Tally:
    """A listener that counts what an iteration redoes, and passes everything on."""

    def __init__(self, listener: RunListener) -> None:
        self.rollouts = self.scores = self.cached_turns = 0
        self._listener = listener

    def rollout_started(self, job: RolloutJob) -> Callable[[Progress], None] | None:
        return self._listener.rollout_started(job)

    def rollout_done(self, rollout: Rollout) -> None:
        self.rollouts += 1
        self.cached_turns += sum(turn.cached for turn in rollout.turns)
        self._listener.rollout_done(rollout)

    def scores_done(self, scored: list[Scored]) -> None:
        self.scores += sum(len(scores) for _, scores in scored)
        self._listener.scores_done(scored)


class WatchSession:
    """The loaded workers, dataset and results between iterations.

    The dataset may be inside the watched folder or outside. Workers live in tasks of `group`, which must outlive the
    session. With a `predecessor`, the first iteration is compared with that session's last results.
    """

    def __init__(
        self,
        config: RunConfig,
        repository: Repository,
        dataset: Path,
        cwd: Path,
        environ: Mapping[str, str],
        store: RunStore,
        options: PoolOptions,
        group: TaskGroup,
        *,
        predecessor: WatchSession | None = None,
    ) -> None:
        self.root = repository.root.resolve()
        self.store = store
        self._config = config
        agent_dir = repository.mcp_dir
        self._agent_dir = from_root(self.root, agent_dir.resolve()) if agent_dir is not None else None
        self._dataset = from_root(self.root, dataset.resolve())
        files = rubric_files(config.scoring.rubric, repository, cwd)
        self._rubric_files = frozenset(from_root(self.root, file.resolve()) for file in files)
        self._cwd = cwd
        self._environ = environ
        self._options = options
        self._group = group
        self._stale = Stale(tools=True, functions=True, dataset=True)
        self._agents: _Side | None = None
        self._scorers: _Side | None = None
        self._data: dict[str, str] = {}
        self._pool: _BothSides | None = None
        self._prepared: Prepared | None = None
        self._summary: DatasetSummary | None = None
        self._kept: KeptRows | None = None
        self._rows: dict[str, _Place] = {}
        self._run_id: str | None = None
        self._run_key: dict[str, Any] = {}
        self._probed: Any = None
        self._last: _Last = _Last() if predecessor is None else predecessor._last
        self._draws: dict[RolloutKey, str] = {} if predecessor is None else predecessor._draws
        self._outcomes: list[Outcome] = []
        self._finished_key: Any = None
        self._spent_usd = 0.0
        self._broken = False
        self._mixed = False

    def pool(self) -> Pool | None:
        """Return the loaded workers, if any."""
        return self._pool

    def watched(self) -> Watched:
        """Return the files that results are known to depend on."""
        loaded = Ready() if self._pool is None else self._pool.loaded
        return Watched(
            dataset=self._dataset,
            agent_dir=self._agent_dir,
            tool_sources=frozenset(loaded.tool_sources),
            function_sources=frozenset(loaded.function_sources),
            rubric_files=self._rubric_files,
        )

    def mark_stale(self, stale: Stale) -> None:
        """Have the next iteration reload these parts."""
        self._stale |= stale

    async def iterate(
        self, trigger: list[str], listener: Callable[[RunPlan, int], RunListener], again: Rerun
    ) -> Iteration | None:
        """Bring the run up to date; return None if the change made no difference.

        `trigger` lists the changed files, or the key that was pressed. `listener` makes this iteration's listener from
        the plan and the number of existing records. Raises StartError if the code, the dataset or the model can't be
        used; the previous state then stays loaded.
        """
        started = monotonic()
        try:
            await self._load()
            # Which files matter is known only after loading; one may have been saved in the meantime.
            if self._outdated():
                await self._load()
            pool, plan = self._loaded()
            completed = await self._begin(plan, pool, again)
        except StartError:
            self._broken = True
            raise
        assert self._summary is not None
        assert self._run_id is not None
        key = (self._run_id, self._summary.sha256, self._code(plan, pool))
        if key == self._finished_key and not (again.everything or again.failed or self._broken):
            return None
        self._broken = False
        self._finished_key = None
        tally = _Tally(listener(plan, len(completed.keys) if completed is not None else 0))
        assert self._kept is not None
        run = Run(
            self._run_id,
            plan,
            self._kept,
            pool,
            self.store,
            tally,
            completed=completed,
            retry_failed=again.failed,
            spent_usd=self._spent_usd,
            draws=self._draws,
        )
        try:
            await run.execute()
        finally:
            self._mixed = pool.mixed or run.halted is not None
            self._spent_usd = run.spent_usd
        if self._mixed:
            # Workers loaded different versions of the code, so reload all of it and run again.
            self.mark_stale(Stale(tools=True, functions=True))
            return await self.iterate(trigger, listener, again)
        iteration = await self._conclude(plan, pool.loaded, tally, trigger, started, out_of_budget=run.out_of_budget)
        # Taken again, because running may have imported further files.
        self._finished_key = (key[0], key[1], self._code(plan, pool))
        return iteration

    def outcomes(self) -> Iterator[Outcome]:
        """Return the rollouts of the last iteration, in the order of the rows."""
        return iter(self._outcomes)

    def close(self) -> None:
        """Release the workers and the rows."""
        for side in (self._agents, self._scorers):
            if side is not None:
                side.release()
        if self._kept is not None:
            self._kept.close()

    async def finish(self, *, interrupted: bool) -> None:
        """Mark the run as finished or interrupted."""
        if self._run_id is not None:
            await self.store.mark(self._run_id, "interrupted" if interrupted else "finished")

    async def _load(self) -> None:
        """Reload what is stale; the session changes only if all of it succeeds."""
        stale, self._stale = self._stale, Stale()
        try:
            await self._load_stale(stale)
        except BaseException:
            self._stale |= stale
            raise

    async def _load_stale(self, stale: Stale) -> None:
        prepared = prepare(self._config, self._cwd, self._environ)
        summary, kept, rows = self._summary, self._kept, self._rows
        if stale.dataset or summary is None:
            summary, kept, rows = await anyio.to_thread.run_sync(_read_dataset, prepared.plan, self.store.path.parent)
        tools = agent_part(prepared.worker, prepared.worker.batch_size)
        functions = scorer_part(prepared.worker)
        agents, scorers, data = self._agents, self._scorers, self._data
        fresh: list[_Side] = []
        try:
            if stale.tools or agents is None or agents.spec != tools:
                agents = self._keep(tools, agents)
                fresh.append(agents)
            if not functions.functions:
                scorers = None
            elif stale.functions or scorers is None or scorers.spec != functions:
                data = self._data_files("reward_fn", "reward_rubric")
                scorers = self._keep(functions, scorers)
                fresh.append(scorers)
            for side in fresh:
                await side.opened()
            own = prepared.worker.own_agent
            if not own and not agents.pool.loaded.tools:
                raise RepositoryError("mcp/main.py: the server has no tools")
        except BaseException:
            for side in fresh:
                side.abandon()
            if kept is not None and kept is not self._kept:
                kept.close()
            raise
        for old, new in ((self._agents, agents), (self._scorers, scorers)):
            if old is not None and old is not new:
                old.release()
        self._agents, self._scorers, self._data = agents, scorers, data
        if fresh or self._pool is None:
            self._pool = _BothSides(agents, scorers, data)
        if self._kept is not None and self._kept is not kept:
            self._kept.close()
        self._prepared, self._summary, self._kept, self._rows = prepared, summary, kept, rows

    def _outdated(self) -> bool:
        """Mark and report files that were saved while they were being loaded, before they were known to matter."""
        for kept, stale in ((self._agents, Stale(tools=True)), (self._scorers, Stale(functions=True))):
            if kept is not None and any(file_hash(self.root / path) != was for path, was in kept.sources().items()):
                self.mark_stale(stale)
        return bool(self._stale)

    def _loaded(self) -> tuple[Pool, RunPlan]:
        assert self._pool is not None
        assert self._prepared is not None
        assert self._summary is not None
        return self._pool, self._prepared.plan.with_dataset(self._summary)

    def _code(self, plan: RunPlan, pool: Pool) -> dict[str, str]:
        code = function_code(plan.functions, pool.loaded.function_sources, self.root)
        return {name: code[name] for name in pool.loaded.functions}

    def _data_files(self, *folders: str) -> dict[str, str]:
        """Hash the files beside the modules, which code may read."""
        found = (path for folder in folders for path in repository_files(self.root, folder))
        return {path: file_hash(self.root / path) for path in found if not path.endswith(".py")}

    def _keep(self, spec: WorkerSpec, before: _Side | None) -> _Side:
        late = {} if before is None else {path: file_hash(self.root / path) for path in before.late()}
        return _Side(self._group, spec, self._options, late)

    async def _begin(self, plan: RunPlan, pool: Pool, again: Rerun) -> Completed | None:
        """Choose the run for this code and model: the current one, or a new one if they changed."""
        # Repeating failures includes rollouts that ended without error but fall short.
        short = {key for key, verdict in self._last.verdicts.items() if verdict.short} if again.failed else set()
        self._draws.update(dict.fromkeys(short, uuid4().hex))
        check_judges(plan.functions, self._environ, priced=plan.config.limits.max_cost is not None)
        if self._probed != plan.policies:
            for policy in plan.policies:
                await pool.probe(policy, price=plan.config.limits.max_cost is not None)
            self._probed = plan.policies
        assert self._summary is not None
        identity = run_identity(plan, self._summary.sha256, pool.loaded.tool_sources)
        # Changed rows stay in the same run. Tools count by content, including data files beside the code.
        key = {name: value for name, value in identity.items() if name not in {"dataset", "rows", "tool code"}}
        key["tools"] = self._tool_content(pool.loaded)
        # A changed solution doesn't change the row's id, but a stand-in plays the solution.
        if any(spec.stand_in for spec in plan.policies.values()):
            key["solutions"] = self._summary.solutions
        if self._run_id is None or key != self._run_key or again.everything or self._mixed:
            if self._run_id is not None:
                await self.store.mark(self._run_id, "finished")
            # The log of all runs of the session has the first one's id.
            first = Path(self._options.log).stem if self._run_id is None and self._options.log else None
            self._run_id = await self.store.create_run(
                plan.config.command, identity=identity, config=run_config(plan, pool.loaded), run_id=first
            )
            self._run_key, self._mixed = key, False
            return None
        completed = self.store.completed_keys(self._run_id)
        # Records of rows that left the dataset don't count.
        here = {key for key in completed.keys if key.row_id in self._rows}
        return Completed(here, completed.failed | (here & short))

    def _tool_content(self, loaded: Ready) -> dict[str, str]:
        data = self._data_files(self._agent_dir) if self._agent_dir is not None else {}
        return {**data, **loaded.tool_sources}

    async def _conclude(
        self, plan: RunPlan, loaded: Ready, tally: _Tally, trigger: list[str], started: float, *, out_of_budget: bool
    ) -> Iteration:
        assert self._run_id is not None
        assert self._prepared is not None
        # Files imported only while the code ran are part of it from now on.
        self._run_key["tools"] = self._tool_content(loaded)
        names = score_names(loaded, {total.function for total in self.store.function_totals(self._run_id)})
        self._outcomes = self._present(self.store.outcomes(self._run_id), names)
        report = build_report(
            plan,
            names,
            self._outcomes,
            run_id=self._run_id,
            store=self.store.path,
            wall_ms=(monotonic() - started) * 1000,
            not_scored=[*self._prepared.left_out, *loaded.problems],
        )
        # The run stays open; lists of runs show the figures so far.
        await self.store.mark(self._run_id, "running", run_summary(report))
        threshold = plan.config.scoring.pass_threshold
        telling = telling_functions(report.functions, threshold)
        verdicts = {}
        known = {} if self._last.report is None else self._last.report.functions
        functions = [name for name in report.functions if name in known]
        flipped = Flipped([], [], {})
        for outcome in self._outcomes:
            key = RolloutKey(outcome.policy, outcome.row_id, outcome.run_index)
            verdict = verdicts[key] = _verdict(outcome, telling, threshold)
            before = self._last.verdicts.get(key)
            if outcome.policy == POLICY and before is not None:
                place = (outcome.row_index, outcome.row_id, outcome.run_index, self._rows[outcome.row_id].prompt)
                _add_flips(flipped, place, before, verdict, functions, threshold)
        tools = {tool["function"]["name"]: tool for tool in loaded.tools}
        number = self._last.number + 1
        done = WatchIteration(
            number=number,
            trigger=trigger,
            redone=Redone(tally.rollouts, tally.scores, tally.cached_turns),
            flipped=flipped,
            tools=_compare_tools(self._last.tools if self._last.number else tools, tools),
            took_ms=round((monotonic() - started) * 1000, 1),
            out_of_budget=out_of_budget,
        )
        ids = [row.outcome.row_id for row in report.below]
        prompts = {row_id: self._rows[row_id].prompt for row_id in ids}
        iteration = Iteration(done, self._run_id, plan, report, self._last.report, prompts)
        self._last = _Last(number, report, tools, verdicts)
        return iteration

    def _present(self, outcomes: Iterable[Outcome], functions: list[str]) -> list[Outcome]:
        """Keep the rollouts of rows still in the dataset, with the rows' current indices and the current functions."""
        here = (
            msgspec.structs.replace(
                outcome,
                row_index=self._rows[outcome.row_id].row_index,
                scores={name: score for name, score in outcome.scores.items() if name in functions},
            )
            for outcome in outcomes
            if outcome.row_id in self._rows
        )
        return sorted(here, key=lambda outcome: (outcome.row_index, outcome.run_index, outcome.policy))


def _sources(pool: Pool) -> dict[str, str]:
    return {**pool.loaded.tool_sources, **pool.loaded.function_sources}


def _read_dataset(plan: RunPlan, folder: Path) -> tuple[DatasetSummary, KeptRows, dict[str, _Place]]:
    summary, kept = plan.keep_rows(folder)
    return summary, kept, {row.id: _Place(row.index, excerpt(row.user_prompt, PROMPT_CHARACTERS)) for row in kept}


def _verdict(outcome: Outcome, telling: list[str], threshold: float) -> _Verdict:
    if outcome.finish_reason == "removed":
        return _Verdict(passed=False, reward=None, scores={}, short=False, removed=True)
    failed = outcome.failure is not None
    return _Verdict(
        passed=not failed and not lacking(outcome, outcome.scores, threshold),
        reward=outcome.reward,
        scores={name: score.value for name, score in outcome.scores.items()},
        short=failed or bool(lacking(outcome, telling, threshold)),
    )


def _add_flips(
    flipped: Flipped,
    place: tuple[int, str, int, str],
    before: _Verdict,
    now: _Verdict,
    functions: list[str],
    threshold: float,
) -> None:
    """Add an attempt whose result has changed: by all functions together, and by each of `functions`."""
    if before.removed or now.removed:
        return
    if before.passed != now.passed:
        (flipped.passed if now.passed else flipped.failed).append(Flip(*place, before.reward, now.reward))
    for name in functions:
        was, value = before.scores.get(name), now.scores.get(name)
        passes = value is not None and value >= threshold
        if passes != (was is not None and was >= threshold):
            flips = flipped.functions.setdefault(name, Flips([], []))
            (flips.passed if passes else flips.failed).append(Flip(*place, was, value))


def _compare_tools(before: Mapping[str, Any], after: Mapping[str, Any]) -> ToolChanges:
    return ToolChanges(
        added=sorted(after.keys() - before.keys()),
        removed=sorted(before.keys() - after.keys()),
        changed=sorted(name for name in after.keys() & before.keys() if after[name] != before[name]),
    )
