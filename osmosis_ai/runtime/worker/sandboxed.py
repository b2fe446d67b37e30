"""The program in a sandbox: it loads the repository's tools for one rollout, or its functions for one score."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import anyio
import msgspec

from osmosis_ai.code_hashes import imported_sources
from osmosis_ai.current import rollout_scope
from osmosis_ai.errors import StartError
from osmosis_ai.imports import import_in_version
from osmosis_ai.mcp_tools.session import CallOutcome
from osmosis_ai.records import JsonObject, Message
from osmosis_ai.runtime.protocol import (
    HEADER,
    Imported,
    NotReady,
    Ready,
    WorkerSpec,
    encode,
    pack,
    read_frame,
    receive_frame,
)
from osmosis_ai.runtime.worker.boundary import (
    MAX_ANSWER,
    Answer,
    Answered,
    Call,
    Open,
    Opened,
    Request,
    Sample,
    Sampled,
    Scored,
    ScoreThis,
    decode_enter,
    decode_request,
)
from osmosis_ai.runtime.worker.entering import enter_sandbox
from osmosis_ai.runtime.worker.worker import LoadedRepository, load_repository

__all__ = ["main"]

THREADS = 512
ADDRESS_SPACE = 4 << 30
"""What code and libraries may reserve beyond the memory that they may hold, in bytes."""


def main(requests: socket.socket, answers: socket.socket) -> NoReturn:
    """Enter a sandbox, and serve the worker at the other end of the sockets until it closes them.

    The first record is an Enter; the descriptors of stdout and stderr come with its beginning.
    """
    head, (stdout, stderr), _, _ = socket.recv_fds(requests, HEADER.size, 2)
    enter = decode_enter(receive_frame(requests, head))
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    enter_sandbox(enter.pid, {requests.fileno(), answers.fileno()})
    spec = enter.spec
    _limit_resources(spec)
    import_in_version(Path(spec.root), enter.sources)

    def send(answer: Answer) -> None:
        answers.sendall(pack(answer))

    try:
        asyncio.run(_serve(load_repository(msgspec.structs.replace(spec, sandbox=None)), requests, send))
    except StartError as error:
        send(NotReady(type(error).__name__, str(error)))
    except BrokenPipeError:
        pass
    finally:
        # Threads that user code left behind must not keep the process alive.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _limit_resources(spec: WorkerSpec) -> None:
    assert spec.sandbox is not None
    limits = spec.limits
    seconds = limits.timeout if not spec.functions else limits.reward_timeout * len(spec.functions)
    bounds = {
        resource.RLIMIT_AS: spec.sandbox.memory + ADDRESS_SPACE,
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_CORE: 0,
    }
    # Before Linux 5.14 it counted the user's processes outside of the sandbox too.
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        bounds[resource.RLIMIT_NPROC] = THREADS
    for kind, bound in bounds.items():
        _, most = resource.getrlimit(kind)
        bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
        resource.setrlimit(kind, (bound, bound))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


async def _serve(loaded: LoadedRepository, requests: socket.socket, send: Callable[[Answer], None]) -> None:
    reader, _ = await asyncio.open_unix_connection(sock=requests)
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        if loaded.spec.functions:
            await _score(loaded, reader, send)
        else:
            await _host_tools(loaded, reader, send)


async def _next_request(reader: asyncio.StreamReader) -> Request:
    request: Request = decode_request(await read_frame(reader))
    return request


async def _score(loaded: LoadedRepository, reader: asyncio.StreamReader, send: Callable[[Answer], None]) -> None:
    send(Ready(functions=list(loaded.scorers), problems=loaded.problems, function_sources=loaded.function_sources))
    request = await _next_request(reader)
    assert isinstance(request, ScoreThis)
    for name in request.functions:
        with _imports(loaded, send):
            score = await loaded.scorers[name].score(request.trajectory, loaded.spec.limits.reward_timeout)
        send(Scored(score))
    # The worker ends this process.
    await reader.read()


async def _host_tools(loaded: LoadedRepository, reader: asyncio.StreamReader, send: Callable[[Answer], None]) -> None:
    from osmosis_ai.mcp_tools.host import ToolHost
    from osmosis_ai.runtime.worker.setups import SetupRun

    root = Path(loaded.spec.root)
    numbers = itertools.count()
    replies: dict[int, asyncio.Future[Sampled]] = {}

    async def sample(messages: list[Message], params: JsonObject) -> Message:
        number = next(numbers)
        replies[number] = asyncio.get_running_loop().create_future()
        try:
            send(Sample(number, messages, params))
            reply = await replies[number]
        finally:
            del replies[number]
        if reply.error is not None:
            raise RuntimeError(reply.error)
        return reply.message

    async with ToolHost(loaded.server, root=root) as host:
        send(Ready(tools=host.tools, tool_sources=loaded.tool_sources))
        opening = await _next_request(reader)
        assert isinstance(opening, Open)
        with rollout_scope(opening.id, opening.row_index, opening.metadata, None):
            async with (
                host.session(meta=opening.meta, sampling_handler=sample) as session,
                anyio.create_task_group() as group,
            ):
                with _imports(loaded, send):
                    send(Opened(await SetupRun(loaded.setups, root).run()))

                async def call(request: Call) -> None:
                    with _imports(loaded, send):
                        outcome = await session.call(request.name, request.arguments, timeout=request.timeout)
                    send(_bounded(Answered(request.number, outcome)))

                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    while True:
                        request = await _next_request(reader)
                        if isinstance(request, Call):
                            group.start_soon(call, request)
                        elif isinstance(request, Sampled) and request.number in replies:
                            replies[request.number].set_result(request)
                group.cancel_scope.cancel()


def _bounded(answer: Answered) -> Answered:
    """Replace an outcome that is larger than the worker would read."""
    size = len(encode(answer)) + HEADER.size
    if size <= MAX_ANSWER:
        return answer
    text = f"Error: the result has {size >> 20} MiB, and a sandbox may send {MAX_ANSWER >> 20} MiB"
    return Answered(answer.number, CallOutcome(text, "exception"))


@contextmanager
def _imports(loaded: LoadedRepository, send: Callable[[Answer], None]) -> Iterator[None]:
    """Report files that user code imports in the block."""
    before = len(sys.modules)
    try:
        yield
    finally:
        if len(sys.modules) != before:
            sources = imported_sources(Path(loaded.spec.root))
            if sources.keys() != loaded.tool_sources.keys() | loaded.function_sources.keys():
                send(Imported(sources))
