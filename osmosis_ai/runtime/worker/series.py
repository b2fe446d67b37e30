"""Runs sync functions in threads that can be left behind, several calls one after the other in the same thread."""

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

__all__ = ["Overdue", "run_series"]

KEPT_THREADS = 16

T = TypeVar("T")


class Overdue:
    """Stands for the result of a call that took too long and was left behind."""


async def run_series(call: Callable[[int], T], positions: Sequence[int], seconds: float) -> list[T | Overdue]:
    """Call for each position, one after the other in one thread, each call in a context of its own. It may raise
    nothing.

    The first call that takes longer than so many seconds ends the series: its result is Overdue, and those behind it
    are missing. Its thread is left behind, as it is when whoever waits here is cancelled.
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
        # Which call runs and since when, in one object, because two threads look at it.
        self._current = (0, perf_counter())
        self._left = False

    def run(self) -> None:
        """The thread's part."""
        for number, position in enumerate(self._positions):
            if self._left:
                return
            self._current = (number, perf_counter())
            self._results.append(self._context.copy().run(self._call, position))
        if not self._left:
            # Whoever closed its event loop no longer waits.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end)

    async def results(self) -> list[T | Overdue]:
        """The event loop's part."""
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
    """A thread that does what it is given, and then waits for more.

    A daemon, unlike those of anyio and of executors: a function that never returns must not keep the process from
    ending. There are as many as are needed at once, so that no call waits for another one's end.
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
            del work
            if len(_idle) >= KEPT_THREADS:
                return
            _idle.append(self)


_idle: list[_Thread] = []
# The threads aren't there in a process that user code has forked.
os.register_at_fork(after_in_child=_idle.clear)


def _idle_thread() -> _Thread:
    try:
        return _idle.pop()
    except IndexError:
        return _Thread()
