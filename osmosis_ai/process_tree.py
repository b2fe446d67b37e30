"""End processes that user code started and left behind, even if they changed their process group."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = [
    "adopt_orphans",
    "descendants",
    "end_descendants",
    "end_group",
    "end_processes",
    "end_with",
    "is_stopped",
    "wake",
    "wake_with",
]

PR_SET_CHILD_SUBREAPER = 36
_SHARE = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def end_processes(pid: int) -> None:
    """Kill the process group led by `pid`, and the leader's descendants that left the group."""
    end_descendants(pid)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants(pid: int) -> None:
    """Kill a process's children, and their children."""
    with suppress(psutil.Error):
        _kill(psutil.Process(pid).children(recursive=True))


def end_group() -> None:
    """Kill everything this process started, then the process itself."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        # Without children none can have left the group, and scanning the process table takes a while.
        os.killpg(0, signal.SIGKILL)
    end_processes(os.getpid())


def end_with(lifeline: int) -> int | None:
    """Have the kernel kill this process's group when another process ends, even if user code holds the interpreter.

    Linux only. Elsewhere the worker notices by EOF on the job socket, or when an event can't be sent.

    Args:
        lifeline: File descriptor of a pipe; the other process holds the other end open.

    Returns:
        A file descriptor; closing it cancels the arrangement. None where nothing was arranged.
    """
    if sys.platform != "linux":
        return None
    # Opened again, because F_SETOWN applies to the open file, which the inherited descriptor shares.
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    # The other process may have ended before the signal was set up.
    if select.select([own], [], [], 0)[0]:
        end_group()
    return own


def wake_with(armed: int) -> None:
    """Have the kernel continue this process, if it is stopped, when the other process ends, instead of killing it.

    `armed` is what `end_with` returned.
    """
    fcntl.fcntl(armed, fcntl.F_SETSIG, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped the process (SIGSTOP), not a debugger."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except (psutil.Error, OSError):
        return False


def wake(pid: int) -> None:
    """Continue a process that a signal has stopped."""
    if is_stopped(pid):
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def descendants(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the pid of each process below another, and its share of the memory, in bytes (Linux only).

    It reads only these processes' files; `psutil` would read those of every process of the machine.
    """
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            # Processes end at any time.
            with suppress(OSError):
                for child in map(int, children.read_text(encoding="ascii").split()):
                    waiting.append(child)
                    yield child, _memory_share(child)


def _memory_share(pid: int) -> int:
    process = Path(f"/proc/{pid}")
    try:
        # Memory that several processes share counts once in total.
        share = _SHARE.search((process / "smaps_rollup").read_bytes())
        if share is not None:
            return int(share[1]) * 1024
    except PermissionError:
        # A process may deny this, but not the next.
        with suppress(OSError):
            return int((process / "statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        pass
    return 0


def adopt_orphans() -> None:
    """Become the parent of orphaned grandchildren (Linux only).

    A dead worker can't end the processes it started. The fork server that adopts them can.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
