"""Run a command beside the test, which can interrupt, kill and watch it; it must leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil

from commands import COMMAND, Command, Finished, clean_environment, environment_here
from stage import StagedCommand, current_stage

MARK = "OSMOSIS_TEST_COMMAND"

# A shell makes background jobs ignore Ctrl-C, and every command would inherit that from the suite.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Running(Command):
    """The installed command and its descendants, which all have the mark in their environment."""

    def __init__(
        self, *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, descriptors: int = 0
    ) -> None:
        super().__init__()
        self.mark = uuid4().hex
        limited = ["sh", "-c", 'ulimit -n "$0"; exec "$@"', str(descriptors)] if descriptors else []
        self.process = subprocess.Popen(
            [*limited, str(COMMAND), *map(str, arguments)],
            cwd=cwd,
            env=clean_environment(**(env or {}), **{MARK: self.mark}),
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            # Its own group, so that Ctrl-C can be sent to it as by a terminal.
            start_new_session=True,
        )

    def ended(self, seconds: float = 0.0) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def interrupt(self) -> None:
        """Send Ctrl-C to the whole group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def descendants(self) -> list[psutil.Process]:
        """List every other process with this command's mark, including reparented ones."""
        return [process for process in _marked(self.mark) if process.pid != self.process.pid]

    def close(self) -> None:
        """Kill the processes that a failed test has left."""
        for process in _marked(self.mark):
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        super().close()


@contextmanager
def running(
    *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, descriptors: int = 0
) -> Iterator[Command]:
    """Start the installed command, or in a test with the mark `in_process` the command line in this process.

    What is left of it afterwards is ended. `descriptors` limits the open files of the installed command.
    """
    command: Command
    if stage := current_stage():
        command = StagedCommand(stage, *arguments, cwd=cwd, environ=environment_here(**(env or {})))
    else:
        command = Running(*arguments, cwd=cwd, env=env, descriptors=descriptors)
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
