"""Tell the system's limits on processes, threads and open files from other errors."""

from __future__ import annotations

import errno
import resource

from osmosis_ai.errors import ShortageError

__all__ = ["NO_THREAD", "shortage_of"]

NO_THREAD = "can't start new thread"
"""The message of the RuntimeError that `threading` raises."""


def shortage_of(error: BaseException) -> ShortageError | None:
    """Return the shortage behind an error, which may be over soon; None if the error means something else."""
    code = error.errno if isinstance(error, OSError) else None
    if code in {errno.EMFILE, errno.ETOOMANYREFS}:
        return ShortageError(
            f"this process has too many files open: its limit is {_limit(resource.RLIMIT_NOFILE)} (ulimit -n)"
        )
    if code == errno.ENFILE:
        return ShortageError("the system has too many files open")
    if code == errno.ENOMEM:
        return ShortageError("there is too little memory to start a process")
    if code == errno.EAGAIN or (isinstance(error, RuntimeError) and str(error) == NO_THREAD):
        return ShortageError(
            "the system starts no more processes or threads: the user's limit is "
            f"{_limit(resource.RLIMIT_NPROC)} (ulimit -u), and a container may have one of its own"
        )
    return None


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
