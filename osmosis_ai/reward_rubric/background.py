"""The thread on whose event loop all judge calls of a process run.

One loop for all of them keeps connections open between calls, whatever thread or event loop a call comes from:
LiteLLM's clients belong to the loop that used them first.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["at_end", "submit", "wait"]

T = TypeVar("T")

CLOSING_SECONDS = 2.0

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_closers: list[Callable[[], Awaitable[None]]] = []


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start work on the loop; cancelling the future cancels the work."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # A daemon: a judge that doesn't answer must not keep the process from ending.
            threading.Thread(target=_loop.run_forever, name="judge calls", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, _loop)


def wait(future: Future[T]) -> T:
    """Block the calling thread until the work is done; an interrupted wait cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def at_end(close: Callable[[], Awaitable[None]]) -> None:
    """Have something closed on the loop when the process ends."""
    _closers.append(close)


async def _close() -> None:
    # A call that still runs has a thread waiting for it, which would report that its connection was closed.
    if asyncio.all_tasks() == {asyncio.current_task()}:
        for close in _closers:
            await close()


def _end() -> None:
    if _loop is not None:
        with suppress(FutureTimeoutError):
            asyncio.run_coroutine_threadsafe(_close(), _loop).result(CLOSING_SECONDS)


def _forget() -> None:
    """A fork takes no thread along: the child starts its own when it needs one."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()
    _closers.clear()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
