"""A running run's current progress: its in-flight rollouts, in a file beside the store that exists only while they do.

A file and not a table: it is replaced twice a second, and nobody needs it after the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from osmosis_ai.records import Record

__all__ = ["LiveFile", "RunningRollout", "live_path", "read_live"]

MOST = 200
"""Rollouts in the file; a run with more has its oldest ones there."""


class RunningRollout(Record, frozen=True):
    """A rollout in flight. `started_at` is in seconds since the epoch; `node` is empty on this machine."""

    row_index: int
    run_index: int
    started_at: float
    waiting_on: str
    node: str = ""


_decoder = msgspec.json.Decoder(list[RunningRollout])


def live_path(database: Path, run_id: str) -> Path:
    """Return the path of a run's file."""
    return database.parent / "live" / f"{run_id}.json"


def read_live(database: Path, run_id: str) -> list[RunningRollout]:
    """Return a run's in-flight rollouts, oldest first; empty if the run isn't running."""
    try:
        return _decoder.decode(live_path(database, run_id).read_bytes())
    except (OSError, msgspec.DecodeError):
        return []


class LiveFile:
    """Writes a run's file. What can't be written is left out: the run is worth more.

    `encode` encodes a value as JSON text, with keys masked.
    """

    def __init__(self, database: Path, run_id: str, encode: Callable[[object], str]) -> None:
        self._path = live_path(database, run_id)
        self._encode = encode
        self._shown: list[tuple[int, int, str]] = []

    def show(self, rollouts: Sequence[RunningRollout]) -> None:
        """Replace the file if other rollouts are in flight, or one waits for something else."""
        shown = [(each.row_index, each.run_index, each.waiting_on) for each in rollouts[:MOST]]
        if shown == self._shown:
            return
        self._shown = shown
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            partial.write_text(self._encode(rollouts[:MOST]), encoding="utf-8")
            partial.replace(self._path)

    def remove(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
