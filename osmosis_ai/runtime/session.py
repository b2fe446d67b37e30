"""A watch session: brings a run up to date with the files, iteration by iteration, redoing only what is stale.

An iteration doesn't reason about what a change may affect. It loads anew what is stale, and then runs the rollouts that
this code, model and dataset have no record of, and computes the scores that these functions have not given. So it makes
no difference how far an earlier iteration came before the next save cancelled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import anyio.abc
import msgspec

from osmosis_ai.dataset import Dataset, DatasetSummary
from osmosis_ai.errors import FunctionError, RepositoryError, StartError
from osmosis_ai.records import Outcome, Record, Rollout, Score
from osmosis_ai.runtime.frames import Ready, RolloutJob, ScoreJob, WorkerSpec
from osmosis_ai.runtime.planning import Prepared, RunRequest, prepare
from osmosis_ai.runtime.pool import InFlight, Pool, PoolOptions, open_pool
from osmosis_ai.runtime.report import Report, build_report, run_summary
from osmosis_ai.runtime.resume import run_config, run_identity
from osmosis_ai.runtime.run import Run, RunListener, RunPlan
from osmosis_ai.runtime.sources import file_hash
from osmosis_ai.runtime.store import Completed, RolloutKey, RunStore
from osmosis_ai.runtime.watch import Stale, Watched

__all__ = ["Flip", "Iteration", "Rerun", "ToolChanges", "WatchSession"]

PROMPT_CHARACTERS = 60


class Rerun(Record, frozen=True):
    """What the user asked to run again, whatever the files say."""

    everything: bool = False
    failed: bool = False


class Flip(Record, frozen=True):
    """A row that passes now and didn't, or the reverse. Rewards are None where one is missing."""

    row_index: int
    row_id: str
    run_index: int
    prompt: str
    before: float | None
    after: float | None


class ToolChanges(Record, frozen=True):
    """How the tools the model sees differ from the last iteration's."""

    added: list[str] = []
    removed: list[str] = []
    changed: list[str] = []


class Iteration(Record, frozen=True):
    """One finished iteration. `before` is the last one's report; times in milliseconds."""

    number: int
    trigger: list[str]
    run_id: str
    plan: RunPlan
    loaded: Ready
    report: Report
    before: Report | None
    rollouts: int
    scores: int
    cached_turns: int
    passed: list[Flip]
    failed: list[Flip]
    tools: ToolChanges
    took_ms: float

    def as_object(self) -> dict[str, Any]:
        """What the results object gets as `iteration`."""
        return {
            "number": self.number,
            "trigger": self.trigger,
            "redone": {"rollouts": self.rollouts, "scores": self.scores, "cached_turns": self.cached_turns},
            "flipped": {"passed": self.passed, "failed": self.failed},
            "tools": self.tools,
            "took_ms": self.took_ms,
        }


class _Verdict(Record, frozen=True):
    """Whether a rollout passed, for comparison with the next iteration."""

    row_index: int
    passed: bool
    reward: float | None


class _KeptPool:
    """A pool that lives in a task of its own, so that it can be replaced while the session goes on."""

    def __init__(self) -> None:
        self.pool: Pool
        self.spec: WorkerSpec
        self._opened = anyio.Event()
        self._released = anyio.Event()
        self._scope = anyio.CancelScope()
        self._error: StartError | None = None

    async def keep(self, spec: WorkerSpec, options: PoolOptions) -> None:
        """Hold the pool open until it is released."""
        with self._scope:
            try:
                async with open_pool(spec, options) as pool:
                    self.pool, self.spec = pool, spec
                    self._opened.set()
                    await self._released.wait()
            except StartError as error:
                self._error = error
                self._opened.set()

    async def opened(self) -> None:
        """Wait until it has loaded the repository; raises StartError when it can't."""
        await self._opened.wait()
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """It is no longer needed; its workers close in the background."""
        self._released.set()

    def abandon(self) -> None:
        """It isn't needed at all: stop loading."""
        self._scope.cancel()


