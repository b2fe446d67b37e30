"""The local backend: workers forked from the fork server, or from a process that has loaded the repository."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import anyio
import msgspec
import psutil

from osmosis_ai.imports import hiding
from osmosis_ai.process_tree import is_stopped, wake
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.bubblewrap import environment
from osmosis_ai.runtime.code import LoadedCode
from osmosis_ai.runtime.forks import ChildProcess, ForkLine, how_it_ended
from osmosis_ai.runtime.logs import last_lines
from osmosis_ai.runtime.pool import forkserver
from osmosis_ai.runtime.pool.base import LOAD_SECONDS, PoolOptions
from osmosis_ai.runtime.pool.group import WorkerGroup
from osmosis_ai.runtime.pool.pool import WorkerPool, open_groups
from osmosis_ai.runtime.protocol import (
    FREEZE_GRACE_SECONDS,
    HEADER,
    Boot,
    Event,
    Order,
    Places,
    WorkerSpec,
    decode_event,
    detach,
    pack,
    read_frame,
)
from osmosis_ai.runtime.worker.forking import TEMPLATE, WORKER
from osmosis_ai.shortage import shortage_of
from osmosis_ai.tasks import task_group

__all__ = ["ForkServerSpawner", "LocalChannel", "TemplateSpawner", "open_local"]

DRAIN_SECONDS = 0.5
SPARE_DESCRIPTORS = 16
EVENT_BUFFER = 1 << 20
LAST_LINES = 10
_TRACED = re.compile(r'^ *File "(.+)", line', re.MULTILINE)


@asynccontextmanager
async def open_local(spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[WorkerPool]:
    """Load the repository into processes: its tools or agent loop into some, its functions into others."""
    alone = spec.batch_size if options.isolation == "rollout" else 0
    # `workers` processes for the tools, and as many for the functions; with sandboxes, as many again start ahead.
    sandboxes = spec.batch_size + 2 * options.workers if spec.sandbox else 0
    memory = options.worker_memory or _fair_share(alone + 2 * options.workers + sandboxes)
    if spec.sandbox is not None:
        forkserver.start_bare(environment(os.environ))
        spec = msgspec.structs.replace(spec, sandbox=msgspec.structs.replace(spec.sandbox, memory=memory))

    # Its name can't be guessed. A worker that dies leaves its rollouts' folders there.
    scratch = Path(tempfile.gettempdir(), f"osmosis-{uuid4().hex}")
    forkserver.start()
    # The code of the repository has no business with the place of the store.
    environ = {**forkserver.changed_environment(), **options.environ, "OSMOSIS_STORE": None}

    def boot(part: WorkerSpec) -> Boot:
        named, places = detach(part)
        places = msgspec.structs.replace(places, log=options.log, scratch=str(scratch))
        return Boot(named, places, options.debug, options.keys, environ)

    share = math.ceil(spec.batch_size / options.workers)
    tools, functions = protocol.agent_part(spec, share), protocol.scorer_part(spec)
    # Within an agent loop, only the whole rollout has a time limit.
    longest_call = spec.limits.timeout if spec.own_agent else min(spec.limits.tool_timeout, spec.limits.timeout)
    # With the grace, the worker's own watchdog comes first; the pool kills only workers with a frozen interpreter.
    longest_call += FREEZE_GRACE_SECONDS
    longest_score = spec.limits.reward_timeout + FREEZE_GRACE_SECONDS
    load = options.load_seconds
    agents = scorers = None
    code = LoadedCode(Path(spec.root))
    has_agent = spec.mcp is not None or spec.own_agent
    if has_agent and options.isolation == "rollout":
        spawner = TemplateSpawner(boot(tools), code)
        agents = WorkerGroup(spawner, code, options.workers, memory, longest_call, 1, alone=alone, load_limit=load)
    elif has_agent:
        workers = ForkServerSpawner(boot(tools), code)
        # A rollout server takes seconds to start.
        slow = spec.workflow is not None
        agents = WorkerGroup(workers, code, options.workers, memory, longest_call, share, spares=slow, load_limit=load)
    if spec.functions:
        workers = ForkServerSpawner(boot(functions), code)
        scorers = WorkerGroup(workers, code, options.workers, memory, longest_score, share, load_limit=load)
    try:
        async with open_groups(spec, agents, scorers) as pool:
            yield pool
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class LocalChannel:
    """A worker process and its two sockets, for orders and for events. Made by `fork`."""

    def __init__(
        self,
        process: ChildProcess,
        places: Places,
        orders: asyncio.StreamWriter,
        events: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._process = process
        self._places = places
        self._orders = orders
        self._reader, self._events = events

    @classmethod
    async def fork(cls, line: ForkLine, boot: Boot, *, booted: bool = False) -> LocalChannel:
        """Fork a worker; raise OSError. `booted` is True if the forking process already has the record."""
        with ExitStack() as unused, ExitStack() as passed_on:
            (jobs, jobs_far), (events, events_far) = socket.socketpair(), socket.socketpair()
            for ours, far in ((jobs, jobs_far), (events, events_far)):
                unused.enter_context(ours)
                passed_on.enter_context(far)
            process = await line.fork(WORKER, jobs_far, events_far)
            record = b"" if booted else pack(boot)
            if boot.spec.sandbox is not None:
                record = _send_line(jobs, record)
            unused.pop_all()
        _, orders = await asyncio.open_unix_connection(sock=jobs)
        orders.write(record)
        return cls(process, boot.places, orders, await asyncio.open_unix_connection(sock=events, limit=EVENT_BUFFER))

    @property
    def ending(self) -> str:
        code = self._process.exit_code
        return "lost with its parent process" if code is None else how_it_ended(code)

    def last_words(self) -> list[str]:
        return _last_words(self._process.pid, self._places)

    async def read(self, take: Callable[[Event], None]) -> None:
        try:
            async with task_group() as group:
                group.start_soon(self._cut_off)
                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    while True:
                        take(decode_event(await read_frame(self._reader)))
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                # Usually it is already ending, and its exit code says how.
                with anyio.move_on_after(DRAIN_SECONDS):
                    await self._process.exited.wait()
                self._process.kill()
                await self._process.exited.wait()
                self._orders.close()
                self._events.close()

    async def _cut_off(self) -> None:
        """Stop reading soon after the worker's death: its children may hold the socket open, but won't send events."""
        await self._process.exited.wait()
        await anyio.sleep(DRAIN_SECONDS)
        with suppress(OSError):
            self._events.get_extra_info("socket").shutdown(socket.SHUT_RD)

    def send(self, order: Order) -> None:
        if not self._orders.is_closing():
            self._orders.write(pack(order))

    def kill(self) -> None:
        self._process.kill()

    def memory(self) -> int:
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except (psutil.Error, OSError):
            # The worker has ended, or this process has no descriptor left to ask.
            return 0

    def stopped(self) -> bool:
        return not self._process.exited.is_set() and is_stopped(self._process.pid)


class ForkServerSpawner:
    """Forks workers from the fork server; each loads the repository itself."""

    def __init__(self, boot: Boot, code: LoadedCode) -> None:
        self._boot = boot
        self._code = code
        self._line: ForkLine | None = None

    async def spawn(self) -> LocalChannel:
        if self._line is None:
            self._line = _fork_server()
        return await LocalChannel.fork(self._line, _same_version(self._boot, self._code))

    def wake(self) -> None:
        forkserver.wake_servers()

    def stop(self) -> None:
        """Do nothing: a start waits only for the fork server's own imports."""

    async def aclose(self) -> None:
        if self._line is not None:
            await self._line.aclose()


