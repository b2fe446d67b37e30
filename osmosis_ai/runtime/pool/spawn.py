"""How worker processes come to be: forked from a server with warm imports, or from one that has loaded the repo."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import anyio
import msgspec

from osmosis_ai.process_tree import end_processes
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.pool import forkserver
from osmosis_ai.runtime.worker.main import Boot, Forked, TemplateEvent, read_frame, template_main, worker_main

__all__ = [
    "LOAD_SECONDS",
    "ForkServerSpawner",
    "Spawned",
    "Spawner",
    "TemplateSpawner",
]

LOAD_SECONDS = 120.0
"""How long user code may take to load."""

_PROCESSES = ThreadPoolExecutor(max_workers=1, thread_name_prefix="osmosis-spawn")
"""One thread for all that `multiprocessing` does: it goes through every process it knows whenever it starts one, and
mustn't find one there that another thread is just closing."""


class Spawned:
    """A process that was started. `exit_code` is set once it has ended; negative for the signal that ended it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self.exited = anyio.Event()

    def end(self, exit_code: int | None) -> None:
        """It has ended."""
        self.exit_code = exit_code
        self.exited.set()


class Spawner(Protocol):
    """Starts worker processes of one kind."""

    async def spawn(self, jobs: socket.socket, events: socket.socket) -> Spawned:
        """Start one with its ends of the two sockets; raises OSError when it can't."""
        ...

    def stop(self) -> None:
        """Start no more, and give up a start that doesn't come to an end."""
        ...

    async def aclose(self) -> None:
        """End what was needed for starting them."""


class ForkServerSpawner:
    """Forks from multiprocessing's fork server; where there is none, starts a new interpreter.

    Args:
        boot: What each worker loads.
    """

    def __init__(self, boot: Boot) -> None:
        self._boot = protocol.encode(boot)

    async def spawn(self, jobs: socket.socket, events: socket.socket) -> Spawned:
        return await _start(worker_main, jobs, events, self._boot)

    def stop(self) -> None:
        """A start takes no longer than the fork server's own imports."""

    async def aclose(self) -> None:
        """The fork server ends with this process."""


class TemplateSpawner:
    """Forks from a process that has loaded the repository, so that every worker starts with fresh module globals.

    Args:
        boot: What the template loads.
    """

    def __init__(self, boot: Boot) -> None:
        self._boot = protocol.encode(boot)
        self._lock = asyncio.Lock()
        self._template: _Template | None = None
        self._stopped = False

    async def spawn(self, jobs: socket.socket, events: socket.socket) -> Spawned:
        async with self._lock:
            if self._stopped:
                raise OSError("no more are started")
            if self._template is not None and self._template.process.exited.is_set():
                await self._template.aclose()
                self._template = None
            if self._template is None:
                self._template = await _Template.start(self._boot)
            return await self._template.fork(jobs, events)

    def stop(self) -> None:
        """Give up a template that is still loading, which user code may hold up for good."""
        self._stopped = True
        if self._template is not None and not self._template.loaded:
            end_processes(self._template.process.pid)

    async def aclose(self) -> None:
        if self._template is not None:
            await self._template.aclose()


class _Template:
    """A process that has loaded the repository, or is about to, and forks workers. Made by `start`."""

    def __init__(self, process: Spawned, control: socket.socket, reports: socket.socket) -> None:
        self.process = process
        self.loaded = False
        self._control = control
        self._children: dict[int, Spawned] = {}
        self._forked: asyncio.Queue[Spawned | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(reports))

    @classmethod
    async def start(cls, boot: bytes) -> _Template:
        control, control_far = socket.socketpair()
        reports, reports_far = socket.socketpair()
        with control_far, reports_far:
            process = await _start(template_main, control_far, reports_far, boot)
        return cls(process, control, reports)

    async def fork(self, jobs: socket.socket, events: socket.socket) -> Spawned:
        """Fork a worker; raises OSError when the template is lost or takes too long to load."""
        socket.send_fds(self._control, [b"f"], [jobs.fileno(), events.fileno()])
        child = None
        with anyio.move_on_after(LOAD_SECONDS) as waiting:
            child = await self._forked.get()
        if waiting.cancelled_caught:
            end_processes(self.process.pid)
            raise OSError(f"the repository did not load within {LOAD_SECONDS:.0f} s")
        if child is None:
            raise OSError("the process that has loaded the repository was lost; what it said stands in the run's log")
        self.loaded = True
        return child

    async def aclose(self) -> None:
        """End the process. Workers that it has forked end with it."""
        self._control.close()
        end_processes(self.process.pid)
        await self.process.exited.wait()
        # Its end has been seen: whoever else may hold its socket open need not be waited for.
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self, reports: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=reports)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    event = msgspec.json.decode(await read_frame(reader), type=TemplateEvent)
                    if isinstance(event, Forked):
                        child = self._children[event.pid] = Spawned(event.pid)
                        self._forked.put_nowait(child)
                    else:
                        self._children.pop(event.pid).end(event.code)
        finally:
            writer.close()
            self._forked.put_nowait(None)
            for child in self._children.values():
                end_processes(child.pid)
                child.end(None)
            self._children.clear()


async def _start(target: Callable[..., None], first: socket.socket, second: socket.socket, boot: bytes) -> Spawned:
    if forkserver.available():
        forkserver.start()
        context = multiprocessing.get_context("forkserver")
        process: multiprocessing.process.BaseProcess = context.Process(target=target, args=(first, second, boot))
    else:
        process = multiprocessing.get_context("spawn").Process(target=target, args=(first, second, boot))
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(_PROCESSES, process.start)
    spawned = Spawned(process.pid or 0)

    def ended() -> None:
        loop.remove_reader(process.sentinel)
        buried = loop.run_in_executor(_PROCESSES, _bury, process)
        buried.add_done_callback(lambda done: spawned.end(done.result()))

    loop.add_reader(process.sentinel, ended)
    return spawned


def _bury(process: multiprocessing.process.BaseProcess) -> int | None:
    process.join()
    code = process.exitcode
    process.close()
    return code
