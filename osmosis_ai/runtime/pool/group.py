"""The worker processes of one role: started, fed, watched and replaced.

A job that loses its worker simply runs again, unless it is to blame: the job that held the event loop is, and so is a
suspect (a job that was inside user code when the worker died) that takes down a worker of its own as well.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import TypeVar

import anyio
import anyio.abc
import psutil

from osmosis_ai import errors
from osmosis_ai.errors import OsmosisError, StartError, WorkerError
from osmosis_ai.process_tree import end_processes
from osmosis_ai.records import Failure
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.pool.spawn import LOAD_SECONDS, Spawned, Spawner
from osmosis_ai.runtime.protocol import Done, Event, Job, Progress
from osmosis_ai.runtime.worker.main import pack, read_frame
from osmosis_ai.tasks import task_group

__all__ = ["Crew", "JobFailedError", "WorkerProcess"]

STOP_SECONDS = 5.0
LOOK_SECONDS = 0.25
DRAIN_SECONDS = 0.5
MAX_SHARED_LOSSES = 2
MAX_LOSSES = 5
MAX_FAILED_STARTS = 3

DoneT = TypeVar(
    "DoneT",
    protocol.RolloutDone,
    protocol.ScoresDone,
    protocol.BatchDone,
    protocol.Probed,
    protocol.ServeDone,
    protocol.ToolsDone,
    protocol.Inspected,
)


class JobFailedError(OsmosisError):
    """A job can't be finished, and `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class WorkerLostError(WorkerError):
    """A worker ended with jobs in it.

    Args:
        failure: How it ended, as it is recorded on the job to blame.
        culprit: The job that held its event loop, if that is why.
        suspects: The jobs that were inside user code.
    """

    def __init__(self, failure: Failure, culprit: str | None, suspects: frozenset[str]) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.culprit = culprit
        self.suspects = suspects


class _Assignment:
    """A job in a worker: who hears its events, and whether user code runs on its behalf."""

    def __init__(self, job: Job, listen: Callable[[Progress], None]) -> None:
        self.job = job
        self.listen = listen
        self.inside: set[str] = set()
        self.done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()


