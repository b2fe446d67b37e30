"""Keep the accepted rollouts of a server on disk, so that the next server reports those that it lost.

Each server has a folder with one small file for each open rollout, and locks it while it lives. The trainer's key isn't
written: `has_key` only says that there is one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from osmosis_ai.folders import OWN_FOLDER, UnreadableError, private_folder, read_bounded, replaced_file
from osmosis_ai.records import Record
from osmosis_ai.rollout.core.schemas import RolloutRequest

__all__ = ["Ledger", "Lost", "OpenRollout"]

LOCK = "lock"
MAX_ENTRY = 64 * 1024


class OpenRollout(Record, frozen=True):
    """What is kept of an accepted rollout until its result is delivered or kept."""

    rollout_id: str
    server_url: str
    has_key: bool


class Lost(NamedTuple):
    """A rollout that another server accepted and didn't finish, and its file."""

    rollout: OpenRollout
    file: Path


class Ledger:
    """The open rollouts of one server, below `undelivered`. Nothing is created before the first one is added."""

    def __init__(self, undelivered: Path) -> None:
        self._undelivered = undelivered
        self._folder = undelivered / "open" / secrets.token_hex(8)
        self._locks = contextlib.ExitStack()
        self._emptied: list[Path] = []
        self._is_ready = False
        self._made_undelivered = False
        self._making = threading.Lock()

    def new_file(self) -> Path:
        """Return the file for one more rollout, which doesn't exist yet."""
        return self._folder / f"{secrets.token_hex(8)}.json"

    def add(self, file: Path, request: RolloutRequest) -> None:
        """Write a rollout to disk; blocks until it is there. Raise OSError."""
        self._make_folder()
        kept = OpenRollout(request.rollout_id, request.server_url, bool(request.api_key))
        with replaced_file(file, private=True) as sink:
            sink.write(msgspec.json.encode(kept))

    def lost(self) -> Iterator[Lost]:
        """Yield the rollouts of servers that were killed. They are this one's from now on."""
        for folder in sorted(self._undelivered.glob("open/*/")):
            if folder == self._folder or not self._lock(folder):
                continue
            self._emptied.append(folder)
            for file in sorted(folder.glob("*.json")):
                try:
                    yield Lost(msgspec.json.decode(read_bounded(file, MAX_ENTRY, "too large"), type=OpenRollout), file)
                except (UnreadableError, msgspec.DecodeError):
                    # No server writes such a file.
                    file.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the locks, and remove the folders in which nothing is left."""
        with self._locks:
            for folder in (self._folder, *self._emptied):
                if not any(folder.glob("*.json")):
                    (folder / LOCK).unlink(missing_ok=True)
                    _remove(folder)
            _remove(self._folder.parent)
            if self._made_undelivered:
                _remove(self._undelivered)

    def _make_folder(self) -> None:
        # Several threads add rollouts.
        with self._making:
            if self._is_ready:
                return
            if self._undelivered.parent.name == OWN_FOLDER:
                private_folder(self._undelivered.parent)
            with contextlib.suppress(FileExistsError):
                self._undelivered.mkdir(mode=0o700, parents=True)
                self._made_undelivered = True
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock(self._folder)
            self._is_ready = True

    def _lock(self, folder: Path) -> bool:
        """Lock a folder until `close`; return False if its server lives."""
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._locks.callback(os.close, descriptor)
        return True


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
