"""Ends processes that user code has started and left, wherever they have got to."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import sys
from contextlib import suppress

import psutil

__all__ = ["adopt_orphans", "end_descendants", "end_group", "end_processes", "end_with"]

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


def end_group() -> None:
    """Kill everything this process started, and itself."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        # Without children there is nobody who may have left the group, and looking for them takes a while.
        os.killpg(0, signal.SIGKILL)
    end_processes(os.getpid())


def end_with(lifeline: int) -> int | None:
    """Have the kernel kill this process's group when another process ends: also while user code holds the interpreter.

    Elsewhere than on Linux, EOF on a socket and events that can't be sent tell of it.

    Args:
        lifeline: The file descriptor of a pipe's end whose other end that process holds open.

    Returns:
        A file descriptor whose closing takes it back, None where there is nothing to take back.
    """
    if sys.platform != "linux":
        return None
    # Opened anew, because the owner of its signal belongs to an opened file.
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([own], [], [], 0)[0]:
        end_group()
    return own


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
