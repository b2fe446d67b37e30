"""Request child processes from a forking process, and learn how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import deque
from contextlib import suppress

import anyio
import msgspec

from osmosis_ai.process_tree import end_processes
from osmosis_ai.runtime.protocol import Forked, decode_report, read_frame

__all__ = ["ChildProcess", "ForkLine", "how_it_ended"]


class ChildProcess:
    """A forked process. `exit_code` is set once it has ended; a negative one is the signal that killed it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self.exited = anyio.Event()

    def end(self, exit_code: int | None) -> None:
        """Note that the process has ended, with an exit code of None if unknown."""
        self.exit_code = exit_code
        self.exited.set()

    def kill(self) -> None:
        """Kill the process and everything it started, unless it has ended."""
        # After its end, another process may have its pid.
        if not self.exited.is_set():
            end_processes(self.pid)


class ForkLine:
    """A line to a forking process: a socket for requests, and one for reports. Create it on its event loop.

    `lost` is the message of the OSError raised once that process is gone.
    """

    def __init__(self, requests: socket.socket, reports: socket.socket, lost: str) -> None:
        self._requests = requests
        self._lost = lost
        self._ended = False
        self._children: dict[int, ChildProcess] = {}
        self._asked: deque[asyncio.Future[ChildProcess]] = deque()
        self._reading = asyncio.create_task(self._read(reports))

    async def fork(self, kind: bytes, first: socket.socket, second: socket.socket) -> ChildProcess:
        """Fork a child and pass it two sockets, which may be closed afterwards; raise OSError if that fails.

        `kind` is the kind of request, as in `worker.forking`.
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
        """Close the line, which ends its remaining children."""
        self._requests.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self, reports: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=reports)
        try:
            # A process that has loaded user code may send anything; then it counts as lost.
            unusable = (msgspec.MsgspecError, ValueError, LookupError)
            with suppress(asyncio.IncompleteReadError, ConnectionError, *unusable):
                while True:
                    report = decode_report(await read_frame(reader))
                    if not isinstance(report, Forked):
                        self._children.pop(report.pid).end(report.code)
                    elif report.error is not None:
                        self._answer(OSError(report.error, os.strerror(report.error)))
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
        # The forking process answers requests in order.
        asked = self._asked.popleft()
        if isinstance(answer, OSError):
            if not asked.done():
                asked.set_exception(answer)
        elif asked.done():
            # The caller was cancelled, so the child has no owner.
            answer.kill()
        else:
            asked.set_result(answer)


def how_it_ended(code: int) -> str:
    """Describe an exit code; a negative one is the signal that killed the process."""
    if code >= 0:
        return f"exited with code {code}"
    # Real-time signals have no names.
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
