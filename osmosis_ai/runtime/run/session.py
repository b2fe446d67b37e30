"""`RunSession`: one run, from a config to its report.

It opens the store, loads the repository into workers and checks every row at the same time, probes each model, runs and
scores every rollout, and reports events. It handles no signals and prints nothing; its callers do.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from time import monotonic

import anyio
import msgspec
from anyio.abc import TaskGroup

from osmosis_ai.config import RunConfig
from osmosis_ai.data.dataset import DatasetSummary
from osmosis_ai.data.kept_rows import KeptRows
from osmosis_ai.discovery.source import relative_to_root
from osmosis_ai.environment import environment_of
from osmosis_ai.errors import DatasetError, FunctionError, StartError, StoreError
from osmosis_ai.folders import OWN_FOLDER
from osmosis_ai.masking import Masker
from osmosis_ai.models.engines import banner_of
from osmosis_ai.options import secret_values
from osmosis_ai.records import Failure, Outcome, Rollout, Row
from osmosis_ai.reward_rubric.target import judge_variables
from osmosis_ai.runtime.logs import hand_over_log, new_log
from osmosis_ai.runtime.pool.backends import open_pool
from osmosis_ai.runtime.pool.base import Pool, PoolOptions, default_workers
from osmosis_ai.runtime.protocol import CallDone, Progress, RolloutJob
from osmosis_ai.runtime.protocol import TurnDone as WorkerTurnDone
from osmosis_ai.runtime.run import events
from osmosis_ai.runtime.run.events import RunEvent
from osmosis_ai.runtime.run.plan import RunPlan
from osmosis_ai.runtime.run.prepare import Prepared, check_judges, find_root, prepare
from osmosis_ai.runtime.run.recordings import Recordings, find_recordings
from osmosis_ai.runtime.run.regrade import Regrading
from osmosis_ai.runtime.run.report import Report, build_report, run_summary, score_names
from osmosis_ai.runtime.run.resume import find_named, find_resumable, run_config, run_identity
from osmosis_ai.runtime.run.run import Run
from osmosis_ai.runtime.run.scoring import Scored
from osmosis_ai.store.queries import Completed
from osmosis_ai.store.run_store import RunStore, new_run_id
from osmosis_ai.tasks import task_group
from osmosis_ai.urls import show_url

__all__ = ["Listener", "RunSession", "open_run", "open_store", "pool_options", "run", "run_environment"]

Listener = Callable[[RunEvent], None]

NEWS_SECONDS = 0.5
COUNTING_SECONDS = 0.2
"""Seconds to wait for the number of rows, which limits the workers; the fork server's imports take longer anyway."""


@asynccontextmanager
async def open_run(
    config: RunConfig,
    *,
    directory: str | os.PathLike[str] = ".",
    environ: Mapping[str, str] | None = None,
    listener: Listener | None = None,
) -> AsyncIterator[RunSession]:
    """Open a run: check the config, load the repository into workers, and check that every model answers.

    Args:
        config: The configuration of the run.
        directory: The folder that relative paths in `config` start from.
        environ: Environment variables, None for this process's. Variables from `.env` files in the directory and in the
            repository's root are added. Workers get all of them.
        listener: Called with every event, also while opening, on this event loop. It must not block.

    Yields:
        The run, with a record in the store. A run left before its end is marked as interrupted, and can be resumed.

    Raises:
        StartError: Something in `config` doesn't exist or can't be used. The message says what, where, and what to do.

    Example:
        >>> async with open_run(RunConfig.of(mcp="./mcp", dataset="data.jsonl")) as run:
        ...     async for event in run:
        ...         print(event)
        ...     report = await run.report()
    """
    async with RunSession.open(config, Path(directory), environ, listener) as session:
        await session.begin()
        yield session


