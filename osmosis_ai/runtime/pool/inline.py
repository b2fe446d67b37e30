"""The inline backend: one worker in this process, on this event loop, so that `breakpoint()` works in a tool."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import anyio

from osmosis_ai.errors import StartError
from osmosis_ai.masking import Masker
from osmosis_ai.runtime.code import LoadedCode
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.pool.group import WorkerGroup
from osmosis_ai.runtime.pool.pool import WorkerPool, open_groups
from osmosis_ai.runtime.protocol import Event, NotReady, Order, Retiring, WorkerSpec
from osmosis_ai.runtime.worker.ending import WorkerEndsError
from osmosis_ai.runtime.worker.worker import Worker, follow_orders, load_repository

__all__ = ["open_inline"]


@asynccontextmanager
async def open_inline(spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[WorkerPool]:
    """Load the repository into this process. While it runs, user code's output goes to stderr."""
    os.environ.update(options.environ)
    # Without limits: a debugger may stop user code for any time, and killing the worker can't free memory.
    code = LoadedCode(Path(spec.root))
    spawner = _InlineSpawner(spec, Masker.from_environment(os.environ, options.keys))
    group = WorkerGroup(spawner, code, 1, sys.maxsize, math.inf, spec.batch_size, load_limit=math.inf)
    async with open_groups(spec, group, group) as pool:
        yield pool


class _InlineSpawner:
    def __init__(self, spec: WorkerSpec, masker: Masker) -> None:
        self._spec = spec
        self._masker = masker

    async def spawn(self) -> _InlineChannel:
        return _InlineChannel(self._spec, self._masker)

    def wake(self) -> None:
        """Do nothing: no process starts this worker."""

    def stop(self) -> None:
        """Do nothing: no start takes time."""

    async def aclose(self) -> None:
        """Do nothing: there is no process to end."""


class _InlineChannel:
    """A worker that runs in the task that reads its events."""

    ending = "stopped"

    def __init__(self, spec: WorkerSpec, masker: Masker) -> None:
        self._spec = spec
        self._masker = masker
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._scope = anyio.CancelScope()
        self._loop = asyncio.get_running_loop()

    def last_words(self) -> list[str]:
        # Its output is on stderr already.
        return []

    async def read(self, take: Callable[[Event], None]) -> None:
        def emit(event: Event) -> None:
            # A new worker would be in this process too, along with the blocked thread.
            if not isinstance(event, Retiring):
                take(event)

        with self._scope, _output_to_stderr(self._masker):
            try:
                async with Worker.open(load_repository(self._spec), emit) as worker:
                    await follow_orders(worker, self._orders.get, worker.run)
            except StartError as error:
                take(NotReady(type(error).__name__, str(error)))
            except WorkerEndsError as error:
                take(error.event)

    def send(self, order: Order) -> None:
        self._orders.put_nowait(order)

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self._scope.cancel)

    def memory(self) -> int:
        return 0

    def stopped(self) -> bool:
        return False


class _MaskedStream:
    """Stderr for user code: each thread's text is masked line by line, or up to where it is flushed."""

    def __init__(self, stream: TextIO, masker: Masker) -> None:
        self._stream = stream
        self._masker = masker
        self._begun: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        lines, end, rest = (self._begun.pop(thread, "") + text).rpartition("\n")
        if rest:
            self._begun[thread] = rest
        if end:
            self._stream.write(self._masker.text(f"{lines}\n"))
        return len(text)

    def flush(self) -> None:
        self._stream.write(self._masker.text(self._begun.pop(threading.get_ident(), "")))
        self._stream.flush()

    def finish(self) -> None:
        """Write what no thread has ended with a line break."""
        for thread in list(self._begun):
            self._stream.write(self._masker.text(self._begun.pop(thread)))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


@contextmanager
def _output_to_stderr(masker: Masker) -> Iterator[None]:
    """Redirect stdout to stderr, so that user code, even C code, never writes between the results."""
    sys.stdout.flush()
    # The descriptor too, for C code and child processes.
    stdout, stderr, saved = sys.stdout, sys.stderr, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = masked = _MaskedStream(stderr, masker)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        masked.finish()
        os.dup2(saved, 1)
        os.close(saved)
