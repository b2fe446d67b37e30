"""A worker group: starts, feeds, watches and replaces the workers of one role.

A job that loses its worker runs again, unless it is to blame: a job that blocked the event loop is, and so is a suspect
(a job inside user code when the worker died) that also kills a worker of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from time import monotonic
from typing import TypeVar

import anyio
import anyio.abc
import msgspec

from osmosis_ai.errors import OsmosisError, ShortageError, StartError
from osmosis_ai.records import Failure
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.code import LoadedCode
from osmosis_ai.runtime.pool.base import LOAD_SECONDS, Spawner
from osmosis_ai.runtime.pool.worker import Loss, WorkerHandle, WorkerLostError, blocked, died
from osmosis_ai.runtime.protocol import Done, Job, Progress
from osmosis_ai.shortage import shortage_of
from osmosis_ai.tasks import task_group

__all__ = ["CodeChangedError", "HaltError", "JobFailedError", "WorkerGroup"]

LOOK_SECONDS = 0.25
MAX_SHARED_LOSSES = 2
MAX_LOSSES = 5
MIN_ALONE = 4
MAX_SPARES = 2
MAX_FAILED_STARTS = 3
MAX_SHORTAGES = 50
SHORTAGE_SECONDS = 15.0
RETRY_SECONDS = 0.2

DoneT = TypeVar(
    "DoneT",
    protocol.RolloutDone,
    protocol.ScoresDone,
    protocol.Probed,
    protocol.ServeDone,
    protocol.ToolsDone,
    protocol.Inspected,
)


class JobFailedError(OsmosisError):
    """A job can't be finished; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class HaltError(JobFailedError):
    """The run must stop, and can be resumed. `notice` says why, and what to do."""

    def __init__(self, message: str, notice: str) -> None:
        super().__init__(Failure("worker", message, kind="start"))
        self.notice = notice


class CodeChangedError(HaltError):
    """A lost worker can't be replaced by one with the same code, because `files` changed after the start."""

    def __init__(self, files: Iterable[str]) -> None:
        names = ", ".join(sorted(files))
        super().__init__(
            f"{names} changed after the start, so a worker that was lost can't be replaced by one of that code",
            f"a worker was lost, and {names} changed since the start; to continue, put back what the run started with "
            "and use --resume",
        )