def run(
    config: RunConfig,
    *,
    directory: str | os.PathLike[str] = ".",
    environ: Mapping[str, str] | None = None,
    listener: Listener | None = None,
) -> Report:
    """Run a config and return its report. Works in scripts, in threads, and even where an event loop already runs.

    Args:
        config: The configuration of the run.
        directory: The folder that relative paths in `config` start from.
        environ: Environment variables, None for this process's; see `open_run`.
        listener: Called with every event.

    Returns:
        The report. `report.whole` is False if a rollout failed or a score is missing.

    Raises:
        StartError: Something in `config` doesn't exist or can't be used.
        StoreError: The run store can't be read or written.

    Example:
        >>> report = osmosis_ai.run(RunConfig.of(mcp="./mcp", dataset="data.jsonl", model="offline/oracle"))
        >>> report.functions["reward_fn.compute_reward:exact_match"].mean
        1.0
    """

    async def whole() -> Report:
        async with open_run(config, directory=directory, environ=environ, listener=listener) as session:
            return await session.report()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(whole())
    # This call blocks the running loop (a notebook's, for example), so the run needs its own loop in a thread.
    with anyio.from_thread.start_blocking_portal() as portal:
        return portal.call(whole)


def run_environment(config: RunConfig, cwd: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a run's workers: `environ` (None for this process's), `.env` files, judge redirects.

    Raises UsageError if a `.env` can't be read, or the agent doesn't exist.
    """
    known = environment_of(os.environ if environ is None else environ, cwd)
    known = environment_of(known, find_root(config.agent.mcp, config.agent.module, config.workflow.rollout, cwd))
    scoring = config.scoring
    judges = judge_variables(scoring.judge_model, scoring.judge_base_url, priced=config.limits.max_cost is not None)
    return {**known, **judges}


class RunSession:
    """A run with a loaded repository, created by `open_run`; commands that add to it use `RunSession.open`.

    `async for event in session` runs it and yields its events. `report` runs the rest, and returns the report. See
    `open_run` for an example.

    Attributes:
        plan: The resolved config.
        pool: The workers.
        store: The run store, with the run's records.
        interactive: True if the user steps through the run.
        masker: Masks the run's keys.
        id: The run's id in the store; empty before `begin`.
        interrupted: True after `stop` or `cancel`.
    """

    def __init__(
        self,
        prepared: Prepared,
        store: RunStore,
        masker: Masker,
        environ: Mapping[str, str],
        group: TaskGroup,
        listener: Listener | None,
        *,
        interactive: bool,
        recordings: Recordings | None = None,
    ) -> None:
        self.plan: RunPlan = prepared.plan
        self.pool: Pool
        self.store = store
        self.interactive = interactive
        self.masker = masker
        self.id = ""
        self.interrupted = False
        self._said_shortage = False
        # Chosen before the workers load, because their log is named after it.
        self._fresh_id = new_run_id()
        self._log: str | None = None
        self._prepared = prepared
        self._recordings = recordings
        self._environ = environ
        self._group = group
        self._listener = listener
        self._summary: DatasetSummary
        self._kept: KeptRows
        self._not_scored: list[Failure] = []
        self._run: Run | None = None
        self._recorded: Completed | None = None
        self._queue: deque[RunEvent] = deque()
        self._iterated = False
        self._news = asyncio.Event()
        self._started = False
        self._ended = anyio.Event()
        self._error: BaseException | None = None
        self._report: Report | None = None
        self._began = monotonic()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: RunConfig,
        cwd: Path,
        environ: Mapping[str, str] | None = None,
        listener: Listener | None = None,
        *,
        interactive: bool = False,
        recordings: Recordings | None = None,
    ) -> AsyncIterator[RunSession]:
        """Load a config's repository and check that its models answer, without recording anything.

        Args:
            config: The configuration of the run.
            cwd: The folder that relative paths in `config` start from.
            environ: Environment variables, None for this process's; see `open_run`.
            listener: Called with every event on this event loop.
            interactive: True if the user steps through the run and picks the rows; such a run can't be resumed.
            recordings: Recordings shared with other runs, which the caller closes; by default, the config's own.

        Raises:
            StartError: Something in `config` doesn't exist or can't be used.
        """
        # Absolute, because an inline worker changes this process's working directory.
        cwd = Path.cwd() / cwd
        model = config.model
        own = nullcontext() if recordings is not None else find_recordings(model.record, model.replay, cwd)
        with own as found:
            recordings = recordings or found
            variables = run_environment(config, cwd, environ)
            if recordings is not None:
                variables.update(recordings.variables)
            prepared = prepare(config, cwd, variables, None if recordings is None else recordings.policy)
            masker = Masker.from_environment(variables, secret_values(config))
            with open_store(prepared.plan.root, prepared.plan.store, masker) as store:
                async with AsyncExitStack() as stack:
                    group = await stack.enter_async_context(task_group())
                    session = cls(
                        prepared, store, masker, variables, group, listener, interactive=interactive, recordings=found
                    )
                    try:
                        await session._load(stack)
                        yield session
                    finally:
                        # Shielded, so that the run's status is stored even if the caller is cancelled.
                        with anyio.CancelScope(shield=True):
                            await session._close()

    async def begin(self) -> None:
        """Create the run's record, or find the one to resume; raise StartError if there is none, or it differs."""
        plan, resume = self.plan, self.plan.config.resume
        identity = run_identity(plan, self._summary.sha256, self.pool.loaded.tool_sources)
        named = find_named(self.store, plan.config.command, resume, plan.config.data.shard)
        if named is not None or (resume.wanted and resume.name is None):
            self.id = find_resumable(
                self.store,
                plan.config.command,
                identity,
                named,
                finished=resume.retry_failed or resume.regrade,
                other_code=resume.regrade,
            )
            await self.store.resume_run(self.id)
            self._recorded = self.store.completed_keys(self.id)
        else:
            known = run_config(plan, self.pool.loaded)
            if self.interactive:
                # The user decides along the way how many rows run.
                del known["planned"]
                identity, known = {**identity, "interactive": True}, {**known, "interactive": True}
            self.id = await self.store.create_run(
                plan.config.command, identity=identity, config=known, run_id=self._fresh_id
            )
        self._began = monotonic()
        recorded = None if self._recorded is None else len(self._recorded.keys)
        self._tell(events.RunStarted(self.id, plan.total_rollouts, recorded))

    @property
    def rows(self) -> range:
        """The rows of the run, by absolute index."""
        offset = self.plan.config.data.offset
        return range(offset, offset + self.plan.total_rows)

    def row(self, index: int) -> Row:
        """Return a row of the run by its absolute index, as it was when the run started."""
        return self._kept[index - self.rows.start]

    @property
    def done_before(self) -> int:
        """Number of existing rollouts that aren't run again."""
        if self._recorded is None:
            return 0
        resume, failed = self.plan.config.resume, len(self._recorded.failed)
        if resume.regrade:
            return failed
        return len(self._recorded.keys) - (failed if resume.retry_failed else 0)

    def __aiter__(self) -> RunSession:
        self._iterated = True
        return self

    async def __anext__(self) -> RunEvent:
        self._start()
        while not self._queue:
            if self._ended.is_set():
                self._raise()
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._queue.popleft()

    async def report(self) -> Report:
        """Run the remaining rollouts, and summarize all records of the run.

        Raises:
            StoreError: A record can't be written.
        """
        self._start()
        await self._ended.wait()
        self._raise()
        assert self._report is not None
        return self._report

    def outcomes(self) -> Iterator[Outcome]:
        """Stream all recorded rollouts without trajectories, in the order of the rows."""
        return self.store.outcomes(self.id)

    def stop(self) -> None:
        """Start no more rollouts; let running ones finish."""
        self.interrupted = True
        if self._run is not None:
            self._run.stop()

    def cancel(self) -> None:
        """Cancel running rollouts too. They leave no record, as if they had never started."""
        self.interrupted = True
        if self._run is not None:
            self._run.cancel()

    async def _load(self, stack: AsyncExitStack) -> None:
        plan = self.plan
        mcp = self._prepared.worker.mcp
        if mcp is not None and mcp.kind == "none":
            self._tell(events.Notice(f"no tools: there is no mcp folder in {plan.root}"))
        if plan.config.store.folder is None and Path(plan.store).name != OWN_FOLDER:
            self._tell(events.Notice(f"runs are kept in {plan.store}, because {plan.root} is read-only"))
        counted: asyncio.Future[tuple[DatasetSummary, KeptRows]] = asyncio.get_running_loop().create_future()
        self._group.start_soon(self._check_dataset, counted)
        options = pool_options(plan.config, self.store, self._environ, self._fresh_id)
        self._log = options.log
        workflow = self._prepared.worker.workflow
        if workflow is not None:
            from osmosis_ai.runtime.worker.workflows.environments import interpreter_of

            # Here and not first in the workers, because it can take minutes.
            self._tell(events.Waiting(f"preparing the environment of {plan.agent}"))
            stopped = threading.Event()
            try:
                await anyio.to_thread.run_sync(interpreter_of, workflow, stopped, abandon_on_cancel=True)
            finally:
                stopped.set()
        self._tell(events.Waiting(f"loading {_loaded(self._prepared)}"))
        try:
            # Not `wait_for`, which would cancel the future at the timeout.
            await asyncio.wait([counted], timeout=COUNTING_SECONDS)
            if counted.done() and counted.exception() is None:
                rollouts = max(1, plan.with_dataset(counted.result()[0]).total_rollouts)
                options = msgspec.structs.replace(options, workers=min(options.workers, rollouts))
            self.pool = await stack.enter_async_context(open_pool(self._prepared.worker, options))
        finally:
            if not counted.done():
                self._tell(events.Waiting(f"checking {plan.dataset}"))
            # A dataset error is raised here first, even if the repository can't be loaded either.
            self._summary, self._kept = await counted
            stack.callback(self._kept.close)
        self.plan = plan = plan.with_dataset(self._summary)
        for banner in dict.fromkeys(map(banner_of, plan.policies.values())):
            if banner is not None:
                self._tell(events.Notice(banner))
        if self._recordings is not None:
            self._tell(events.Notice(self._recordings.banner))
        loaded = self.pool.loaded
        self._not_scored = [*self._prepared.left_out, *loaded.problems]
        if plan.agent is None and mcp is not None and mcp.kind != "none" and not loaded.tools:
            server = show_url(mcp.url or "") if mcp.path is None else relative_to_root(Path(mcp.path), Path(plan.root))
            decorate = "; decorate its functions with @mcp.tool" if mcp.kind == "directory" else ""
            self._tell(events.Notice(f"no tools: {server} has none{decorate}", "warning"))
        if plan.config.command == "eval" and plan.agent is None and not loaded.functions:
            raise FunctionError.of_all((failure.message for failure in self._not_scored), others=False)
        for failure in self._not_scored:
            self._tell(events.Notice(f"not scored with: {failure.message}", "warning"))
        self._tell(
            events.RunLoaded(
                models=[spec.name for spec in plan.policies.values()],
                dataset=plan.dataset,
                total_rows=plan.total_rows,
                attempts=plan.config.scoring.n,
                tools=loaded.tools,
                functions=loaded.functions,
                agent=None if plan.agent is None else (plan.agent, loaded.agent or plan.agent),
                workflow=plan.config.workflow.rollout is not None,
                shard=plan.config.data.shard,
            )
        )
        if not plan.total_rows:
            self._tell(events.Notice(f"nothing to run: shard {plan.config.data.shard} has none of the rows"))
        priced = plan.config.limits.max_cost is not None
        check_judges(plan.functions, self._environ, priced=priced)
        # Graded again, rollouts call no model.
        for policy, spec in plan.policies.items() if plan.total_rows and not plan.config.resume.regrade else ():
            self._tell(events.Waiting(f"asking {spec.name} for a first reply"))
            await self.pool.probe(policy, price=priced)

    async def _check_dataset(self, counted: asyncio.Future[tuple[DatasetSummary, KeptRows]]) -> None:
        """Check and keep every row in a thread, while the workers load the repository."""
        loop = asyncio.get_running_loop()

        def progress(read: int, total: int) -> None:
            loop.call_soon_threadsafe(self._tell, events.DatasetProgress(read, total))

        try:
            kept = await anyio.to_thread.run_sync(self.plan.keep_rows, self.store.path.parent, progress)
        except DatasetError as error:
            # Cancelling the session cancels the future too.
            if not counted.done():
                counted.set_exception(error)
        else:
            if not counted.done():
                counted.set_result(kept)
            else:
                kept[1].close()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._group.start_soon(self._execute)

    async def _execute(self) -> None:
        try:
            self._report = await self._run_all()
        except Exception as error:  # noqa: BLE001 - raised where the caller waits for the run
            self._error = error
            if isinstance(error, StoreError):
                await self._mark_interrupted()
        finally:
            self._ended.set()
            self._news.set()

    async def _run_all(self) -> Report:
        resume = self.plan.config.resume
        kind = Regrading if resume.regrade else Run
        self._run = kind(
            self.id,
            self.plan,
            self._kept,
            self.pool,
            self.store,
            self,
            completed=self._recorded,
            retry_failed=resume.retry_failed,
        )
        if self.interrupted:
            self._run.stop()
        self._began = monotonic()
        async with task_group() as group:
            group.start_soon(self._keep_telling)
            await self._run.execute()
            group.cancel_scope.cancel()
        wall_ms = (monotonic() - self._began) * 1000
        if self._run.out_of_budget:
            limit = self.plan.config.limits.max_cost
            self._tell(events.LimitReached("max_cost", f"stopped: the budget of ${limit:g} (--max-cost) is spent"))
        self._tell_news()
        if self._run.halted is not None:
            self.interrupted = True
            self._tell(events.Notice(f"stopped: {self._run.halted.notice}", "warning"))
        # Grading again doesn't add missing rollouts.
        missing = self._recorded is not None and len(self._recorded.keys) < self.plan.total_rollouts
        unfinished = self.interrupted or self._run.out_of_budget or (resume.regrade and missing)
        return await self._concluded(wall_ms, unfinished=unfinished)

    async def conclude(self) -> Report:
        """End an interactive run with the rollouts it has; delete it if it has none."""
        outcomes = sum(1 for _ in self.outcomes())
        self.plan = msgspec.structs.replace(self.plan, total_rows=outcomes)
        self._report = await self._concluded((monotonic() - self._began) * 1000, unfinished=self.interrupted)
        if not outcomes:
            await self.store.delete_run(self.id)
            self.id = ""
        return self._report

    async def _concluded(self, wall_ms: float, *, unfinished: bool) -> Report:
        changed = list(self.pool.changed)
        if await anyio.to_thread.run_sync(self._kept.outdated):
            changed.append(relative_to_root(Path(self.plan.dataset), Path(self.plan.root)))
        if changed and not (self._run and self._run.halted):
            results = "the results are those of the version loaded at the start"
            self._tell(events.Notice(f"changed during the run: {', '.join(changed)}; {results}", "warning"))
        if self._recordings is not None and not unfinished and not self.plan.config.resume.wanted:
            judged = any(ref.kind == "rubric" for ref in self.plan.functions)
            cassettes = [self._recordings.policy, *([self._recordings.judges] if judged else [])]
            for unused in self._recordings.unused(cassettes):
                self._tell(events.Notice(unused))
        names = score_names(self.pool.loaded, [total.function for total in self.store.function_totals(self.id)])
        report = build_report(
            self.plan,
            names,
            self.outcomes(),
            run_id=self.id,
            store=self.store.path,
            wall_ms=wall_ms,
            not_scored=self._not_scored,
            changed_files=changed,
            interactive=self.interactive,
        )
        await self.store.mark(self.id, "interrupted" if unfinished else "finished", run_summary(report))
        return report

    async def _close(self) -> None:
        """Mark an unfinished run as interrupted, so it can be resumed."""
        if self._started:
            if not self._ended.is_set():
                self.cancel()
            await self._ended.wait()
        if self.id and self._report is None and not isinstance(self._error, StoreError):
            await self.store.mark(self.id, "interrupted")
        if self.id and self.id != self._fresh_id and self._log is not None:
            hand_over_log(Path(self._log), self.id)

    async def _mark_interrupted(self) -> None:
        """Mark the run after an error of the store; if the store is lost, that is the error."""
        try:
            await self.store.mark(self.id, "interrupted")
        except StoreError as error:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _tell(self, event: RunEvent) -> None:
        if self._listener is not None:
            self._listener(event)
        # Events before the start are few, so keep them for a later iteration. Without one, keep no others.
        if self._iterated or not self._started:
            self._queue.append(event)
            self._news.set()

    # RunListener

    def rollout_started(self, job: RolloutJob) -> Callable[[Progress], None] | None:
        """Report that a rollout starts; return the listener for its turns, if needed."""
        if self._listener is None and not self._iterated:
            return None
        self._tell(events.RolloutStarted(job.id, job.row.index, job.run_index, job.policy))
        return self._progress

    def rollout_done(self, rollout: Rollout) -> None:
        """Report a recorded rollout."""
        self._tell(events.RolloutDone(rollout))

    def scores_done(self, scored: list[Scored]) -> None:
        """Report recorded scores."""
        for stored, scores in scored:
            key = stored.rollout
            self._tell(events.RolloutScored(stored.row_index, key.run_index, key.policy, scores))

    async def _keep_telling(self) -> None:
        """Report what happened to workers promptly, even while no rollout ends."""
        while True:
            await anyio.sleep(NEWS_SECONDS)
            self._tell_news()

    def _tell_news(self) -> None:
        """Report what happened to nodes, and report once if the system lacks resources for more workers."""
        for news in self.pool.news():
            self._tell(events.Notice(news, "warning"))
        if self.pool.shortage is not None and not self._said_shortage:
            self._said_shortage = True
            self._tell(events.Notice(f"some workers start later: {self.pool.shortage}", "warning"))

    def _progress(self, event: Progress) -> None:
        if isinstance(event, WorkerTurnDone):
            self._tell(events.TurnDone(event.job, event.turn, event.message))
        elif isinstance(event, CallDone):
            self._tell(events.ToolCallDone(event.job, event.call, event.message))


