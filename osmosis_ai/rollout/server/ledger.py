"""Record a server's accepted rollouts in a file, so that the next server can report those that were lost.

The file is a journal, locked while its server lives: one line when a rollout is accepted, and one when its result is
delivered or kept. Writes don't wait for the disk, so they survive the end of the process but not a power failure. The
trainer's key isn't written; `has_key` says that there was one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path

import msgspec

from osmosis_ai.folders import OWN_FOLDER, private_folder, read_bounded
from osmosis_ai.records import Record
from osmosis_ai.rollout.core.schemas import RolloutRequest

__all__ = ["Ledger", "OpenRollout"]

MAX_SIZE = 256 * 1024 * 1024
"""Bytes of another server's file that are read at most."""
SPARE_LINES = 1000
"""Lines of ended rollouts that may stay in the file."""


class OpenRollout(Record, frozen=True):
    """The data kept of an accepted rollout until it has ended."""

    rollout_id: str
    server_url: str
    has_key: bool


class _Line(Record, frozen=True, omit_defaults=True):
    """A line of the journal: a rollout is accepted, or has ended if it is absent."""

    number: int
    rollout: OpenRollout | None = None


class Ledger:
    """The open rollouts of one server, in the folder `open` below `undelivered`."""

    def __init__(self, undelivered: Path) -> None:
        self._undelivered = undelivered
        self._folder = undelivered / "open"
        self._open: dict[int, OpenRollout] = {}
        self._last = 0
        self._lines = 0
        self._file: Path | None = None
        self._descriptor = -1
        self._made_undelivered = False

    def accept(self, request: RolloutRequest) -> int:
        """Record an accepted rollout, and return its number; raise OSError."""
        return self._add(OpenRollout(request.rollout_id, request.server_url, bool(request.api_key)))

    def end(self, number: int) -> None:
        """Record the end of a rollout; raise OSError."""
        if self._open.pop(number, None) is None:
            return
        if self._lines < 2 * len(self._open) + SPARE_LINES:
            self._write(_Line(number))
            return
        # The old file goes last: a kill in between makes the next server report a rollout twice, but never loses one.
        old, before = self._file, self._descriptor
        self._begin()
        for still, rollout in self._open.items():
            self._write(_Line(still, rollout))
        _remove(old, before)

    def lost(self) -> list[tuple[int, OpenRollout]]:
        """Take over the rollouts of servers that were killed, with their new numbers.

        Raises:
            OSError, UnreadableError: A file can't be read.
        """
        # A rollout is in two files if a server was killed while it took over another's file.
        found: dict[OpenRollout, int] = {}
        for file in sorted(self._folder.glob("*.jsonl")):
            if file == self._file:
                continue
            try:
                descriptor = os.open(file, os.O_RDWR)
            except FileNotFoundError:
                continue  # its server has just ended
            # Its server is alive, or its file system has no locks and the file is better left alone.
            if not _lock(descriptor):
                os.close(descriptor)
                continue
            for rollout in _read(file):
                if rollout not in found:
                    found[rollout] = self._add(rollout)
            _remove(file, descriptor)
        return [(number, rollout) for rollout, number in found.items()]

    def close(self) -> None:
        """Release the file, and remove it if no rollout is open."""
        if self._file is None:
            return
        if self._open:
            os.close(self._descriptor)
        else:
            _remove(self._file, self._descriptor)
            # Unless others use them.
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                if self._made_undelivered:
                    self._undelivered.rmdir()
        self._file = None

    def _add(self, rollout: OpenRollout) -> int:
        if self._file is None:
            self._begin()
        self._last += 1
        self._write(_Line(self._last, rollout))
        self._open[self._last] = rollout
        return self._last

    def _begin(self) -> None:
        # Only this package's own folder is made private; a folder that the user names keeps its mode.
        if self._undelivered.parent.name == OWN_FOLDER:
            private_folder(self._undelivered.parent)
        with contextlib.suppress(FileExistsError):
            self._undelivered.mkdir(mode=0o700, parents=True)
            self._made_undelivered = True
        self._folder.mkdir(mode=0o700, exist_ok=True)
        new = self._folder / f"{secrets.token_hex(8)}.new"
        self._descriptor = os.open(new, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        _lock(self._descriptor)
        # Renamed once it is locked, so that no other server takes over the file in between.
        self._file, self._lines = new.rename(new.with_suffix(".jsonl")), 0

    def _write(self, line: _Line) -> None:
        # The line break comes first, because a full disk may have left the last line incomplete.
        encoded = b"\n" + msgspec.json.encode(line)
        if os.write(self._descriptor, encoded) < len(encoded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._lines += 1


def _read(file: Path) -> list[OpenRollout]:
    accepted: dict[int, OpenRollout] = {}
    for text in read_bounded(file, MAX_SIZE, "too large").splitlines():
        # A truncated line: its rollout was never acknowledged.
        with contextlib.suppress(msgspec.DecodeError):
            line = msgspec.json.decode(text, type=_Line)
            if line.rollout is None:
                accepted.pop(line.number, None)
            else:
                accepted[line.number] = line.rollout
    return list(accepted.values())


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(file: Path | None, descriptor: int) -> None:
    """Remove a locked file before releasing its lock, so that no other server takes it over in between."""
    if file is not None:
        file.unlink(missing_ok=True)
        os.close(descriptor)