class _TwoPools:
    """The pool of a session: one that holds the tools, one that holds the functions, each replaced on its own."""

    def __init__(self, agents: Pool, scorers: Pool | None, late_functions: Mapping[str, str]) -> None:
        self._agents = agents
        self._scorers = scorers
        self._late_functions = late_functions

    @property
    def loaded(self) -> Ready:
        agents = self._agents.loaded
        scorers = self._scorers.loaded if self._scorers is not None else Ready()
        return Ready(
            agents.tools,
            scorers.functions,
            scorers.problems,
            agents.tool_sources,
            {**self._late_functions, **scorers.function_sources},
        )

    @property
    def spent_usd(self) -> float:
        return self._agents.spent_usd

    async def probe(self, policy: str, *, price: bool) -> None:
        await self._agents.probe(policy, price=price)

    async def rollout(self, job: RolloutJob) -> Rollout:
        return await self._agents.rollout(job)

    async def score(self, job: ScoreJob) -> list[Score]:
        assert self._scorers is not None
        return await self._scorers.score(job)

    def oldest(self) -> InFlight | None:
        return self._agents.oldest()

    def kill(self) -> None:
        self._agents.kill()
        if self._scorers is not None:
            self._scorers.kill()


class _Tally:
    """Counts what an iteration redoes, and passes everything on."""

    def __init__(self, listener: RunListener) -> None:
        self.rollouts = self.scores = self.cached_turns = 0
        self._listener = listener

    def rollout_done(self, rollout: Rollout) -> None:
        self.rollouts += 1
        self.cached_turns += sum(turn.cached for turn in rollout.turns)
        self._listener.rollout_done(rollout)

    def scores_done(self, rollout: Rollout, scores: list[Score]) -> None:
        self.scores += len(scores)
        self._listener.scores_done(rollout, scores)