class TemplateSpawner:
    """Forks from a process that has loaded the repository, so that every worker starts with fresh module globals."""

    def __init__(self, boot: Boot, code: LoadedCode) -> None:
        self._boot = boot
        self._code = code
        self._lock = asyncio.Lock()
        self._template: _Template | None = None
        self._stopped = False

    async def spawn(self) -> LocalChannel:
        # One start at a time, so that there is only one template.
        async with self._lock:
            if self._stopped:
                raise OSError("no more workers are started")
            if self._template is not None and self._template.process.exited.is_set():
                await self._template.aclose()
                self._template = None
            if self._template is None:
                self._template = await _Template.start(_same_version(self._boot, self._code))
            elif self._template.loaded:
                _leave_descriptors()
            return await self._template.fork()

    def wake(self) -> None:
        forkserver.wake_servers()
        if self._template is not None and not self._template.process.exited.is_set():
            wake(self._template.process.pid)

    def stop(self) -> None:
        """Kill a template that is still loading, because user code may hang in it."""
        self._stopped = True
        if self._template is not None and not self._template.loaded:
            self._template.process.kill()

    async def aclose(self) -> None:
        if self._template is not None:
            await self._template.aclose()


class _Template:
    """A process that loads the repository and then forks workers. Made by `start`."""

    def __init__(self, process: ChildProcess, boot: Boot, server: ForkLine, line: ForkLine) -> None:
        self.process = process
        self.loaded = False
        self._boot = boot
        self._server = server
        self._line = line

    @classmethod
    async def start(cls, boot: Boot) -> _Template:
        server = _fork_server()
        try:
            requests, requests_far = socket.socketpair()
            reports, reports_far = socket.socketpair()
            with requests_far, reports_far:
                process = await server.fork(TEMPLATE, requests_far, reports_far)
        except OSError:
            await server.aclose()
            raise
        # The record may exceed the socket's buffer, so send it without blocking the event loop.
        requests.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(requests, pack(boot))
        requests.setblocking(True)
        return cls(process, boot, server, ForkLine(requests, reports, "the process that loads the repository was lost"))

    async def fork(self) -> LocalChannel:
        """Fork a worker; raise OSError if the template is lost or takes too long to load."""
        with anyio.move_on_after(LOAD_SECONDS):
            try:
                channel = await LocalChannel.fork(self._line, self._boot, booted=True)
            except OSError as error:
                if shortage_of(error) is not None:
                    raise
                with anyio.move_on_after(DRAIN_SECONDS):
                    await self.process.exited.wait()
                code = self.process.exit_code
                how = str(error) if code is None else f"{error}: {how_it_ended(code)}"
                raise OSError("\n    ".join([how, *_last_words(self.process.pid, self._boot.places)])) from error
            self.loaded = True
            return channel
        self.process.kill()
        raise OSError(f"the repository did not load within {LOAD_SECONDS:.0f} s")

    async def aclose(self) -> None:
        """End the process and the workers it has forked."""
        self.process.kill()
        await self.process.exited.wait()
        await self._line.aclose()
        await self._server.aclose()


