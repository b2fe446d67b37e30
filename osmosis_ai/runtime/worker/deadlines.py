"""Time limits that don't run while the event loop stands still through somebody else's fault."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import anyio

__all__ = ["Deadline", "Deadlines", "elapsed_ms"]


class Deadlines:
    """The running time limits of one worker.

    A tool that blocks the event loop holds up every rollout beside it. When the loop runs again, `give_back` moves all
    deadlines by the time it stood still, so that nobody times out for what another rollout did.
    """

    def __init__(self) -> None:
        self._running: dict[anyio.CancelScope, str] = {}

    def limit(self, seconds: float | None, job: str) -> Deadline:
        """Cancel the block after so many seconds of a job (None: never); `scope.cancelled_caught` tells if it was."""
        return Deadline(self._running, seconds, job)

    def give_back(self, seconds: float, culprit: str | None) -> None:
        """Move every deadline but the culprit's by the time the loop stood still."""
        for scope, job in self._running.items():
            if job != culprit and not scope.cancel_called:
                scope.deadline += seconds

    @contextmanager
    def suspended(self, job: str) -> Iterator[None]:
        """Stop a job's deadlines for the block: a person thinks."""
        left = {scope: scope.deadline - anyio.current_time() for scope, owner in self._running.items() if owner == job}
        for scope in left:
            scope.deadline = math.inf
        try:
            yield
        finally:
            for scope, seconds in left.items():
                scope.deadline = anyio.current_time() + seconds

    def expired(self, job: str) -> bool:
        """True if one of a job's deadlines has expired. Callable from any thread, also while the loop is blocked."""
        # The loop's clock is time.monotonic() on every platform; copied first because the loop's thread may change it.
        now = monotonic()
        return any(owner == job and scope.deadline <= now for scope, owner in list(self._running.items()))


class Deadline:
    """One time limit, as a context manager that gives its cancel scope. Made by `Deadlines.limit`."""

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
    """Milliseconds since a `time.monotonic()` reading."""
    return round((monotonic() - since) * 1000, 3)
