"""What `test` and `eval` do once their options are known: check, load, probe, run, print."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NamedTuple

import anyio
import msgspec

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.options import RunOptions
from osmosis_ai.cli.progress import RunProgress, checking
from osmosis_ai.cli.report import print_report
from osmosis_ai.collector import calm_collector
from osmosis_ai.data.dataset import DatasetSummary, open_dataset
from osmosis_ai.environment import load_env_files
from osmosis_ai.errors import DatasetError, StartError, StoreError
from osmosis_ai.masking import Masker
from osmosis_ai.process_tree import end_strays
from osmosis_ai.reward_rubric.redirect import judge_environment, redirect_judges
from osmosis_ai.runtime.logs import new_log
from osmosis_ai.runtime.pool.pool import Pool, PoolOptions, SteppingPool, default_workers, open_pool
from osmosis_ai.runtime.run.judges import check_judges
from osmosis_ai.runtime.run.prepare import Prepared, RunRequest, check_output, find_agent, prepare
from osmosis_ai.runtime.run.report import Report, build_report, run_summary, score_names
from osmosis_ai.runtime.run.resume import find_resumable, run_config, run_identity
from osmosis_ai.runtime.run.run import Run, RunPlan
from osmosis_ai.store import Completed, RunStore
from osmosis_ai.tasks import task_group
from osmosis_ai.text import counted

__all__ = [
    "COULD_NOT_START",
    "FAILED",
    "INTERRUPTED",
    "Start",
    "execute",
    "loaded",
    "open_store",
    "pool_options",
    "prepared",
]

FAILED = 1
COULD_NOT_START = 2
INTERRUPTED = 130
GRACE_SECONDS = 10.0
COUNTING_SECONDS = 0.2
"""How long the number of rows is waited for; the imports that workers are forked from take longer anyway."""


def execute(request: RunRequest, options: RunOptions, *, fail_under: float | None = None) -> int:
    """Run what was asked for and print what came out.

    Args:
        request: What to run.
        options: How to show it.
        fail_under: The least mean of every function for exit code 0.

    Returns:
        The exit code.
    """
    return prepared(request, options, lambda start: asyncio.run(_Execution(start, options, fail_under).run()))


class Start(NamedTuple):
    """A request that can run, where its output goes, the keys that mustn't appear there, and `.env`'s variables."""

    prepared: Prepared
    output: Output
    masker: Masker
    output_file: Path | None
    keys: list[str]
    environ: dict[str, str]


def prepared(request: RunRequest, options: RunOptions, run: Callable[[Start], int]) -> int:
    """Check what was asked for, run it, and say so if it can't start.

    Args:
        request: What to run.
        options: How to show it.
        run: Runs it and gives the exit code.

    Returns:
        The exit code.
    """
    cwd = Path.cwd()
    redirect_judges(options.judge_model, options.judge_base_url, priced=options.max_cost is not None)
    environ = load_env_files(cwd)
    output = Output(Masker.from_environment(os.environ).text, quiet=options.quiet)
    try:
        _, repository = find_agent(request.mcp, request.agent, cwd)
        environ |= load_env_files(repository.root)
        keys = [key for key in (request.api_key, request.baseline_api_key) if key]
        masker = Masker.from_environment(os.environ, keys)
        output = Output(masker.text, quiet=options.quiet)
        output_file = check_output(options.output, cwd)
        ready = prepare(request, cwd, os.environ)
        for problem in ready.problems:
            output.warn(str(problem))
        calm_collector()
        try:
            return run(Start(ready, output, masker, output_file, keys, environ))
        finally:
            if options.workers != 0:
                end_strays()
    except StartError as error:
        output.fail(str(error))
        return COULD_NOT_START
    except StoreError as error:
        output.fail(str(error))
        return FAILED


def pool_options(
    options: RunOptions, store: RunStore, keys: list[str], environ: Mapping[str, str] | None = None
) -> PoolOptions:
    """How the workers of a run are to run.

    Args:
        options: The command's options.
        store: The run store; the run's log lies beside it.
        keys: Key values that no log may show.
        environ: Variables that workers get beyond those this process began with.
    """
    workers = options.workers if options.workers is not None else default_workers(options.batch_size)
    return PoolOptions(
        workers=workers,
        worker_memory=options.worker_memory,
        isolation=options.isolation,
        log=str(new_log(store.path.parent)),
        debug=options.debug,
        keys=keys,
        environ={**(environ or {}), **judge_environment()},
    )


def open_store(start: Start) -> RunStore:
    """The run store of the repository; raises StartError when it can't be used."""
    try:
        return RunStore.open(Path(start.prepared.plan.root), masker=start.masker)
    except StoreError as error:
        raise StartError(str(error)) from error


