"""A worker's watchdog thread, which notices a blocked event loop, finds the job to blame and ends a stuck worker."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from osmosis_ai.runtime.worker.deadlines import Deadlines

__all__ = ["JobTasks", "Watchdog"]

BEAT_SECONDS = 0.1
LOOK_SECONDS = 0.2
STALL_SECONDS = 0.5
NOBODYS_STALL_SECONDS = 60.0


class JobTasks:
    """Maps tasks to jobs. It is a task factory, because a task's context is accessible only when the task is made."""

    def __init__(self, current: Callable[[], str | None]) -> None:
        self._current = current
        # Weak keys, so that finished tasks drop out.
        self._jobs: WeakKeyDictionary[asyncio.Future[Any], str] = WeakKeyDictionary()

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        if context is not None:
            options["context"] = context
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
        job = self._current() if context is None else context.run(self._current)
        if job is not None:
            self._jobs[task] = job
        return task

    def running(self, loop: asyncio.AbstractEventLoop) -> str | None:
        """Return the job of the task that runs on the loop right now, if any. Callable from any thread."""
        task = asyncio.current_task(loop)
        return self._jobs.get(task) if task is not None else None


class Watchdog:
    """Watches one event loop. `start` must be called on it.

    A call that blocks the loop can't be cancelled. While it lasts, the deadlines of all other jobs pause. Once it
    exceeds its own job's deadline, the watchdog calls `stuck` with the job to blame (None if no job's task runs) and
    the seconds the loop was blocked; `stuck` must end the process. It calls `beat` about once a second while the
    process lives, and `orphaned` when the parent process is gone. All three are called from the thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deadlines: Deadlines,
        tasks: JobTasks,
        *,
        beat: Callable[[], None],
        stuck: Callable[[str | None, float], None],
        orphaned: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._deadlines = deadlines
        self._tasks = tasks
        self._beat = beat
        self._stuck = stuck
        self._orphaned = orphaned
        self._last_beat = monotonic()
        self._holder: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="osmosis-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread; called on the loop."""
        self._last_beat = monotonic()
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _tick(self) -> None:
        now = monotonic()
        late = now - self._last_beat - BEAT_SECONDS
        if late > STALL_SECONDS:
            # Deadlines that expired while the loop was blocked fire in this same iteration, after this timer.
            self._deadlines.give_back(late, self._holder)
        self._holder = None
        self._last_beat = now
        if not self._stop.is_set():
            self._loop.call_later(BEAT_SECONDS, self._tick)

    def _watch(self) -> None:
        parent = os.getppid()
        next_beat = 0.0
        while not self._stop.wait(LOOK_SECONDS):
            now = monotonic()
            # When its parent dies, a process gets another parent.
            if os.getppid() != parent:
                self._orphaned()
            if now >= next_beat:
                self._beat()
                next_beat = now + 1.0
            still = now - self._last_beat - BEAT_SECONDS
            if still < STALL_SECONDS:
                continue
            holder = self._tasks.running(self._loop)
            if holder is None:
                # No job's task runs, so a callback blocks the loop, and no job's deadline applies.
                if still > NOBODYS_STALL_SECONDS:
                    self._stuck(None, still)
                continue
            # `_tick` gives back the time to all jobs but this one.
            self._holder = holder
            if self._deadlines.expired(holder):
                self._stuck(holder, still)
