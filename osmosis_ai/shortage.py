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
            "the system lets this command open no more files; raise the limit "
            f"(`ulimit -n` is {_limit(resource.RLIMIT_NOFILE)}), or use a smaller --batch-size"
        )
    if code == errno.ENFILE:
        return ShortageError("the system opens no more files, for any process")
    if code == errno.ENOMEM:
        return ShortageError("the system has too little memory for another process")
    if code == errno.EAGAIN or (isinstance(error, RuntimeError) and str(error) == NO_THREAD):
        return ShortageError(
            "the system allows no more processes and threads; raise the limit "
            f"(`ulimit -u` is {_limit(resource.RLIMIT_NPROC)}, or the container's), or use fewer --workers"
        )
    return None


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