@asynccontextmanager
async def loaded(
    start: Start, options: PoolOptions, scored: Path | None = None
) -> AsyncIterator[tuple[SteppingPool, RunPlan, DatasetSummary]]:
    """Check every row while workers load the repository, introduce the run, and see that its models answer.

    Args:
        start: What to run.
        options: How workers run.
        scored: The store from which scorers read, if it isn't the repository's.

    Returns:
        The workers, the plan with its number of rows, and what is known of the dataset.
    """
    plan, worker = start.prepared.plan, start.prepared.worker
    if scored is not None:
        worker = msgspec.structs.replace(worker, store=str(scored))
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(task_group())
        check = _DatasetCheck(plan, checking(start.output))
        group.start_soon(check.run)
        try:
            workers = min(options.workers, await check.most_rollouts(options.workers))
            options = msgspec.structs.replace(options, workers=workers)
            pool = await stack.enter_async_context(open_pool(worker, options))
        finally:
            # Raises what is wrong with the dataset first, whatever is wrong with the repository.
            summary = await check.summary()
        plan = msgspec.structs.replace(plan, total_rows=summary.count)
        _introduce(start, plan, pool)
        check_judges(plan.functions, priced=plan.max_cost is not None)
        for policy in plan.policies:
            await pool.probe(policy, price=plan.max_cost is not None)
        yield pool, plan, summary


def _introduce(start: Start, plan: RunPlan, pool: Pool) -> None:
    output = start.output
    for banner in start.prepared.banners:
        output.say(banner)
    for problem in pool.loaded.problems:
        output.warn(f"not scored with: {problem.message}")
    tools = ", ".join(tool["function"]["name"] for tool in pool.loaded.tools) or "none"
    policies = " against ".join(spec.name for spec in plan.policies.values())
    runs = f" × {plan.n}" if plan.n > 1 else ""
    output.say(f"{policies} on {counted(plan.total_rows, 'row')}{runs} of {plan.dataset}")
    if plan.agent is not None:
        output.say(f"agent: {plan.agent} ({pool.loaded.agent})")
    output.say(f"tools: {tools}")
    nothing = "nothing" if plan.agent is None else "what the agent loop itself says"
    output.say(f"scored with: {', '.join(pool.loaded.functions) or nothing}")


