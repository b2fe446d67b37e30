"""A process that forks others on request: the fork server, or a template with a loaded repository.

It stays single-threaded, because a fork copies only the calling thread.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from osmosis_ai.process_tree import end_descendants, end_processes
from osmosis_ai.runtime.protocol import Exited, Forked, ForkReport, pack

__all__ = ["LINE", "SANDBOXED", "TEMPLATE", "WORKER", "Forker"]

WORKER = b"w"
"""A request to fork a worker. The two sockets sent with it are the worker's: for jobs and for events."""

TEMPLATE = b"t"
"""A request to fork a template. The two sockets sent with it are its line: for requests and for reports."""

SANDBOXED = b"s"
"""A request to fork a process that enters a sandbox. The sockets are for requests to it and for its answers."""

LINE = b"l"
"""A request to open another line: read requests from the first socket sent with it, and report to the second."""


class Forker:
    """Forks this process on request, and reports how its children end.

    The children of a line end with the line. When the first line ends, this process ends with all its descendants.
    `become` maps kinds of requests to the child's main function, which gets the request's two sockets.
    """

    def __init__(
        self,
        requests: socket.socket,
        reports: socket.socket,
        become: Mapping[bytes, Callable[[socket.socket, socket.socket], None]],
    ) -> None:
        self._first = requests
        self._lines = {requests: reports}
        self._become = become
        self._children: dict[int, socket.socket] = {}
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)

    def serve(self) -> NoReturn:
        """Fork until the first line ends."""
        # The wakeup descriptor carries the signal; a handler that did the work could interrupt itself.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        # A child's garbage collector would touch all these objects, and so copy every page shared with the parent.
        gc.collect()
        gc.freeze()
        while True:
            readable, _, _ = select.select([self._wake, *self._lines], [], [])
            for sock in readable:
                if sock is self._wake:
                    self._wake.recv(4096)
                    self._reap()
                elif sock in self._lines:
                    self._take(sock)

    def _take(self, line: socket.socket) -> None:
        try:
            request, descriptors, _, _ = socket.recv_fds(line, 1, 2)
        except ConnectionError:
            # A peer that closes its socket with unread data resets the connection; same as EOF.
            request, descriptors = b"", []
        if not request:
            self._end_line(line)
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        first, second = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        if request == LINE:
            self._lines[first] = second
            return
        with first, second:
            self._fork(line, self._become[request], first, second)

    def _fork(
        self,
        line: socket.socket,
        become: Callable[[socket.socket, socket.socket], None],
        first: socket.socket,
        second: socket.socket,
    ) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._report(line, Forked(0, error.errno or errno.EAGAIN))
            return
        if pid == 0:
            self._be_child(become, first, second)
        # The child does the same, so the group exists before the fork is reported, whichever comes first.
        with suppress(OSError):
            os.setpgid(pid, pid)
        self._children[pid] = line
        self._report(line, Forked(pid))

    def _be_child(
        self, become: Callable[[socket.socket, socket.socket], None], first: socket.socket, second: socket.socket
    ) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            # Otherwise processes that user code forks would keep this process's sockets open.
            for own in (self._wake, self._waker, *self._lines, *self._lines.values()):
                own.close()
            become(first, second)
            code = 0
        except BaseException:  # noqa: BLE001 - a child must never continue with the parent's code
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report ended children, and kill what is left in their process groups."""
        while True:
            try:
                # Without reaping: the kernel can't reuse its pid, nor its group's, before `waitpid` below.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            line = self._children.pop(ended.si_pid, None)
            if line is not None:
                with suppress(OSError):
                    os.killpg(ended.si_pid, signal.SIGKILL)
            pid, status = os.waitpid(ended.si_pid, 0)
            if line is not None:
                self._report(line, Exited(pid, os.waitstatus_to_exitcode(status)))

    def _report(self, line: socket.socket, report: ForkReport) -> None:
        # Errors are ignored: `_take` notices the end of a line.
        if line in self._lines:
            with suppress(OSError):
                self._lines[line].sendall(pack(report))

    def _end_line(self, line: socket.socket) -> None:
        if line is self._first:
            end_descendants(os.getpid())
            os._exit(0)
        self._lines.pop(line).close()
        line.close()
        for pid in [pid for pid, its_line in self._children.items() if its_line is line]:
            end_processes(pid)
        if len(self._lines) == 1:
            # With no line open, any remaining descendant was left behind by a dead worker.
            end_descendants(os.getpid())