class WorkerProcess:
    """One worker process, seen from the run.

    Args:
        imported: Takes the files that user code has imported, at the start and later.
    """

    def __init__(self, imported: Callable[[dict[str, str]], None]) -> None:
        self._imported = imported
        self.ready: protocol.Ready | None = None
        self.taken = 0
        self.stopping = False
        self.pid = 0
        self.last_beat = monotonic()
        self.settled = anyio.Event()
        self.leaving = anyio.Event()
        self.ended = anyio.Event()
        self._jobs: dict[str, _Assignment] = {}
        self._writer: asyncio.StreamWriter
        self._reader: asyncio.StreamReader
        self._spawned: Spawned
        self._end: Failure | None = None
        self._culprit: str | None = None
        self._not_ready: protocol.NotReady | None = None

    @property
    def load(self) -> int:
        """How many jobs it has."""
        return len(self._jobs)

    @property
    def accepts(self) -> bool:
        """Whether it may get a job."""
        return self.ready is not None and not self.leaving.is_set()

    async def loaded(self, seconds: float) -> None:
        """Wait until it has loaded the repository.

        Args:
            seconds: How long it may take.

        Raises:
            StartError: It can't, or takes too long.
        """
        with anyio.move_on_after(seconds):
            await self.settled.wait()
        if self.ready is None:
            if not self.ended.is_set():
                self.kill(_died(f"it did not finish within {seconds:g} s"))
                await self.ended.wait()
            raise self._start_error()

    async def start(self, spawner: Spawner) -> None:
        """Start the process; `read` must run for anything to happen."""
        jobs, jobs_far = socket.socketpair()
        events, events_far = socket.socketpair()
        with jobs_far, events_far:
            try:
                self._spawned = await spawner.spawn(jobs_far, events_far)
            except BaseException:
                jobs.close()
                events.close()
                raise
        self.pid = self._spawned.pid
        _, self._writer = await asyncio.open_unix_connection(sock=jobs)
        self._reader, events_writer = await asyncio.open_unix_connection(sock=events, limit=1 << 20)
        self._events_writer = events_writer

    async def run(self, job: Job, listen: Callable[[Progress], None]) -> Done:
        """Run one job to its last event.

        Raises:
            WorkerLostError: The process ended first.
        """
        if self.ended.is_set():
            raise WorkerLostError(self._how_it_ended(), None, frozenset())
        assignment = self._jobs[job.id] = _Assignment(job, listen)
        self.taken += 1
        try:
            self._writer.write(pack(job))
            return await assignment.done
        except asyncio.CancelledError:
            if not self.ended.is_set():
                self._writer.write(pack(protocol.Cancel(job.id)))
            raise
        finally:
            self._jobs.pop(job.id, None)

    def resume(self, order: protocol.Resume) -> None:
        """Pass an order on to a paused rollout, if this process has it."""
        if order.id in self._jobs and not self.ended.is_set():
            self._writer.write(pack(order))

    async def read(self) -> None:
        """Take events until the process ends; then everything that was left in it is lost."""
        try:
            async with task_group() as group:
                group.start_soon(self._watch_exit)
                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    while True:
                        self._take(protocol.decode_event(await read_frame(self._reader)))
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._bury()

    async def _watch_exit(self) -> None:
        """Children that a dead worker left behind may hold its socket open; what it sent itself is there by now."""
        await self._spawned.exited.wait()
        end_processes(self.pid)
        await anyio.sleep(DRAIN_SECONDS)
        with suppress(OSError):
            self._events_writer.get_extra_info("socket").shutdown(socket.SHUT_RD)

    async def stop(self) -> None:
        """Let the process close its server properly; what takes longer is killed."""
        self.stopping = True
        if not self.ended.is_set() and self.ready is not None and not self._jobs:
            self._writer.write(pack(protocol.Stop()))
            with anyio.move_on_after(STOP_SECONDS):
                await self.ended.wait()
        if not self.ended.is_set():
            self.kill(_died("stopped"))
            await self.ended.wait()

    def kill(self, why: Failure) -> None:
        """End the process and whatever it started, now."""
        self._end = self._end or why
        end_processes(self.pid)

    def memory(self) -> int:
        """Bytes the process holds."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _take(self, event: Event) -> None:
        self.last_beat = monotonic()
        if isinstance(event, Progress):
            assignment = self._jobs.get(event.job)
            if assignment is not None:
                _note_user_code(assignment.inside, event)
                assignment.listen(event)
        elif isinstance(event, Done):
            assignment = self._jobs.get(event.job)
            if assignment is not None and not assignment.done.done():
                assignment.done.set_result(event)
        elif isinstance(event, protocol.Ready):
            self.ready = event
            self._imported(event.tool_sources | event.function_sources)
            self.settled.set()
        elif isinstance(event, protocol.NotReady):
            self._not_ready = event
        elif isinstance(event, protocol.Imported):
            self._imported(event.sources)
        elif isinstance(event, protocol.Retiring):
            self.leaving.set()
        elif isinstance(event, protocol.Dying):
            self._end = _died(event.reason)
        elif isinstance(event, protocol.Stuck):
            self._culprit = event.job
            self._end = _blocked(f"user code held the event loop for {event.seconds:.0f} s")

    async def _bury(self) -> None:
        # It is ending as a rule, and once it is gone there are no children of its own left to look for.
        with anyio.move_on_after(DRAIN_SECONDS):
            await self._spawned.exited.wait()
        end_processes(self.pid)
        await self._spawned.exited.wait()
        self._writer.close()
        self._events_writer.close()
        for event in (self.ended, self.leaving, self.settled):
            event.set()
        inside = frozenset(job for job, assignment in self._jobs.items() if assignment.inside)
        for assignment in list(self._jobs.values()):
            if not assignment.done.done():
                assignment.done.set_exception(WorkerLostError(self._how_it_ended(), self._culprit, inside))

    def _how_it_ended(self) -> Failure:
        if self._end is not None:
            return self._end
        code = self._spawned.exit_code
        if code is not None and code < 0:
            return _died(f"killed by {_signal_name(-code)}")
        return _died(f"exited with code {code}")

    def _start_error(self) -> StartError:
        if self._not_ready is None:
            how = self._how_it_ended().message
            return StartError(f"the repository can't be loaded: the worker that tried was lost: {how}")
        kind = getattr(errors, self._not_ready.error, StartError)
        error: StartError = kind(self._not_ready.message)
        return error


class Crew:
    """The workers of one role, `size` of them kept alive while the crew is `working`.

    Args:
        spawner: Starts the workers.
        size: How many workers; where each job has its own, how many are started ahead of their jobs.
        memory_limit: Bytes a worker may hold; one that holds more is killed.
        freeze_limit: Seconds a worker may show no life, which user code that holds the interpreter brings about.
        share: How many jobs a worker gets at most while others are being started.
        alone: Give every job a worker of its own, so many at a time; 0 for workers that are shared.
        load_limit: Seconds a worker may take to load the repository.

    Attributes:
        sources: The repository's files that workers have imported, with a hash of their content.
        mixed: Whether workers have found different content in the same file, because it changed in between.
    """

    def __init__(
        self,
        spawner: Spawner,
        size: int,
        memory_limit: int,
        freeze_limit: float,
        share: int,
        *,
        alone: int = 0,
        load_limit: float = LOAD_SECONDS,
    ) -> None:
        self._spawner = spawner
        self._size = size
        self._alone = alone > 0
        self._memory_limit = memory_limit
        self._freeze_limit = freeze_limit
        self._load_limit = load_limit
        self._share = share
        self._workers: list[WorkerProcess] = []
        self._changed = anyio.Event()
        self.sources: dict[str, str] = {}
        self.mixed = False
        self._starting = 0
        self._failed_starts = 0
        self._hopeful = size
        self._was_ready = False
        self._start_error: StartError | None = None
        self._solo = asyncio.Semaphore(max(size, alone, 2))
        self._group: anyio.abc.TaskGroup
        self._closing = False

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Keep the workers alive during the block; afterwards none is left."""
        async with task_group() as group:
            self._group = group
            try:
                for _ in range(self._size):
                    group.start_soon(self._keep_one)
                group.start_soon(self._watch)
                yield
            finally:
                self._closing = True
                self._spawner.stop()
                with anyio.CancelScope(shield=True):
                    await self._stop_all()
                    await self._spawner.aclose()
                group.cancel_scope.cancel()

    async def ready(self) -> protocol.Ready:
        """What the first worker found when it loaded the repository.

        Raises:
            StartError: It can't be loaded.
        """
        worker = await self._pick()
        assert worker.ready is not None
        return worker.ready

    async def run(
        self, job: Job, kind: type[DoneT], listen: Callable[[Progress], None], restart: Callable[[], None]
    ) -> DoneT:
        """Run one job to its last event, in as many workers as it takes.

        Args:
            job: The job.
            kind: The type of its last event.
            listen: Hears its other events.
            restart: Called when the job begins anew, because its worker was lost through no fault of its own.

        Raises:
            JobFailedError: The job is to blame for the loss of its worker, or none can be started.
        """
        losses = failed_starts = 0
        alone = self._alone
        while True:
            # Whether no other job has ever been in the worker, not even one whose thread may still run.
            unshared = alone
            try:
                if alone:
                    done = await self._run_alone(job, listen)
                else:
                    worker = await self._pick()
                    try:
                        done = await worker.run(job, listen)
                    finally:
                        unshared = worker.taken == 1
                        self._notify()
                assert isinstance(done, kind)
                return done
            except StartError as error:
                failed_starts += 1
                if not alone or failed_starts >= MAX_FAILED_STARTS:
                    raise JobFailedError(Failure("worker", str(error), kind="start")) from error
            except WorkerLostError as lost:
                losses += 1
                to_blame = lost.culprit == job.id or (lost.suspects == {job.id} and unshared)
                # What a person has done in it step by step can't be done again for them.
                stepping = isinstance(job, protocol.RolloutJob) and job.stepping
                to_blame = to_blame or (stepping and job.id in lost.suspects)
                # Its parts run again, each on its own.
                to_blame = to_blame or isinstance(job, (protocol.ScoreBatch, protocol.StoredBatch))
                if to_blame or (alone and losses >= MAX_LOSSES):
                    raise JobFailedError(lost.failure) from lost
                # In a worker of its own nobody else's fault can hit it yet again.
                alone = self._alone or job.id in lost.suspects or losses >= MAX_SHARED_LOSSES
                restart()

    def resume(self, order: protocol.Resume) -> None:
        """Pass an order on to the worker that has the paused rollout; to none when that was lost."""
        for worker in self._workers:
            worker.resume(order)

    def kill(self) -> None:
        """End every worker now."""
        self._closing = True
        for worker in list(self._workers):
            worker.kill(_died("stopped"))

    async def _run_alone(self, job: Job, listen: Callable[[Progress], None]) -> Done:
        async with self._solo:
            worker = self._kept_ahead() or await self._hire()
            # Nobody else's: it takes this one job.
            worker.leaving.set()
            try:
                await worker.loaded(self._load_limit)
                return await worker.run(job, listen)
            finally:
                self._group.start_soon(worker.stop)

    def _kept_ahead(self) -> WorkerProcess | None:
        """Of the workers that were started before there was a job for them, the one that is ready first."""
        if not self._alone:
            return None
        return next((worker for worker in self._workers if not worker.leaving.is_set()), None)

    async def _hire(self) -> WorkerProcess:
        worker = WorkerProcess(self._note_sources)
        # A process that was started without anybody attending to it would outlive the run.
        with anyio.CancelScope(shield=True):
            self._starting += 1
            try:
                await worker.start(self._spawner)
            except (OSError, EOFError) as error:
                raise StartError(f"a worker process can't be started: {error or type(error).__name__}") from error
            finally:
                self._starting -= 1
            self._workers.append(worker)
            self._group.start_soon(self._attend, worker)
        return worker

    async def _pick(self) -> WorkerProcess:
        while True:
            free = [worker for worker in self._workers if worker.accepts]
            least = min(free, key=lambda worker: worker.load, default=None)
            if least is None and self._start_error is not None:
                raise self._start_error
            # What is more than its share waits for a worker that is about to come.
            complete = len(free) >= self._size or self._start_error is not None
            if least is not None and (complete or least.load < self._share):
                return least
            await self._changed.wait()

    async def _keep_one(self) -> None:
        """Keep one worker alive: when it is lost or retires, start the next."""
        while not self._closing and self._start_error is None:
            try:
                worker = await self._hire()
                await worker.loaded(self._load_limit)
            except StartError as error:
                await self._start_failed(error)
                continue
            self._failed_starts = 0
            self._was_ready = True
            self._notify()
            await worker.leaving.wait()

    async def _start_failed(self, error: StartError) -> None:
        """Give up when no worker could ever be started, or when several in a row can't any more."""
        self._failed_starts += 1
        self._hopeful -= 1
        hopeless = self._failed_starts >= MAX_FAILED_STARTS if self._was_ready else self._hopeful == 0
        if hopeless:
            self._start_error = error
            self._notify()
        while not self._was_ready and self._start_error is None:
            await self._changed.wait()

    def _note_sources(self, sources: dict[str, str]) -> None:
        for path, content in sources.items():
            if self.sources.setdefault(path, content) != content:
                self.mixed = True

    async def _attend(self, worker: WorkerProcess) -> None:
        try:
            await worker.read()
        finally:
            self._workers.remove(worker)
            self._notify()

    def _notify(self) -> None:
        """Wake whoever waits for a worker to come, to go, or to have less to do."""
        if self._changed.statistics().tasks_waiting:
            self._changed.set()
            self._changed = anyio.Event()

    async def _watch(self) -> None:
        """End workers that hold too much memory, that no longer show any life, or that retired and are empty."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            for worker in list(self._workers):
                if worker.ended.is_set():
                    continue
                if worker.leaving.is_set() and worker.taken and not worker.load and not worker.stopping:
                    self._group.start_soon(worker.stop)
                if (held := worker.memory()) > self._memory_limit:
                    limit = self._memory_limit >> 20
                    worker.kill(
                        _died(f"it held {held >> 20} MiB of memory, over the limit of {limit} MiB (--worker-memory)")
                    )
                elif worker.ready and monotonic() - worker.last_beat > self._freeze_limit:
                    worker.kill(_blocked(f"user code held the interpreter for {self._freeze_limit:.0f} s"))

    async def _stop_all(self) -> None:
        while self._workers or self._starting:
            async with anyio.create_task_group() as group:
                for worker in list(self._workers):
                    group.start_soon(worker.stop)
            await anyio.sleep(0.005)


def _signal_name(number: int) -> str:
    # Real-time signals have no name of their own.
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


def _died(how: str) -> Failure:
    return Failure("worker", how, kind="died")


def _blocked(how: str) -> Failure:
    return Failure("timeout", how, kind="blocked")


def _note_user_code(inside: set[str], event: Progress) -> None:
    """Keep track of the tool calls, scores and loop's code that are running on a job's behalf."""
    if isinstance(event, protocol.Acting):
        inside.add("agent")
    elif isinstance(event, protocol.Asked):
        inside.clear()
    elif isinstance(event, protocol.TurnDone):
        inside.clear()
        inside.update(call["id"] for call in event.message.get("tool_calls") or ())
    elif isinstance(event, protocol.CallDone):
        inside.discard(event.call.id)
    elif isinstance(event, protocol.ScoringStarted):
        inside.add(event.function)
    elif isinstance(event, protocol.Paused):
        # From now on a person may call tools by hand in it.
        inside.add("paused")