class _Execution:
    """One run of a command, from a prepared request to the exit code."""

    def __init__(self, start: Start, options: RunOptions, fail_under: float | None) -> None:
        self._start = start
        self._plan = start.prepared.plan
        self._options = options
        self._output = start.output
        self._masker = start.masker
        self._output_file = start.output_file
        self._fail_under = fail_under
        self._interrupted = False
        self._scope: anyio.CancelScope
        self._pool: Pool | None = None
        self._run: Run | None = None
        self._progress: RunProgress

    async def run(self) -> int:
        """Run it all; gives the exit code."""
        self._scope = anyio.CancelScope()
        with self._interrupts(), self._scope, open_store(self._start) as store:
            report = await self._run_with(store)
            # Not before the workers are gone: what user code printed in this process went to stderr until now.
            self._print(report)
            return self._exit_code(report)
        self._output.warn("interrupted before the first rollout")
        return INTERRUPTED

    async def _run_with(self, store: RunStore) -> Report:
        workers = pool_options(self._options, store, self._start.keys, self._start.environ)
        async with loaded(self._start, workers) as (pool, plan, summary):
            self._pool, self._plan = pool, plan
            run = self._run = await self._begin(store, pool, summary)
            started = monotonic()
            with self._progress as progress:
                async with task_group() as ticker:
                    ticker.start_soon(progress.keep_showing)
                    await run.execute()
                    ticker.cancel_scope.cancel()
            wall_ms = (monotonic() - started) * 1000
            return await self._finish(store, pool, run, wall_ms)

    async def _begin(self, store: RunStore, pool: Pool, summary: DatasetSummary) -> Run:
        plan, options = self._plan, self._options
        identity = run_identity(plan, summary.sha256, pool.loaded.tool_sources)
        completed: Completed | None = None
        if options.resume or options.resume_run or options.retry_failed:
            run_id = find_resumable(store, plan.command, identity, options.resume_run, finished=options.retry_failed)
            await store.resume_run(run_id)
            completed = store.completed_keys(run_id)
            self._output.say(f"resuming run {run_id}: {len(completed.keys)} rollouts are recorded")
        else:
            run_id = await store.create_run(plan.command, identity=identity, config=run_config(plan, pool.loaded))
        done = 0 if completed is None else len(completed.keys) - (len(completed.failed) if options.retry_failed else 0)
        self._progress = RunProgress(
            self._output, plan.total_rollouts, pool.oldest, done=done, debugger=options.workers == 0
        )
        return Run(run_id, plan, pool, store, self._progress, completed=completed, retry_failed=options.retry_failed)

    async def _finish(self, store: RunStore, pool: Pool, run: Run, wall_ms: float) -> Report:
        plan = self._plan
        names = score_names(pool.loaded, [total.function for total in store.function_totals(run.id)])
        outcomes = store.outcomes(run.id)
        report = build_report(plan, names, outcomes, run_id=run.id, store=store.path, wall_ms=wall_ms)
        unfinished = self._interrupted or run.out_of_budget
        await store.mark(run.id, "interrupted" if unfinished else "finished", run_summary(report))
        if run.out_of_budget:
            self._output.warn(f"stopped: the budget of ${plan.max_cost:g} (--max-cost) is spent")
        return report

    def _print(self, report: Report) -> None:
        if self._output_file is not None or self._options.json:
            data = self._masker.encoded(report.to_json())
            if self._output_file is not None:
                self._output_file.write_bytes(msgspec.json.format(data, indent=2) + b"\n")
            if self._options.json:
                self._output.line(data.decode("utf-8"))
                return
        print_report(self._output, report)
        if self._output_file is not None:
            self._output.say(f"results written to {self._output_file}")

    def _exit_code(self, report: Report) -> int:
        if self._interrupted:
            return INTERRUPTED
        if not report.whole:
            return FAILED
        if self._plan.command == "eval" and not report.functions:
            self._output.warn(
                "nothing was scored: there is no reward function, and the agent loop gave no reward; "
                "name a function with --eval-fn MODULE:FUNCTION"
            )
            return FAILED
        if self._fail_under is not None:
            low = [name for name, statistics in report.functions.items() if statistics.mean < self._fail_under]
            for name in low:
                self._output.warn(
                    f"{name}: the mean {report.functions[name].mean:.3f} is under {self._fail_under:g} (--fail-under)"
                )
            if low:
                return FAILED
        return 0

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C once stops the run with a grace, twice ends it at once."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if self._run is None:
                self._scope.cancel()
                return
            self._output.warn(f"stopping: what runs has {GRACE_SECONDS:.0f} s to finish; Ctrl-C again ends at once")
            self._run.stop()
            loop.call_later(GRACE_SECONDS, self._run.cancel)

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self._interrupted:
                if self._pool is not None:
                    self._pool.kill()
                os._exit(INTERRUPTED)
            self._interrupted = True
            loop.call_soon_threadsafe(stop)

        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


class _DatasetCheck:
    """Checks every row while the workers load the repository."""

    def __init__(self, plan: RunPlan, progress: Callable[[int, int], None]) -> None:
        self._plan = plan
        self._progress = progress
        self._done = anyio.Event()
        self._summary: DatasetSummary | None = None
        self._error: DatasetError | None = None

    async def run(self) -> None:
        plan = self._plan
        try:
            dataset = open_dataset(Path(plan.dataset))
            self._summary = await anyio.to_thread.run_sync(
                lambda: dataset.check(offset=plan.offset, limit=plan.limit, progress=self._progress)
            )
        except DatasetError as error:
            self._error = error
        self._done.set()

    async def most_rollouts(self, enough: int) -> int:
        """How many rollouts there will be at most; `enough` when the rows are not counted within a moment."""
        with anyio.move_on_after(COUNTING_SECONDS):
            await self._done.wait()
        if self._summary is None:
            return enough
        return max(1, msgspec.structs.replace(self._plan, total_rows=self._summary.count).total_rollouts)

    async def summary(self) -> DatasetSummary:
        """What the check found; raises DatasetError."""
        await self._done.wait()
        if self._summary is None:
            assert self._error is not None
            raise self._error
        return self._summary
