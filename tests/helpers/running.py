"""Run a command beside the test, which can interrupt, kill and watch it; it must leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from commands import COMMAND, Finished, clean_environment
from stage import StagedCommand, current_stage
from waiting import PATIENCE, eventually

MARK = "OSMOSIS_TEST_COMMAND"

# A shell makes background jobs ignore Ctrl-C, and every command would inherit that from the suite.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Running:
    """One command and its descendants, which all have the mark in their environment."""

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
            # Its own group, so that Ctrl-C can be sent to it as by a terminal.
            start_new_session=True,
        )

    def interrupt(self) -> None:
        """Send Ctrl-C to the whole group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> Finished:
        """Wait until the command and all its descendants have ended."""
        code = self.process.wait(PATIENCE * 3)
        finished = Finished(code, _text(self._stdout), _text(self._stderr))
        eventually(lambda: not self.descendants(), lambda: f"left behind: {self._describe()}\n{finished.stderr}")
        return finished

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition that must become true while the command runs."""

        def come_true() -> Any:
            assert self.process.poll() is None, f"it ended with {self.process.poll()}:\n{self.said()}"
            return condition()

        eventually(come_true, lambda: f"it never came true; the command said:\n{self.said()}")

    def descendants(self) -> list[psutil.Process]:
        """Return every other process with this command's mark, including reparented ones."""
        return [process for process in _marked(self.mark) if process.pid != self.process.pid]

    def printed(self) -> str:
        """Return its stdout so far."""
        return _text(self._stdout)

    def said(self) -> str:
        """Return its stderr so far."""
        return _text(self._stderr)

    def close(self) -> None:
        """Kill the processes that a failed test has left."""
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
def running(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> Iterator[Running | StagedCommand]:
    """Start the installed command, or in a test with the mark `in_process` the command line in this process.

    What is left of it afterwards is ended.
    """
    command: Running | StagedCommand
    if stage := current_stage():
        command = StagedCommand(stage, *arguments, cwd=cwd, environ=clean_environment(**(env or {})))
    else:
        command = Running(*arguments, cwd=cwd, env=env)
    try:
        yield command
    finally:
        command.close()


def run_whole(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> Finished:
    """Run the installed command to its end, and check that it leaves no process behind."""
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
    # pread, because the command shares the file's position for writing.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode("utf-8")