def _leave_descriptors() -> None:
    """Raise OSError if another worker would take the last descriptors, which the run needs for its store."""
    with ExitStack() as opened:
        for _ in range(SPARE_DESCRIPTORS):
            opened.callback(os.close, os.dup(0))


def _same_version(boot: Boot, code: LoadedCode) -> Boot:
    """Return a boot record with which a worker loads what the first workers loaded."""
    return msgspec.structs.replace(boot, sources=code.sources)


def _last_words(pid: int, places: Places) -> list[str]:
    if places.log is None:
        return []
    lines = last_lines(Path(places.log), pid, LAST_LINES)
    root = Path(places.root)
    for file in dict.fromkeys(map(Path, _TRACED.findall("\n".join(lines)))):
        name = file.parent.name if file.name == "__init__.py" else file.stem
        if file.is_relative_to(root) and hiding(name, [file.parent]) == file:
            lines.append(
                f"{file.relative_to(root).as_posix()} has the name of a library that other code needs; rename it."
            )
    return lines


def _fair_share(workers: int) -> int:
    """Return the bytes per worker if all together may take four fifths of the free memory."""
    return int(psutil.virtual_memory().available * 0.8 / workers)


def _send_line(jobs: socket.socket, record: bytes) -> bytes:
    """Send a worker the beginning of its first record with a line of its own, to fork processes for its sandboxes.

    Returns the rest of the record. Raises OSError.
    """
    requests, reports = forkserver.open_line(bare=True)
    with requests, reports:
        socket.send_fds(jobs, [record[: HEADER.size]], [requests.fileno(), reports.fileno()])
    return record[HEADER.size :]


def _fork_server() -> ForkLine:
    return ForkLine(*forkserver.open_line(), "the fork server was lost")
