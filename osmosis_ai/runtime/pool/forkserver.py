"""Start the fork server, which forks all worker processes of this process.

Importing the workers' modules takes a second, so it starts before anything else. It isn't `multiprocessing`'s fork
server, which programs may use for themselves, and whose children import the program's main module again.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["changed_environment", "open_line", "start", "start_bare", "stop", "wake_servers"]

# `python -c` puts the working directory first on the path, and PYTHONPATH may contain it. A repository's own files
# (`mcp/`, `types.py`) must not shadow libraries, so the first goes away and the second goes last.
PROGRAM = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import os
sys.path.sort(key=os.getcwd().__eq__)
line, lifeline, package, *preload = sys.argv[1:]
if package not in sys.path:
    sys.path.append(package)
from osmosis_ai.runtime.worker.fork_server import main
main(int(line), int(lifeline), preload)
"""
# Python 3.13 imports modules between putting the working directory on the path and running the program.
SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []
STOP_SECONDS = 10.0
PACKAGE = str(Path(__file__).parents[3])
TOOLS = "osmosis_ai.runtime.worker.preload"
"""Modules for workers with tools, and for all that share their fork server."""
WORKFLOWS = "osmosis_ai.runtime.worker.workflows.workflow"
"""Modules for workers with a rollout server, few of which call the repository's tools."""


class _Server:
    """A running fork server. It ends when this process does, or closes its socket and its end of the pipe.

    `environ` is the environment of a server whose children may know nothing of this process's; such a server is not in
    the working directory either, where imports may read `.env`.
    """

    def __init__(self, preload: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.environ = dict(os.environ if environ is None else environ)
        self._given = environ
        self.line, line = socket.socketpair()
        lifeline, self.lifeline = os.pipe()
        try:
            arguments = [str(line.fileno()), str(lifeline), PACKAGE, *preload]
            process = subprocess.Popen(  # noqa: S603  all arguments are this module's own
                [sys.executable, *_interpreter_flags(), *SAFE_PATH, "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(line.fileno(), lifeline),
                env=self.environ,
                cwd=None if environ is None else "/",
                # A terminal sends Ctrl-C to the whole process group, but only this process should handle it.
                start_new_session=True,
            )
        except BaseException:
            self.close()
            raise
        finally:
            line.close()
            os.close(lifeline)
        # The line's EOF shows its end. A Popen without a return code would warn when this process exits.
        process.returncode = 0
        self.pid = process.pid

    def close(self) -> None:
        """Close this process's ends, which ends the server."""
        self.line.close()
        os.close(self.lifeline)

    def reached(self, message: Sequence[bytes], descriptors: Sequence[int]) -> _Server:
        """Send a message with descriptors; return the server that got it, a new one if this one was killed."""
        try:
            socket.send_fds(self.line, message, descriptors)
        except OSError:
            self.close()
            with suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
            fresh = _Server((TOOLS,), self._given)
            socket.send_fds(fresh.line, message, descriptors)
            return fresh
        return self


_lock = threading.Lock()
_server: _Server | None = None
_bare_server: _Server | None = None


def start(preload: Sequence[str] = (TOOLS,)) -> None:
    """Start the fork server, unless it runs already; return at once, while it imports. Raise OSError.

    `preload` lists modules to import besides the workers' own; ignored if the server runs already.
    """
    global _server
    with _lock:
        if _server is None:
            _server = _Server(preload)


def start_bare(environ: Mapping[str, str]) -> None:
    """Start a second fork server, which has this environment only, unless it runs already. Raise OSError."""
    global _bare_server
    with _lock:
        if _bare_server is None:
            _bare_server = _Server((TOOLS,), environ)


def open_line(*, bare: bool = False) -> tuple[socket.socket, socket.socket]:
    """Open a line to the fork server: a socket for requests and one for reports; raise OSError.

    `bare` asks for the server of `start_bare`.
    """
    # Imported late, because this import is slow and must not delay the server's start.
    from osmosis_ai.runtime.worker.forking import LINE

    global _bare_server, _server
    requests, requests_far = socket.socketpair()
    reports, reports_far = socket.socketpair()
    with requests_far, reports_far, _lock:
        try:
            ends = [requests_far.fileno(), reports_far.fileno()]
            if bare:
                assert _bare_server is not None
                _bare_server = _bare_server.reached([LINE], ends)
            else:
                _server = (_server or _Server((TOOLS,))).reached([LINE], ends)
        except BaseException:
            requests.close()
            reports.close()
            raise
    return requests, reports


def wake_servers() -> None:
    """Continue the fork servers if user code has stopped them."""
    # Imported late, as in `open_line`.
    from osmosis_ai.process_tree import wake

    for server in (_server, _bare_server):
        if server is not None:
            wake(server.pid)


def changed_environment() -> dict[str, str | None]:
    """Return the environment variables changed since the fork server started; None for removed ones."""
    before = os.environ if _server is None else _server.environ
    changed = {
        name: os.environ.get(name) for name in {**before, **os.environ} if before.get(name) != os.environ.get(name)
    }
    # Surrogates stand for bytes that aren't UTF-8; JSON can't carry them to the worker.
    return {name: value for name, value in changed.items() if _is_text(f"{name}{value}")}


def stop() -> None:
    """End the fork servers and their children; the next use of a worker starts a new one."""
    ended = [server.pid for server in (_server, _bare_server) if server is not None]
    _let_go()
    deadline = time.monotonic() + STOP_SECONDS
    for pid in ended:
        with suppress(ChildProcessError, ProcessLookupError):
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)


def _let_go() -> None:
    """Close this process's ends at exit, and in a fork of this process, which must not keep the servers alive."""
    # A new lock, because another thread may have held the old one during the fork.
    global _bare_server, _lock, _server
    _lock = threading.Lock()
    for server in (_server, _bare_server):
        if server is not None:
            server.close()
    _server = _bare_server = None


os.register_at_fork(after_in_child=_let_go)
atexit.register(_let_go)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _interpreter_flags() -> list[str]:
    """Return this interpreter's command line options, for starting another one."""
    # Like `subprocess._args_from_interpreter_flags`, which is private.
    flags = sys.flags
    letters = "I" if flags.isolated else "E" * flags.ignore_environment + "s" * flags.no_user_site
    letters += "S" * flags.no_site + "B" * flags.dont_write_bytecode
    letters += "O" * flags.optimize + "b" * flags.bytes_warning
    given = [f"-{letters}"] if letters else []
    given += [f"-W{option}" for option in sys.warnoptions]
    return given + [
        f"-X{name}" if value is True else f"-X{name}={value}" for name, value in getattr(sys, "_xoptions", {}).items()
    ]
