"""The pool's handle on one worker, over a channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import anyio
import msgspec

from osmosis_ai.errors import StartError, WorkerError, start_error
from osmosis_ai.records import Failure
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.pool.base import Channel
from osmosis_ai.runtime.protocol import Done, Event, Job, Progress
from osmosis_ai.tracebacks import describe

__all__ = ["Loss", "WorkerHandle", "WorkerLostError", "blocked", "died"]

STOP_SECONDS = 5.0
MAX_LOOKS_STOPPED = 4
_BEGINNINGS = (protocol.Acting, protocol.TurnDone, protocol.ScoringStarted)
_STEPS = (protocol.Asked, protocol.CallDone, protocol.RolloutDone)
"""Events that user code has caused."""


@dataclass
class Loss:
    """The loss of a worker, which all its unfinished jobs share.

    The job to blame gets `failure`. `culprit` is the job that blocked the event loop, if that ended the worker;
    `suspects` are the jobs that were inside user code. If the worker is `shared`, another job was ever in it: even a
    finished one may have left a running thread. `explained` becomes true when a job is blamed for the loss.
    """

    failure: Failure
    culprit: str | None = None
    suspects: frozenset[str] = frozenset()
    shared: bool = True
    explained: bool = False


class WorkerLostError(WorkerError):
    """A worker ended with unfinished jobs."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.failure.message)
        self.loss = loss


class _Assignment:
    """A worker's job with its listener; `inside` holds the user code that runs for it, and `began` is the number of the
    event with which that code last began.
    """

    def __init__(self, job: Job, listen: Callable[[Progress], None]) -> None:
        self.job = job
        self.listen = listen
        self.inside: set[str] = set()
        self.began = 0
        self.done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()


