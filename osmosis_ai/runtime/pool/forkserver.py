"""The fork server that worker processes come from: one for this process, whoever in it runs what, however often.

It takes a second to import what workers need, so it is started first of all. It is not `multiprocessing`'s, which a
program may use for purposes of its own, and whose children import that program's main module again.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["changed_environment", "open_line", "start"]

# `python -c` puts the working directory first on the path, and PYTHONPATH may name it: what a repository has there
# (`mcp/`, `types.py`) must not be imported in a library's place.
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
PACKAGE = str(Path(__file__).parents[3])


class _Server:
    """A running fork server. It ends when this process does, or lets go of its ends of the two."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.environ = dict(os.environ)
        self.line, line = socket.socketpair()
        lifeline, self.lifeline = os.pipe()
        try:
            arguments = [str(line.fileno()), str(lifeline), PACKAGE, *preload]
            process = subprocess.Popen(  # noqa: S603  nothing in it comes from elsewhere
                [sys.executable, *_interpreter_flags(), "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(line.fileno(), lifeline),
                # Ctrl-C is for this process to handle; a terminal sends it to the whole group.
                start_new_session=True,
            )
        except BaseException:
            self.close()
            raise
        finally:
            line.close()
            os.close(lifeline)
        # Its end shows at the line. A Popen that believes it is running would complain at this process's own end.
        process.returncode = 0
        self._pid = process.pid

    def close(self) -> None:
        """Let go of it."""
        self.line.close()
        os.close(self.lifeline)

    def reap(self) -> None:
        """It has ended by itself."""
        self.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, os.WNOHANG)


_lock = threading.Lock()
_server: _Server | None = None


def start(preload: Sequence[str] = ()) -> None:
    """Start the fork server, if it doesn't run already; returns at once while it goes on importing. Raises OSError.

    `preload` are modules to import besides those that every worker needs; ignored when it runs already.
    """
    global _server
    with _lock:
        if _server is None:
            _server = _Server(preload)


def open_line() -> tuple[socket.socket, socket.socket]:
    """A line of one's own to the fork server: a socket for requests and one for reports; raises OSError."""
    # Not before the server has been started: this import waits for others.
    from osmosis_ai.runtime.worker.forking import LINE

    global _server
    requests, requests_far = socket.socketpair()
    reports, reports_far = socket.socketpair()
    with requests_far, reports_far, _lock:
        try:
            if _server is None:
                _server = _Server(())
            ends = [requests_far.fileno(), reports_far.fileno()]
            try:
                socket.send_fds(_server.line, [LINE], ends)
            except OSError:
                # It was killed.
                _server.reap()
                _server = None
                _server = _Server(())
                socket.send_fds(_server.line, [LINE], ends)
        except BaseException:
            requests.close()
            reports.close()
            raise
    return requests, reports


def changed_environment() -> dict[str, str | None]:
    """The variables that are not as they were when the fork server started; None for those that are gone."""
    before = os.environ if _server is None else _server.environ
    changed = {
        name: os.environ.get(name) for name in {**before, **os.environ} if before.get(name) != os.environ.get(name)
    }
    # Others than text can't be sent.
    return {name: value for name, value in changed.items() if _is_text(f"{name}{value}")}


def _let_go() -> None:
    """This process ends, or is a fork of the one with the fork server and must not keep that alive."""
    global _lock, _server
    _lock = threading.Lock()
    if _server is not None:
        _server.close()
        _server = None


os.register_at_fork(after_in_child=_let_go)
atexit.register(_let_go)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _interpreter_flags() -> list[str]:
    """The options of this interpreter that matter to another one."""
    flags = sys.flags
    letters = "I" if flags.isolated else "E" * flags.ignore_environment + "s" * flags.no_user_site
    letters += "S" * flags.no_site + "B" * flags.dont_write_bytecode
    letters += "O" * flags.optimize + "b" * flags.bytes_warning
    given = [f"-{letters}"] if letters else []
    given += [f"-W{option}" for option in sys.warnoptions]
    return given + [
        f"-X{name}" if value is True else f"-X{name}={value}" for name, value in getattr(sys, "_xoptions", {}).items()
    ]
