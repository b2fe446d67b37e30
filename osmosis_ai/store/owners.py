"""Ownership of runs: a process owns the runs that it writes, until it gives them up or ends.

Each run stands for one byte of `runs.lock`, beside the database, which its owner locks. The kernel releases the locks
of a process that ends, however it ends, and no clock is involved. These are POSIX record locks, as SQLite's own are, so
they work wherever the store does. Unlike those of `flock`, they aren't shared with forked children, which may live on.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from osmosis_ai.errors import StoreError
from osmosis_ai.folders import private_file

__all__ = ["Ownership", "is_owned", "own"]

LOOK_SECONDS = 0.2
"""How long to wait for a lock: a process that looks whether there is one holds it for a moment."""

_HELD = (errno.EACCES, errno.EAGAIN)


class _LockFile:
    """A lock file and the bytes that this process locks. Closing any descriptor of a file releases all locks that the
    process holds in it, so there is only one."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.held: Counter[int] = Counter()


_guard = threading.Lock()
_files: dict[tuple[int, int], _LockFile] = {}
"""By device and inode."""


class Ownership:
    """This process owns a run. Made by `own`."""

    def __init__(self, file: tuple[int, int], byte: int) -> None:
        self._file = file
        self._byte = byte

    def release(self) -> None:
        """Give the run up."""
        with _guard:
            # A forked child has none.
            file = _files.get(self._file)
            if file is None:
                return
            file.held[self._byte] -= 1
            if not file.held[self._byte]:
                del file.held[self._byte]
                fcntl.lockf(file.descriptor, fcntl.LOCK_UN, 1, self._byte)
            _close_unused(self._file)


def own(database: Path, run_id: str) -> Ownership | None:
    """Become the owner of a run in this store; return None if another process owns it.

    Raises StoreError if the lock file can't be used.
    """
    path, byte = _lock_path(database), _byte(run_id)
    with _guard:
        try:
            private_file(path)
            key = _identity(path.stat())
            if key not in _files:
                _files[key] = _LockFile(os.open(path, os.O_RDWR))
            try:
                if not _files[key].held[byte] and not _lock(_files[key].descriptor, byte):
                    return None
                _files[key].held[byte] += 1
            finally:
                _close_unused(key)
        except OSError as error:
            raise StoreError(
                f"can't lock {path}: {error.strerror or error}; make {path.parent} and the files in it writable, "
                "or name a folder on another disk with --store DIR"
            ) from error
    return Ownership(key, byte)


def is_owned(database: Path, run_id: str) -> bool:
    """Return True if this or another process on this machine owns a run of this store."""
    path, byte = _lock_path(database), _byte(run_id)
    # Without a lock file, or without access to it, nobody writes here.
    with _guard, suppress(OSError):
        file = _files.get(_identity(path.stat()))
        if file is not None:
            return bool(file.held[byte]) or _locked(file.descriptor, byte)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _locked(descriptor, byte)
        finally:
            os.close(descriptor)
    return False


def _lock_path(database: Path) -> Path:
    return database.with_name("runs.lock")


def _byte(run_id: str) -> int:
    # By id and not by key, because a key of a removed database may come again.
    return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=7).digest(), "big")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _lock(descriptor: int, byte: int) -> bool:
    deadline = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return True
        except OSError as error:
            if error.errno not in _HELD:
                raise
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def _locked(descriptor: int, byte: int) -> bool:
    """Return True if another process has locked this byte."""
    try:
        # A shared lock needs no write access.
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        if error.errno not in _HELD:
            raise
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)
    return False


def _close_unused(key: tuple[int, int]) -> None:
    if not _files[key].held.total():
        os.close(_files.pop(key).descriptor)


def _forget() -> None:
    """Close the lock files in a fork of this process, which inherits the descriptors and none of the locks."""
    global _guard
    # Another thread may have held the old one during the fork.
    _guard = threading.Lock()
    for file in _files.values():
        with suppress(OSError):
            os.close(file.descriptor)
    _files.clear()


os.register_at_fork(after_in_child=_forget)