class WatchSession:
    """Holds what is loaded between iterations.

    Args:
        request: What to run, as the user asked for it.
        cwd: The working directory.
        environ: The environment, `.env` included.
        store: Where records go.
        options: How workers run.
        group: Where workers' keepers run; it must outlive the session.
        predecessor: The session this one takes over from, whose results the first iteration is compared with.
    """

    def __init__(
        self,
        request: RunRequest,
        cwd: Path,
        environ: Mapping[str, str],
        store: RunStore,
        options: PoolOptions,
        group: anyio.abc.TaskGroup,
        *,
        predecessor: WatchSession | None = None,
    ) -> None:
        self.store = store
        self._request = request
        self._cwd = cwd
        self._environ = environ
        self._options = options
        self._group = group
        self._stale = Stale(tools=True, functions=True, dataset=True, everything=True)
        self._agents: _KeptPool | None = None
        self._scorers: _KeptPool | None = None
        self._late_functions: dict[str, str] = {}
        self._prepared: Prepared | None = None
        self._summary: DatasetSummary | None = None
        self._rows: dict[str, int] = {}
        self._run_id: str | None = None
        self._run_key: dict[str, Any] = {}
        self._probed: Any = None
        self._number = 0
        self._report: Report | None = None
        self._tools: dict[str, Any] = {}
        self._verdicts: dict[tuple[str, int], _Verdict] = {}
        self._finished_key: Any = None
        if predecessor is not None:
            self._number = predecessor._number
            self._report = predecessor._report
            self._tools = predecessor._tools
            self._verdicts = predecessor._verdicts

    @property
    def root(self) -> Path:
        """The repository's root."""
        return self.store.path.parent.parent

    def pool(self) -> Pool | None:
        """The workers that are loaded now."""
        if self._agents is None:
            return None
        return _TwoPools(self._agents.pool, self._scorers.pool if self._scorers else None, self._late_functions)

    def watched(self) -> Watched:
        """What results depend on, as far as is known now."""
        pool = self.pool()
        loaded = pool.loaded if pool is not None else Ready()
        plan = self._prepared.plan if self._prepared is not None else None
        return Watched(
            dataset=self._relative(plan.dataset) if plan is not None else "",
            mcp_dir=self._relative(plan.mcp_dir) if plan is not None and plan.mcp_dir is not None else None,
            tool_sources=frozenset(loaded.tool_sources),
            function_sources=frozenset(loaded.function_sources),
        )

    def mark_stale(self, stale: Stale) -> None:
        """Something has to be loaded anew in the next iteration."""
        self._stale |= stale

    async def iterate(
        self, trigger: list[str], listener: Callable[[RunPlan, int], RunListener], again: Rerun
    ) -> Iteration | None:
        """Bring the run up to date.

        Args:
            trigger: The files that changed, or the key that was pressed; for the record.
            listener: Makes the listener of this iteration's records, from the plan and how many are there already.
            again: What to redo beyond what is stale.

        Returns:
            The iteration, or None when the change turned out to make no difference.

        Raises:
            StartError: The code, the dataset or the model can't be used. What was loaded before stays.
        """
        started = monotonic()
        stale = self._stale
        await self._load(stale)
        self._stale = Stale()
        pool = self.pool()
        assert pool is not None
        assert self._prepared is not None
        assert self._summary is not None
        plan = msgspec.structs.replace(self._prepared.plan, total_rows=self._summary.count)
        completed = await self._begin(plan, pool, again)
        key = (self._run_id, self._summary.sha256, pool.loaded.function_sources, pool.loaded.functions)
        if key == self._finished_key and not (again.everything or again.failed):
            return None
        tally = _Tally(listener(plan, self._recorded(completed)))
        assert self._run_id is not None
        run = Run(self._run_id, plan, pool, self.store, tally, completed=completed, retry_failed=again.failed)
        await run.execute()
        iteration = await self._conclude(plan, pool.loaded, tally, trigger, started)
        self._finished_key = (key[0], key[1], pool.loaded.function_sources, key[3])
        return iteration

    def outcomes(self) -> Iterator[Outcome]:
        """The rollouts of the rows that are in the dataset now, at their present places."""
        assert self._run_id is not None
        found = self.store.outcomes(self._run_id)
        here = (
            outcome
            if outcome.row_index == self._rows[outcome.row_id]
            else msgspec.structs.replace(outcome, row_index=self._rows[outcome.row_id])
            for outcome in found
            if outcome.row_id in self._rows
        )
        return iter(sorted(here, key=lambda outcome: (outcome.row_index, outcome.run_index)))

    def close(self) -> None:
        """Let go of the workers."""
        for kept in (self._agents, self._scorers):
            if kept is not None:
                kept.release()

    async def finish(self, *, interrupted: bool) -> None:
        """Mark the run as what it is: whole, or broken off."""
        if self._run_id is not None:
            await self.store.mark(self._run_id, "interrupted" if interrupted else "finished")

    async def _load(self, stale: Stale) -> None:
        """Load what is stale; nothing of the session changes unless all of it succeeds."""
        prepared = prepare(self._request, self._cwd, self._environ)
        summary, rows = self._summary, self._rows
        if stale.dataset or summary is None:
            summary, rows = await anyio.to_thread.run_sync(_read_dataset, prepared.plan)
        tools = msgspec.structs.replace(prepared.worker, functions=[])
        functions = msgspec.structs.replace(prepared.worker, mcp=None, policies={})
        agents, scorers = self._agents, self._scorers
        fresh: list[_KeptPool] = []
        try:
            if stale.tools or stale.everything or agents is None or agents.spec != tools:
                agents = self._keep(tools)
                fresh.append(agents)
            if not functions.functions:
                scorers = None
            elif stale.functions or stale.everything or scorers is None or scorers.spec != functions:
                scorers = self._keep(functions)
                fresh.append(scorers)
            for kept in fresh:
                await kept.opened()
            self._refuse_broken(prepared, agents, scorers)
        except BaseException:
            for kept in fresh:
                kept.abandon()
            raise
        if scorers is not self._scorers and self._scorers is not None:
            known = {**self._late_functions, **self._scorers.pool.loaded.function_sources}
            self._late_functions = {path: file_hash(self.root / path) for path in known}
        for old, new in ((self._agents, agents), (self._scorers, scorers)):
            if old is not None and old is not new:
                old.release()
        self._agents, self._scorers = agents, scorers
        self._prepared, self._summary, self._rows = prepared, summary, rows

    def _keep(self, spec: WorkerSpec) -> _KeptPool:
        kept = _KeptPool()
        self._group.start_soon(kept.keep, spec, self._options)
        return kept

    def _refuse_broken(self, prepared: Prepared, agents: _KeptPool, scorers: _KeptPool | None) -> None:
        """What loads, but less than before, is a mistake in the making: the last good code stays."""
        if not agents.pool.loaded.tools and self._tools:
            raise RepositoryError("the MCP server lists no tools any more")
        if self._prepared is None:
            return
        for problem in prepared.problems:
            if problem not in self._prepared.problems:
                raise FunctionError(f"{problem.file}:{problem.line}: {problem.message}")
        known = self._scorers.pool.loaded.problems if self._scorers is not None else []
        for failure in scorers.pool.loaded.problems if scorers is not None else []:
            if failure not in known:
                raise FunctionError(failure.message)

    async def _begin(self, plan: RunPlan, pool: Pool, again: Rerun) -> Completed | None:
        """Choose the run that this code and model belong to; a new one when they changed."""
        if self._probed != plan.policies:
            for policy in plan.policies:
                await pool.probe(policy, price=plan.max_cost is not None)
            self._probed = plan.policies
        assert self._summary is not None
        identity = run_identity(plan, self._summary.sha256, pool.loaded.tool_sources)
        key = {name: value for name, value in identity.items() if name not in {"dataset", "rows", "tool code"}}
        key["tools"] = _content(self.root, plan, pool.loaded.tool_sources)
        if self._run_id is None or key != self._run_key or again.everything:
            if self._run_id is not None:
                await self.store.mark(self._run_id, "finished")
            self._run_id = await self.store.create_run(
                plan.command, identity=identity, config=run_config(plan, pool.loaded)
            )
            self._run_key = key
            return None
        completed = self.store.completed_keys(self._run_id)
        if again.failed:
            bad = {where for where, verdict in self._verdicts.items() if not verdict.passed}
            completed.failed.update(key for key in completed.keys if (key.row_id, key.run_index) in bad)
        return completed

    def _recorded(self, completed: Completed | None) -> int:
        keys: set[RolloutKey] = completed.keys if completed is not None else set()
        return sum(key.row_id in self._rows for key in keys)

    async def _conclude(
        self, plan: RunPlan, loaded: Ready, tally: _Tally, trigger: list[str], started: float
    ) -> Iteration:
        report = build_report(plan, loaded.functions, self.outcomes())
        assert self._run_id is not None
        await self.store.mark(self._run_id, "running", run_summary(report))
        verdicts = {}
        passed: list[Flip] = []
        failed: list[Flip] = []
        for outcome in self.outcomes():
            where = (outcome.row_id, outcome.run_index)
            verdict = verdicts[where] = _verdict(outcome, plan.pass_threshold)
            before = self._verdicts.get(where)
            if before is not None and before.passed != verdict.passed:
                (passed if verdict.passed else failed).append(
                    Flip(outcome.row_index, *where, self._prompt(plan, outcome), before.reward, verdict.reward)
                )
        tools = {tool["function"]["name"]: tool for tool in loaded.tools}
        changes = _compare_tools(self._tools, tools) if self._number else ToolChanges()
        self._number += 1
        iteration = Iteration(
            number=self._number,
            trigger=trigger,
            run_id=self._run_id,
            plan=plan,
            loaded=loaded,
            report=report,
            before=self._report,
            rollouts=tally.rollouts,
            scores=tally.scores,
            cached_turns=tally.cached_turns,
            passed=passed,
            failed=failed,
            tools=changes,
            took_ms=round((monotonic() - started) * 1000, 1),
        )
        self._report, self._tools, self._verdicts = report, tools, verdicts
        return iteration

    def _prompt(self, plan: RunPlan, outcome: Outcome) -> str:
        rows = Dataset(Path(plan.dataset)).rows(offset=outcome.row_index, limit=1)
        text = " ".join(next(rows).user_prompt.split())
        return text if len(text) <= PROMPT_CHARACTERS else f"{text[:PROMPT_CHARACTERS]}…"

    def _relative(self, path: str) -> str:
        try:
            return Path(path).resolve().relative_to(self.root).as_posix()
        except ValueError:
            return path


