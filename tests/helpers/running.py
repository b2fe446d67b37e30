"""A command that runs beside the test: it can be interrupted, killed and watched, and nothing of it may be left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from commands import Finished, clean_environment
from waiting import PATIENCE, eventually

COMMAND = Path(sys.executable).with_name("osmosis")
REPOS = Path(__file__).parents[1] / "repos"
MARK = "OSMOSIS_TEST_COMMAND"

# A shell that runs the suite in the background has it ignore Ctrl-C, and every command would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Running:
    """One command and everything it starts: all of it carries the mark in its environment."""

    def __init__(self, *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.mark = uuid4().hex
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(COMMAND), *map(str, arguments)],
            cwd=cwd,
            env=clean_environment(**(env or {}), **{MARK: self.mark}),
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            # A group of its own, to which Ctrl-C can be sent as a terminal does.
            start_new_session=True,
        )

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends it to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> Finished:
        """Wait for its end and for that of everything it started."""
        code = self.process.wait(PATIENCE * 3)
        finished = Finished(code, _text(self._stdout), _text(self._stderr))
        eventually(lambda: not self.descendants(), lambda: f"left behind: {self._describe()}\n{finished.stderr}")
        return finished

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition that must come true while the command runs."""

        def come_true() -> Any:
            assert self.process.poll() is None, f"it ended with {self.process.poll()}:\n{self.said()}"
            return condition()

        eventually(come_true, lambda: f"it never came true; the command said:\n{self.said()}")

    def descendants(self) -> list[psutil.Process]:
        """Every process with this command's mark, whatever it has become a child of, but not the command itself."""
        return [process for process in _marked(self.mark) if process.pid != self.process.pid]

    def printed(self) -> str:
        """What it has written to stdout so far."""
        return _text(self._stdout)

    def said(self) -> str:
        """What it has written to stderr so far."""
        return _text(self._stderr)

    def close(self) -> None:
        """End what a failed test has left."""
        for process in _marked(self.mark):
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self._stdout.close()
        self._stderr.close()

    def _describe(self) -> str:
        lines = []
        for process in self.descendants():
            with suppress(psutil.Error):
                lines.append(f"{process.pid} in group {os.getpgid(process.pid)}: {' '.join(process.cmdline())}")
        return "; ".join(lines)


@contextmanager
def running(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> Iterator[Running]:
    """Start the installed command; what is left of it afterwards is ended."""
    command = Running(*arguments, cwd=cwd, env=env)
    try:
        yield command
    finally:
        command.close()


def run_whole(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> Finished:
    """Run the installed command to its end, and see that nothing it started is left."""
    with running(*arguments, cwd=cwd, env=env) as command:
        return command.wait()


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _text(file: Any) -> str:
    # Not through the file's own position, which the command writes at.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode("utf-8")