class WorkerHandle:
    """One worker and its jobs. It makes progress only while `read` runs.

    `found` is called with what the worker loads, at the start and later; at the start it may return a reason why the
    worker can't be used.
    """

    def __init__(self, channel: Channel, found: Callable[[protocol.Ready | protocol.Imported], str | None]) -> None:
        self._channel = channel
        self._found = found
        self.ready: protocol.Ready | None = None
        self.taken = 0
        self.stopping = False
        self.last_beat = monotonic()
        self._looks_stopped = 0
        self.settled = anyio.Event()
        self.reserved = False
        self.leaving = anyio.Event()
        self.ended = anyio.Event()
        self._jobs: dict[str, _Assignment] = {}
        self._events = 0
        self._last_step = 0
        self._end: Failure | None = None
        self._refused = False
        self._culprit: str | None = None
        self._not_ready: protocol.NotReady | None = None

    @property
    def load(self) -> int:
        """Number of current jobs."""
        return len(self._jobs)

    @property
    def accepts(self) -> bool:
        """True if the worker takes any new job."""
        return self.ready is not None and not self.reserved and not self.leaving.is_set()

    async def loaded(self, seconds: float) -> None:
        """Wait until the worker has loaded the repository; raise StartError if it fails, or exceeds `seconds`."""
        with anyio.move_on_after(seconds):
            await self.settled.wait()
        if self.ready is None:
            if not self.ended.is_set():
                self.kill(died(f"it did not finish within {seconds:g} s"))
                await self.ended.wait()
            raise self._start_error()

    async def run(self, job: Job, listen: Callable[[Progress], None]) -> Done:
        """Run one job to its last event; raise WorkerLostError if the worker ends first."""
        if self.ended.is_set():
            raise WorkerLostError(Loss(self._how_it_ended()))
        assignment = self._jobs[job.id] = _Assignment(job, listen)
        self.taken += 1
        try:
            self._channel.send(job)
            return await assignment.done
        except asyncio.CancelledError:
            # Otherwise the job would keep running with no caller waiting for it.
            if not self.ended.is_set():
                self._channel.send(protocol.Cancel(job.id))
            raise
        finally:
            self._jobs.pop(job.id, None)

    def resume(self, order: protocol.Resume) -> None:
        """Pass an order on to a paused rollout, if it is in this worker."""
        if order.id in self._jobs and not self.ended.is_set():
            self._channel.send(order)

    async def read(self) -> None:
        """Process events until the worker ends; then its remaining jobs are lost."""
        try:
            await self._channel.read(self._take)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            self._end = self._end or died(f"it sent what can't be read: {error}")
        finally:
            self._lose_jobs()

    async def stop(self) -> None:
        """Let the worker close its server properly; kill it if that takes too long."""
        self.stopping = True
        if not self.ended.is_set() and self.ready is not None and not self._jobs:
            self._channel.send(protocol.Stop())
            with anyio.move_on_after(STOP_SECONDS):
                await self.ended.wait()
        if not self.ended.is_set():
            self.kill(died("stopped"))
            await self.ended.wait()

    def kill(self, why: Failure) -> None:
        """Kill the worker and everything it started, now."""
        # The first reason counts: a kill may follow the worker's own report.
        self._end = self._end or why
        self._channel.kill()

    def memory(self) -> int:
        """Return the worker's memory in bytes."""
        return self._channel.memory()

    def end_stopped(self) -> None:
        """Kill the worker if this and the last calls found it stopped; a whole system may be stopped for a while."""
        self._looks_stopped = self._looks_stopped + 1 if self._channel.stopped() else 0
        if self._looks_stopped > MAX_LOOKS_STOPPED:
            self.kill(blocked("user code stopped the process (SIGSTOP)"))

    def _take(self, event: Event) -> None:
        if self._refused:
            return
        # Any event is a sign of life.
        self.last_beat = monotonic()
        try:
            self._process(event)
        except Exception as error:  # noqa: BLE001 - user code can write anything into its worker's socket
            # Until the kill takes effect, the worker may go on as if nothing had happened.
            self._refused = True
            self.kill(died(f"it sent an event that doesn't fit its job: {describe(error)}"))

    def _process(self, event: Event) -> None:
        self._events += 1
        if isinstance(event, _STEPS) or (isinstance(event, protocol.Acting) and event.taken):
            self._last_step = self._events
        if isinstance(event, Progress):
            assignment = self._jobs.get(event.job)
            if assignment is not None and not assignment.done.done():
                _note_user_code(assignment.inside, event)
                if isinstance(event, _BEGINNINGS):
                    assignment.began = self._events
                assignment.listen(event)
        elif isinstance(event, Done):
            assignment = self._jobs.get(event.job)
            if assignment is not None and not assignment.done.done():
                _check_fit(assignment.job, event)
                assignment.done.set_result(event)
        elif isinstance(event, protocol.Ready):
            refusal = self._found(event)
            if refusal is not None:
                self.kill(died(refusal))
                return
            self.ready = event
            self.settled.set()
        elif isinstance(event, protocol.NotReady):
            self._not_ready = event
        elif isinstance(event, protocol.Imported):
            self._found(event)
        elif isinstance(event, protocol.Retiring):
            self.leaving.set()
        elif isinstance(event, protocol.Dying):
            self._end = died(event.reason)
        elif isinstance(event, protocol.Stuck):
            self._culprit = event.job
            self._end = blocked(f"user code held the event loop for {event.seconds:.0f} s")

    def _lose_jobs(self) -> None:
        for event in (self.ended, self.leaving, self.settled):
            event.set()
        if self._not_ready is not None:
            # It lacks threads that its jobs need, through no fault of theirs.
            self._end = Failure("worker", self._not_ready.message, kind="start")
            for assignment in self._jobs.values():
                assignment.inside.clear()
        inside = frozenset(job for job, assignment in self._jobs.items() if assignment.inside)
        culprit = self._culprit
        loss = Loss(self._how_it_ended(), culprit, inside, shared=self.taken > 1, explained=culprit is not None)
        # Jobs rerun alone in the order in which they are notified, so notify the likeliest culprits first: those whose
        # code started closest to the last event.
        for assignment in sorted(self._jobs.values(), key=lambda each: abs(each.began - self._last_step)):
            if not assignment.done.done():
                assignment.done.set_exception(WorkerLostError(loss))

    def _how_it_ended(self) -> Failure:
        if self._end is not None:
            return self._end
        return died(self._channel.ending)

    def _start_error(self) -> StartError:
        if self._not_ready is None:
            lines = [self._how_it_ended().message, *self._channel.last_words()]
            how = "\n    ".join(lines)
            return StartError(f"the repository can't be loaded, because its worker was lost: {how}")
        return start_error(self._not_ready.error, self._not_ready.message)


def died(how: str) -> Failure:
    """Make the failure for a worker that died or was killed."""
    return Failure("worker", how, kind="died")


def blocked(how: str) -> Failure:
    """Make the failure for a worker that was ended because user code blocked it."""
    return Failure("timeout", how, kind="blocked")


def _check_fit(job: Job, done: Done) -> None:
    """Raise ValueError if an event can't be the last one of a job."""
    if not isinstance(done, protocol.DONE[type(job)]):
        raise ValueError(f"{type(done).__name__} for a {type(job).__name__}")
    if isinstance(job, protocol.ScoreJob) and isinstance(done, protocol.ScoresDone) and done.error is None:
        # A score exists only under the name of a function that the run asked for.
        named = [[score.function for score in scores] for scores in done.scores]
        if named != [job.functions] * len(job.inputs):
            raise ValueError("scores of other functions or rollouts than those asked for")


def _note_user_code(inside: set[str], event: Progress) -> None:
    """Track the tool calls, scoring functions and loop code that run for a job."""
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
        # While paused, the user may call tools by hand.
        inside.add("paused")
