"""Ends processes that user code has started and left, wherever they have got to."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

import psutil

__all__ = ["adopt_orphans", "end_descendants", "end_processes", "end_strays"]

PR_SET_CHILD_SUBREAPER = 36


def end_processes(pid: int) -> None:
    """Kill a process group by its leader, and the leader's descendants that left the group."""
    end_descendants(pid)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants(pid: int) -> None:
    """Kill what a process has started, and what that has."""
    with suppress(psutil.Error):
        _kill(psutil.Process(pid).children(recursive=True))


def end_strays() -> None:
    """Kill what this process's children (the fork server) still have below them, when no worker is needed any more."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            _kill(child.children(recursive=True))


def adopt_orphans() -> None:
    """Become the parent of what this process's children leave behind, where the system can do that (Linux).

    A worker that dies can't end what it has started. The fork server that adopts it can.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
