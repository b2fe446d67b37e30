"""Which process writes a run: what tells a run that goes on from one that was killed."""

from __future__ import annotations

import os

__all__ = ["process_alive", "this_process"]

_CLOCK_TOLERANCE = 2.0
"""Seconds: a process's start time is computed from the boot time, which moves when the clock is set."""


def this_process() -> tuple[int, float]:
    """This process's id and when it started, in seconds since the epoch."""
    import psutil

    return os.getpid(), psutil.Process().create_time()


def process_alive(pid: int, started: float) -> bool:
    """Whether the process with this id and start time still runs on this machine."""
    import psutil

    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < _CLOCK_TOLERANCE
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