def _loaded(prepared: Prepared) -> str:
    """Name what the workers load, for a status line."""
    source = prepared.worker.mcp
    if prepared.worker.workflow is not None:
        return f"rollout server {prepared.plan.agent}"
    if source is None:
        return f"agent loop {prepared.plan.agent}"
    if source.kind == "none":
        return "the workers"
    return (
        f"tools from {show_url(source.url) if source.url else os.path.relpath(source.path or '', prepared.plan.root)}"
    )


def pool_options(config: RunConfig, store: RunStore, environ: Mapping[str, str], run_id: str) -> PoolOptions:
    """Return the pool options of a run, with a log of its id beside the store."""
    workers = config.workers
    return PoolOptions(
        workers=default_workers(workers.batch_size) if workers.workers is None else workers.workers,
        worker_memory=workers.worker_memory,
        isolation=workers.isolation,
        cluster=workers.cluster,
        nodes=workers.nodes,
        workers_per_node=workers.workers_per_node,
        log=str(new_log(store.path.parent, run_id)),
        debug=workers.debug,
        keys=secret_values(config),
        environ=dict(environ),
    )


def open_store(root: str, folder: str, masker: Masker) -> RunStore:
    """Open the run store of a repository, in its folder; raise StartError if it can't be used."""
    try:
        return RunStore.open(Path(root), folder=Path(folder), masker=masker)
    except StoreError as error:
        raise StartError(str(error)) from error
