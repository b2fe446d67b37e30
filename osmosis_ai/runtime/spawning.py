"""How worker processes come to be: forked from a server with warm imports, or from one that has loaded the repo."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import anyio
import msgspec

from osmosis_ai.runtime import frames
from osmosis_ai.runtime.process import Boot, Exited, Forked, TemplateEvent, read_frame, template_main, worker_main

__all__ = ["ForkServerSpawner", "Spawned", "Spawner", "TemplateSpawner"]

PRELOAD = ["osmosis_ai.runtime.preload"]


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

    async def aclose(self) -> None:
        """Start no more."""


class ForkServerSpawner:
    """Forks from multiprocessing's fork server; where there is none, starts a new interpreter.

    Args:
        boot: What each worker loads.
    """

    def __init__(self, boot: Boot) -> None:
        self._boot = frames.encode(boot)

    async def spawn(self, jobs: socket.socket, events: socket.socket) -> Spawned:
        return await _start(worker_main, jobs, events, self._boot)

    async def aclose(self) -> None:
        """The fork server ends with this process."""


class TemplateSpawner:
    """Forks from a process that has loaded the repository, so that every worker starts with fresh module globals.

    Args:
        boot: What the template loads.
    """

    def __init__(self, boot: Boot) -> None:
        self._boot = frames.encode(boot)
        self._lock = asyncio.Lock()
        self._control: socket.socket | None = None
        self._template: Spawned | None = None
        self._children: dict[int, Spawned] = {}
        self._forked: asyncio.Queue[int | None] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None

    async def spawn(self, jobs: socket.socket, events: socket.socket) -> Spawned:
        async with self._lock:
            if self._template is None or self._template.exited.is_set():
                await self._start_template()
            assert self._control is not None
            socket.send_fds(self._control, [b"f"], [jobs.fileno(), events.fileno()])
            pid = await self._forked.get()
            if pid is None:
                # It never came to fork: what the template had to say stands in the run's log.
                raise OSError("the template process that has loaded the repository was lost")
            return self._children[pid]

    async def aclose(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._reading is not None:
            await self._reading

    async def _start_template(self) -> None:
        if self._reading is not None:
            await self._reading
        self._control, far = socket.socketpair()
        reports, reports_far = socket.socketpair()
        with far, reports_far:
            self._template = await _start(template_main, far, reports_far, self._boot)
        self._reading = asyncio.create_task(self._read(reports))

    async def _read(self, reports: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=reports)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                event = msgspec.json.decode(await read_frame(reader), type=TemplateEvent)
                if isinstance(event, Forked):
                    self._children[event.pid] = Spawned(event.pid)
                    self._forked.put_nowait(event.pid)
                elif isinstance(event, Exited):
                    self._children.pop(event.pid).end(event.code)
        writer.close()
        self._forked.put_nowait(None)
        for child in self._children.values():
            child.end(None)
        self._children.clear()


async def _start(target: Callable[..., None], first: socket.socket, second: socket.socket, boot: bytes) -> Spawned:
    if "forkserver" in multiprocessing.get_all_start_methods():
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(PRELOAD)
        process: multiprocessing.process.BaseProcess = forkserver.Process(target=target, args=(first, second, boot))
    else:
        process = multiprocessing.get_context("spawn").Process(target=target, args=(first, second, boot))
    await asyncio.to_thread(process.start)
    spawned = Spawned(process.pid or 0)
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(process.sentinel)
        process.join()
        spawned.end(process.exitcode)
        process.close()

    loop.add_reader(process.sentinel, ended)
    return spawned
