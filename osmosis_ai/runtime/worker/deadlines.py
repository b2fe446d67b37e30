"""Deadlines that pause while another job blocks the event loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import anyio

__all__ = ["Deadline", "Deadlines", "elapsed_ms"]


class Deadlines:
    """The active deadlines of one worker.

    A tool that blocks the event loop holds up every other rollout. When the loop runs again, `give_back` moves all
    deadlines by the blocked time, so that no rollout times out through another's fault.
    """

    def __init__(self) -> None:
        self._running: dict[anyio.CancelScope, str] = {}

    def limit(self, seconds: float | None, job: str) -> Deadline:
        """Cancel the block after `seconds` (None: never); `scope.cancelled_caught` is True if that happened."""
        return Deadline(self._running, seconds, job)

    def give_back(self, seconds: float, culprit: str | None) -> None:
        """Move every deadline but the culprit's by the time the loop was blocked, in seconds."""
        for scope, job in self._running.items():
            if job != culprit and not scope.cancel_called:
                scope.deadline += seconds

    @contextmanager
    def suspended(self, job: str) -> Iterator[None]:
        """Pause a job's deadlines for the block, while the user thinks."""
        left = {scope: scope.deadline - anyio.current_time() for scope, owner in self._running.items() if owner == job}
        for scope in left:
            scope.deadline = math.inf
        try:
            yield
        finally:
            for scope, seconds in left.items():
                scope.deadline = anyio.current_time() + seconds

    def expired(self, job: str) -> bool:
        """Return True if a deadline of a job has expired. Callable from any thread, even if the loop is blocked."""
        # The loop's clock is time.monotonic() on every platform; copied first because the loop's thread may change it.
        now = monotonic()
        return any(owner == job and scope.deadline <= now for scope, owner in list(self._running.items()))


class Deadline:
    """One deadline, as a context manager that returns its cancel scope. Made by `Deadlines.limit`."""

    def __init__(self, running: dict[anyio.CancelScope, str], seconds: float | None, job: str) -> None:
        self._running = running
        self._seconds = seconds
        self._job = job
        self._scope: anyio.CancelScope

    def __enter__(self) -> anyio.CancelScope:
        deadline = math.inf if self._seconds is None else anyio.current_time() + self._seconds
        self._scope = anyio.CancelScope(deadline=deadline).__enter__()
        self._running[self._scope] = self._job
        return self._scope

    def __exit__(self, *exc: Any) -> bool:
        del self._running[self._scope]
        return bool(self._scope.__exit__(*exc))


def elapsed_ms(since: float) -> float:
    """Return the milliseconds since a `time.monotonic()` reading."""
    return round((monotonic() - since) * 1000, 3)
