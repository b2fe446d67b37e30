"""Run sync functions in threads that can be abandoned, several calls one after the other in the same thread."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Generic, TypeVar

from osmosis_ai.shortage import shortage_of

__all__ = ["Overdue", "run_series"]

KEPT_THREADS = 16

T = TypeVar("T")


class Overdue:
    """The result of a call that took too long and was abandoned."""


async def run_series(call: Callable[[int], T], positions: Sequence[int], seconds: float) -> list[T | Overdue]:
    """Make a call for each position, one after the other in one thread, each in its own context. `call` must not raise.

    The first call that takes longer than `seconds` ends the series: its result is Overdue, and later ones are missing.
    Its thread is abandoned, as it is if the caller is cancelled. Raises ShortageError if there is no thread to be had.
    """
    series = _Series(call, positions, seconds)
    _idle_thread().put(series.run)
    return await series.results()


class _Series(Generic[T]):
    def __init__(self, call: Callable[[int], T], positions: Sequence[int], seconds: float) -> None:
        self._call = call
        self._positions = positions
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._results: list[T | Overdue] = []
        # The running call and its start, in one object, because two threads access it.
        self._current = (0, perf_counter())
        self._left = False

    def run(self) -> None:
        """Make the calls; runs in the thread."""
        for number, position in enumerate(self._positions):
            if self._left:
                return
            self._current = (number, perf_counter())
            self._results.append(self._context.copy().run(self._call, position))
        if not self._left:
            # A closed event loop has no waiters left.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end)

    async def results(self) -> list[T | Overdue]:
        """Wait for the results; runs on the event loop."""
        timer = self._loop.call_later(self._seconds, self._look)
        try:
            await self._ended
        finally:
            self._left = True
            timer.cancel()
        return self._results

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _look(self) -> None:
        if self._ended.done():
            return
        number, started = self._current
        taken = perf_counter() - started
        if taken >= self._seconds and len(self._results) == number:
            self._left = True
            self._results = [*self._results[:number], Overdue()]
            self._end()
        else:
            self._loop.call_later(max(self._seconds - taken, 0.001), self._look)


class _Thread:
    """A thread that runs the given work, then waits for more.

    A daemon, unlike the threads of anyio and of executors, so that a function that never returns can't keep the process
    alive. The number of threads isn't limited, so no call waits for another to end.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="osmosis-scoring", daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            work()
            # Otherwise an idle thread would keep the last results alive.
            del work
            if len(_idle) >= KEPT_THREADS:
                return
            _idle.append(self)


_idle: list[_Thread] = []
# A process that user code forks has no copies of these threads.
os.register_at_fork(after_in_child=_idle.clear)


def _idle_thread() -> _Thread:
    try:
        return _idle.pop() if _idle else _Thread()
    except RuntimeError as error:
        # The function that should run isn't to blame.
        raise shortage_of(error) or error from error