def _read_dataset(plan: RunPlan) -> tuple[DatasetSummary, dict[str, int]]:
    dataset = Dataset(Path(plan.dataset))
    summary = dataset.check(offset=plan.offset, limit=plan.limit)
    return summary, {row.id: row.index for row in dataset.rows(offset=plan.offset, limit=plan.limit)}


def _content(root: Path, plan: RunPlan, sources: Mapping[str, str]) -> dict[str, str]:
    """What the tools are made of: the modules they imported, and every other file beside them."""
    content = dict(sources)
    if plan.mcp_dir is not None:
        for file in Path(plan.mcp_dir).rglob("*"):
            if file.is_file() and file.suffix not in {".py", ".pyc"} and not file.name.startswith("."):
                content[file.relative_to(root).as_posix()] = file_hash(file)
    return content


def _verdict(outcome: Outcome, threshold: float) -> _Verdict:
    scored = outcome.scores.values()
    good = all(score.value is not None and score.value >= threshold for score in scored)
    return _Verdict(outcome.row_index, outcome.failure is None and good, outcome.reward)


def _compare_tools(before: Mapping[str, Any], after: Mapping[str, Any]) -> ToolChanges:
    return ToolChanges(
        added=sorted(after.keys() - before.keys()),
        removed=sorted(before.keys() - after.keys()),
        changed=sorted(name for name in after.keys() & before.keys() if after[name] != before[name]),
    )
