"""Run user code with a deadline that holds even if the code ignores cancellation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.tracebacks import describe

__all__ = ["CANCEL_GRACE", "DeadlineError", "within"]

logger = logging.getLogger(__name__)

CANCEL_GRACE = 5.0
"""Seconds that cancelled code has to clean up. After that it is abandoned, and its rollout ends without it."""

ResultT = TypeVar("ResultT")


class DeadlineError(OsmosisRolloutError):
    """User code exceeded its deadline."""


async def within(
    seconds: float | None, work: Callable[[], Awaitable[ResultT]], *, grace: float = CANCEL_GRACE
) -> ResultT:
    """Run user code in its own task, and return its result.

    Code that is cancelled, by the deadline or along with its caller, gets some time to clean up.

    Args:
        seconds: The deadline in seconds from now; None for none. If zero or less, nothing runs.
        work: The code.
        grace: Seconds that cancelled code has to end.

    Raises:
        DeadlineError: The code didn't end in time, or blocked the event loop past its deadline.
        Exception: Whatever the code raised. SystemExit and cancellation from inside become a RuntimeError.
    """
    if seconds is not None and seconds <= 0:
        raise DeadlineError
    started = time.monotonic()
    task = asyncio.ensure_future(_guarded(work))
    try:
        # Not `wait_for`, which would wait for as long as the code ignores its cancellation.
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop(task, grace)
        raise
    if not task.done():
        await _stop(task, grace)
        raise DeadlineError
    if task.cancelled():
        raise RuntimeError("it was cancelled from inside")
    error = task.exception()
    # It blocked the event loop, so its deadline was noticed only after its end.
    if error is None and seconds is not None and time.monotonic() - started > seconds:
        raise DeadlineError
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(describe(error)) from error
    return task.result()


async def _guarded(work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    try:
        return await work()
    except SystemExit as error:
        # Outside a task's coroutine it would end the server.
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


async def _stop(task: asyncio.Future[Any], grace: float) -> None:
    task.add_done_callback(_consume)
    task.cancel()
    _, running = await asyncio.wait({task}, timeout=grace)
    if running:
        logger.warning("a workflow or grader ignored its cancellation and was abandoned: %s", task)


def _consume(task: asyncio.Future[Any]) -> None:
    # Otherwise asyncio would report an exception that nobody retrieved.
    if not task.cancelled():
        task.exception()
