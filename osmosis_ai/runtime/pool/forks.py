"""Ask a process that forks others for children, and hear how they end."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress

import anyio

from osmosis_ai.process_tree import end_processes
from osmosis_ai.runtime.protocol import Forked, decode_report, read_frame

__all__ = ["ChildProcess", "ForkLine"]


class ChildProcess:
    """A process that was forked. `exit_code` is set once it has ended; negative for the signal that ended it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self.exited = anyio.Event()

    def end(self, exit_code: int | None) -> None:
        """It has ended; None if nobody knows how."""
        self.exit_code = exit_code
        self.exited.set()

    def kill(self) -> None:
        """End it, unless it has ended, and whatever it started."""
        if not self.exited.is_set():
            end_processes(self.pid)


class ForkLine:
    """A line to a process that forks others: a socket for requests, one for reports. Made on its event loop.

    `lost` is what an OSError says when that process is gone.
    """

    def __init__(self, requests: socket.socket, reports: socket.socket, lost: str) -> None:
        self._requests = requests
        self._lost = lost
        self._ended = False
        self._children: dict[int, ChildProcess] = {}
        self._asked: deque[asyncio.Future[ChildProcess]] = deque()
        self._reading = asyncio.create_task(self._read(reports))

    async def fork(self, kind: bytes, first: socket.socket, second: socket.socket) -> ChildProcess:
        """Fork a child and hand it two sockets, which may be closed afterwards; raises OSError when that can't be done.

        `kind` is what it is to be, as in `worker.forking`.
        """
        if self._ended:
            raise OSError(self._lost)
        try:
            socket.send_fds(self._requests, [kind], [first.fileno(), second.fileno()])
        except ConnectionError as error:
            raise OSError(self._lost) from error
        answer: asyncio.Future[ChildProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        return await answer

    async def aclose(self) -> None:
        """End the line, and with it the children that are left."""
        self._requests.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self, reports: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=reports)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    report = decode_report(await read_frame(reader))
                    if not isinstance(report, Forked):
                        self._children.pop(report.pid).end(report.code)
                    elif report.error is not None:
                        self._answer(OSError(report.error))
                    else:
                        child = self._children[report.pid] = ChildProcess(report.pid)
                        self._answer(child)
        finally:
            writer.close()
            self._ended = True
            while self._asked:
                self._answer(OSError(self._lost))
            for child in self._children.values():
                child.kill()
                child.end(None)
            self._children.clear()

    def _answer(self, answer: ChildProcess | OSError) -> None:
        asked = self._asked.popleft()
        if isinstance(answer, OSError):
            if not asked.done():
                asked.set_exception(answer)
        elif asked.done():
            # Whoever asked has given up.
            answer.kill()
        else:
            asked.set_result(answer)
