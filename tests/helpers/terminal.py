"""Run the installed command at a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from time import monotonic

from commands import COMMAND
from waiting import PATIENCE


class Terminal:
    """The command at its own terminal: key presses and screen output."""

    def __init__(self, arguments: list[str], cwd: Path, environ: dict[str, str], *, columns: int = 200) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        # Ctrl-C reaches only the group in the foreground of a session's controlling terminal.
        become_session = (
            "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", become_session, str(COMMAND), *arguments],
            cwd=cwd,
            env=environ,
            stdin=side,
            stdout=side,
            stderr=side,
        )
        os.close(side)
        self._unread = ""
        self.shown = ""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._main, text.encode("utf-8"))

    def wait_for(self, pattern: str, patience: float = PATIENCE) -> str:
        """Read until a pattern appears after the last match; return the text up to there."""
        deadline = monotonic() + patience
        while (found := re.search(pattern, self._unread)) is None:
            left = deadline - monotonic()
            if left <= 0:
                raise TimeoutError(f"{pattern!r} never appeared after: {self.shown}")
            if select.select([self._main], [], [], left)[0]:
                self._unread += self._read()
        before, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return before

    def press_ctrl_c(self, pattern: str) -> None:
        """Press Ctrl-C at the prompt until a pattern appears: readline misses one that comes just before it waits."""
        for _ in range(10):
            self.type("\x03")
            with suppress(TimeoutError):
                self.wait_for(pattern, patience=5.0)
                return
        raise AssertionError(f"{pattern!r} never appeared after: {self.shown}")

    def end(self) -> int:
        """Read to the end and return the exit code."""
        try:
            while True:
                self._read()
        except OSError:
            return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._main)

    def _read(self) -> str:
        data = os.read(self._main, 65536).decode("utf-8", "replace").replace("\r\n", "\n")
        self.shown += data
        return data
