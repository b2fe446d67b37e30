"""Run a command, and measure its wall time and the CPU time of its whole process tree."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import psutil

OSMOSIS = str(Path(sys.executable).with_name("osmosis"))
PR_SET_CHILD_SUBREAPER = 36
ORPHAN_SECONDS = 10.0


class Measured(NamedTuple):
    """A command's wall and CPU time in seconds, and its output."""

    wall: float
    cpu: float
    stdout: str


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment without variables that choose a model or hold a key."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_MODEL"))}
    return {**kept, **extra}


def adopt_orphans() -> bool:
    """Become the parent of orphaned processes of a command, so that their CPU time is counted.

    A fork server outlives the command that started it by a moment; without this, its time and that of the workers it
    waited for would be lost. Only Linux supports this.

    Returns:
        True if it worked.
    """
    if sys.platform != "linux":
        return False
    return int(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def run(
    command: Sequence[str], *, cwd: Path, spare: Sequence[int] = (), codes: Sequence[int] = (0,), **env: str
) -> Measured:
    """Run a command to its end.

    Args:
        command: The program and its arguments.
        cwd: The working directory.
        spare: Ids of child processes that don't belong to the command.
        codes: Exit codes that don't mean a failure.
        env: Further environment variables.

    Raises:
        SystemExit: The command failed; its stderr is shown.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        before = _cpu_of_children()
        started = perf_counter()
        code = subprocess.run(
            command, cwd=cwd, env=clean_environment(**env), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        ).returncode
        wall = perf_counter() - started
        _reap(spare)
        cpu = _cpu_of_children() - before
        stdout.seek(0)
        stderr.seek(0)
        if code not in codes:
            raise SystemExit(f"{' '.join(command)} ended with {code}:\n{stderr.read().decode()}")
        return Measured(wall, cpu, stdout.read().decode())


def _cpu_of_children() -> float:
    """Seconds of CPU, user and system, of every child that ended and its ended descendants."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _reap(spare: Sequence[int]) -> None:
    orphans = [child for child in psutil.Process().children() if child.pid not in spare]
    _, alive = psutil.wait_procs(orphans, timeout=ORPHAN_SECONDS)
    if alive:
        raise SystemExit(f"processes were left behind: {', '.join(' '.join(process.cmdline()) for process in alive)}")
