"""Ends processes that user code has started and left, wherever they have got to."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import warnings
from contextlib import suppress

import psutil

__all__ = ["adopt_orphans", "end_processes", "end_strays"]

PR_SET_CHILD_SUBREAPER = 36


def end_processes(pid: int) -> None:
    """Kill a worker's process group, and its children that left the group."""
    try:
        strays = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        strays = []
    with suppress(ProcessLookupError):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            # A worker that was forked this moment is still in the command's own group.
            if os.getpgid(pid) == os.getpgrp():
                os.kill(pid, signal.SIGKILL)
            os.killpg(pid, signal.SIGKILL)
    _kill(strays)


def end_strays() -> None:
    """Kill what this process's children (the fork server) still have below them, when no worker is needed any more."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            _kill(child.children(recursive=True))


def adopt_orphans() -> None:
    """Become the parent of what this process's children leave behind, and end it together with this process.

    A worker that dies can't end what it has started. Its fork server can, where it may adopt orphans (Linux).
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # It waits for every child, and is surprised by those that it has not started.
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
    atexit.register(_end_adopted, os.getpid())


def _end_adopted(pid: int) -> None:
    if os.getpid() == pid:
        _kill(psutil.Process().children(recursive=True))


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