class WorkerGroup:
    """The workers of one role, `size` of them kept alive while the group is `working`.

    Args:
        spawner: Starts the workers.
        code: The version of the code that all workers must load.
        size: Number of workers; if each job has its own, the number started ahead of jobs.
        memory_limit: Bytes a worker may hold; a worker with more is killed.
        freeze_limit: Seconds without a heartbeat before a worker is killed; user code can block the interpreter.
        share: Maximum number of jobs for a worker while others are still starting.
        alone: Give each job its own worker, with at most this many at a time; 0 for shared workers.
        spares: Once a worker was lost, keep another ready to take the place of the next, because starting one is slow.
        load_limit: Seconds a worker may take to load the repository.
        shortage_limit: Seconds for which no worker can be started and no job runs before the group gives up.
    """

    def __init__(
        self,
        spawner: Spawner,
        code: LoadedCode,
        size: int,
        memory_limit: int,
        freeze_limit: float,
        share: int,
        *,
        alone: int = 0,
        spares: bool = False,
        load_limit: float = LOAD_SECONDS,
        shortage_limit: float = SHORTAGE_SECONDS,
    ) -> None:
        self._spawner = spawner
        self._code = code
        self._size = size
        self._alone = alone > 0
        self._memory_limit = memory_limit
        self._freeze_limit = freeze_limit
        self._load_limit = load_limit
        self._shortage_limit = shortage_limit
        self._share = share
        self._workers: list[WorkerHandle] = []
        self._changed = anyio.Event()
        self.loaded: protocol.Ready | None = None
        self.mixed = False
        self.shortage: str | None = None
        self._short_since: float | None = None
        self._starting = 0
        self._failed_starts = 0
        self._first_starts_left = size
        self._was_ready = False
        self._start_error: StartError | None = None
        self._keeps_spares = spares
        self._spares: list[WorkerHandle] = []
        self._spare_wanted = anyio.Event()
        self._alone_slots = asyncio.Semaphore(max(size, alone, MIN_ALONE))
        self._group: anyio.abc.TaskGroup
        self._closing = False

    @property
    def changed(self) -> list[str]:
        """The files that now differ from what the workers have loaded."""
        return self._code.changed()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Keep the workers alive during the block, and end them all after it."""
        async with task_group() as group:
            self._group = group
            try:
                for _ in range(self._size):
                    group.start_soon(self._keep_one)
                group.start_soon(self._watch)
                if self._keeps_spares:
                    group.start_soon(self._keep_spare)
                yield
            finally:
                self._closing = True
                self._spawner.stop()
                with anyio.CancelScope(shield=True):
                    await self._stop_all()
                    await self._spawner.aclose()
                group.cancel_scope.cancel()

    async def ready(self) -> None:
        """Wait until a worker has loaded the repository; raise StartError if it can't be loaded."""
        await self._pick()

    async def run(
        self,
        job: Job,
        kind: type[DoneT],
        listen: Callable[[Progress], None] = lambda event: None,
        restart: Callable[[], None] = lambda: None,
    ) -> DoneT:
        """Run one job to its last event, a `kind`, in as many workers as it takes.

        `restart` is called before the job starts over, if its worker was lost through no fault of the job. Raises
        JobFailedError if the job is to blame for the loss of its worker, or no worker can be started; CodeChangedError
        if that is because the code changed.
        """
        failed_starts = shortages = 0
        losses: list[Loss] = []
        suspected: Loss | None = None
        while True:
            alone = self._alone or _unexplained(losses) >= MAX_SHARED_LOSSES or suspected is not None
            try:
                if alone:
                    done = await self._run_alone(job, listen, suspected)
                    if done is None:
                        suspected = None
                        continue
                else:
                    worker = await self._pick()
                    try:
                        done = await worker.run(job, listen)
                    finally:
                        self._notify()
                assert isinstance(done, kind)
                return done
            except ShortageError as error:
                if not await self._has_room(str(error)):
                    raise JobFailedError(Failure("worker", str(error), kind="start")) from error
            except StartError as error:
                failed_starts += 1
                if not alone or failed_starts >= MAX_FAILED_STARTS:
                    self._raise_if_changed()
                    raise JobFailedError(Failure("worker", str(error), kind="start")) from error
            except WorkerLostError as lost:
                loss = lost.loss
                if loss.failure.kind == "start" and shortages < MAX_SHORTAGES:
                    shortages += 1
                    if await self._has_room(loss.failure.message):
                        restart()
                        continue
                losses.append(loss)
                to_blame = loss.culprit == job.id or (loss.suspects == {job.id} and not loss.shared)
                if to_blame:
                    for each in losses:
                        each.explained |= job.id in each.suspects
                # The user's steps can't be replayed.
                stepping = isinstance(job, protocol.RolloutJob) and job.stepping
                to_blame = to_blame or (stepping and job.id in loss.suspects)
                # The pool scores the rollouts of a batch again one by one.
                to_blame = to_blame or (isinstance(job, protocol.ScoreJob) and len(job.inputs) > 1)
                if to_blame or (alone and _unexplained(losses) >= MAX_LOSSES):
                    raise JobFailedError(loss.failure) from lost
                # In a worker of its own, no other job can harm it again.
                suspected = loss if job.id in loss.suspects else None
                restart()

    def resume(self, order: protocol.Resume) -> None:
        """Pass an order on to the worker of the paused rollout, unless it was lost."""
        for worker in self._workers:
            worker.resume(order)

    def kill(self) -> None:
        """Kill every worker now."""
        self._closing = True
        for worker in list(self._workers):
            worker.kill(died("stopped"))

    async def _run_alone(self, job: Job, listen: Callable[[Progress], None], suspected: Loss | None) -> Done | None:
        """Run a job in a worker of its own; return None if another suspect of the same loss has been blamed by then."""
        async with self._alone_slots:
            if suspected is not None and suspected.explained:
                return None
            # What a job before it left behind may have taken its worker down; this time it must be the job itself.
            unused = suspected is not None and suspected.suspects == {job.id}
            worker = self._kept_ahead() or await self._next_worker(unused=unused)
            worker.reserved = True
            if self._alone:
                worker.leaving.set()
            try:
                await worker.loaded(self._load_limit)
                self._short_since = None
                return await worker.run(job, listen)
            finally:
                self._release(worker)

    def _kept_ahead(self) -> WorkerHandle | None:
        """Return the oldest of the workers started ahead of jobs, if any."""
        if not self._alone:
            return None
        return next((worker for worker in self._workers if not worker.leaving.is_set()), None)

    async def _next_worker(self, *, unused: bool = False) -> WorkerHandle:
        """Return a spare worker, or start one. One that is `unused` has never had a job."""
        self._spares = [spare for spare in self._spares if not spare.leaving.is_set()]
        found = min(self._spares, key=lambda spare: spare.taken, default=None)
        if found is None or (unused and found.taken):
            return await self._start_worker()
        self._spares.remove(found)
        self._spare_wanted.set()
        return found

    async def _keep_spare(self) -> None:
        """Start a spare worker whenever one is wanted and there is none."""
        while True:
            await self._spare_wanted.wait()
            self._spare_wanted = anyio.Event()
            if self._spares:
                continue
            try:
                spare = await self._start_worker()
                spare.reserved = True
                self._spares.append(spare)
                await spare.loaded(self._load_limit)
            except (ShortageError, StartError):
                # Who needs a worker meets the same error, and handles it.
                return

    def _release(self, worker: WorkerHandle) -> None:
        """Keep a worker whose lone job has ended as a spare one, or end it."""
        keep = self._keeps_spares and not worker.leaving.is_set() and len(self._spares) < MAX_SPARES
        if keep and not worker.load and not self._closing:
            self._spares.append(worker)
        else:
            self._group.start_soon(worker.stop)

    async def _start_worker(self) -> WorkerHandle:
        # Shielded: a worker started by a cancelled task would have no reader, and outlive the run.
        with anyio.CancelScope(shield=True):
            self._starting += 1
            try:
                worker = WorkerHandle(await self._spawner.spawn(), self._note_loaded)
            except OSError as error:
                if (shortage := shortage_of(error)) is not None:
                    raise shortage from error
                raise StartError(f"a worker process can't be started: {error or type(error).__name__}") from error
            finally:
                self._starting -= 1
            self._workers.append(worker)
            self._group.start_soon(self._attend, worker)
        return worker

    async def _pick(self) -> WorkerHandle:
        while True:
            free = [worker for worker in self._workers if worker.accepts]
            least = min(free, key=lambda worker: worker.load, default=None)
            if least is None and self._start_error is not None:
                raise self._start_error
            # Jobs beyond a worker's share wait for a worker that is still starting.
            complete = len(free) >= self._size or self._start_error is not None
            if least is not None and (complete or least.load < self._share):
                return least
            await self._changed.wait()

    async def _keep_one(self) -> None:
        """Keep one worker alive: start the next when it is lost or retires."""
        while not self._closing and self._start_error is None:
            try:
                worker = await self._next_worker()
                worker.reserved = False
                await worker.loaded(self._load_limit)
            except ShortageError as error:
                if not await self._has_room(str(error)):
                    await self._start_failed(error)
                continue
            except StartError as error:
                await self._start_failed(error)
                continue
            self._failed_starts = 0
            self._short_since = None
            self._was_ready = True
            self._notify()
            await worker.leaving.wait()

    async def _has_room(self, shortage: str) -> bool:
        """Wait for a moment before the next try to start a worker; return False if trying has gone on for too long."""
        self.shortage = shortage
        # Running jobs will end, and leave room.
        if self._short_since is None or any(worker.load for worker in self._workers):
            self._short_since = monotonic()
        if self._closing or monotonic() - self._short_since > self._shortage_limit:
            return False
        await anyio.sleep(RETRY_SECONDS)
        return True

    async def _start_failed(self, error: StartError) -> None:
        """Give up if all first starts failed, or if several later starts failed in a row."""
        self._failed_starts += 1
        self._first_starts_left -= 1
        hopeless = self._failed_starts >= MAX_FAILED_STARTS if self._was_ready else self._first_starts_left == 0
        if hopeless:
            self._start_error = error
            self._notify()
        while not self._was_ready and self._start_error is None:
            await self._changed.wait()

    def _raise_if_changed(self) -> None:
        changed = self._code.changed() if self._was_ready else []
        if changed:
            raise CodeChangedError(changed)

    def _note_loaded(self, found: protocol.Ready | protocol.Imported) -> str | None:
        """Take what a worker has loaded. Return why the worker can't be used: another has loaded other code."""
        if isinstance(found, protocol.Imported):
            tools = functions = found.sources
        else:
            tools, functions = found.tool_sources, found.function_sources
            if differing := self._code.note(tools | functions | found.rubric_files):
                return f"{', '.join(sorted(differing))} changed while the workers were starting"
            self.loaded = self.loaded or found
        assert self.loaded is not None
        known = self.loaded.tool_sources | self.loaded.function_sources
        # A file with two hashes changed between two workers' imports of it.
        self.mixed |= any(known.get(path, content) != content for path, content in (tools | functions).items())
        self.loaded = msgspec.structs.replace(
            self.loaded,
            tool_sources=tools | self.loaded.tool_sources,
            function_sources=functions | self.loaded.function_sources,
        )
        return None

    async def _attend(self, worker: WorkerHandle) -> None:
        try:
            await worker.read()
        finally:
            self._workers.remove(worker)
            if worker.load:
                self._spare_wanted.set()
            self._notify()

    def _notify(self) -> None:
        """Wake the tasks that wait for a change in the workers or their load."""
        if self._changed.statistics().tasks_waiting:
            self._changed.set()
            self._changed = anyio.Event()

    async def _watch(self) -> None:
        """End workers that hold too much memory, that send no heartbeat, that are stopped, or that retired and have no
        jobs left.
        """
        while True:
            await anyio.sleep(LOOK_SECONDS)
            self._spawner.wake()
            for worker in list(self._workers):
                if worker.ended.is_set():
                    continue
                if worker.leaving.is_set() and worker.taken and not worker.load and not worker.stopping:
                    self._group.start_soon(worker.stop)
                if (held := worker.memory()) > self._memory_limit:
                    limit = self._memory_limit >> 20
                    worker.kill(
                        died(f"it held {held >> 20} MiB of memory, over the limit of {limit} MiB (--worker-memory)")
                    )
                elif worker.ready and monotonic() - worker.last_beat > self._freeze_limit:
                    worker.kill(blocked(f"user code held the interpreter for {self._freeze_limit:.0f} s"))
                worker.end_stopped()

    async def _stop_all(self) -> None:
        # A start in progress may still add a worker.
        while self._workers or self._starting:
            async with anyio.create_task_group() as group:
                for worker in list(self._workers):
                    group.start_soon(worker.stop)
            await anyio.sleep(0.005)


def _unexplained(losses: list[Loss]) -> int:
    return sum(not loss.explained for loss in losses)
