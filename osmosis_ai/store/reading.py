"""Read stored conversations for scoring, as they are stored: only the workers that score them decode them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import ClassVar

from osmosis_ai.errors import StoreError
from osmosis_ai.records import StoredInput
from osmosis_ai.store.schema import connect_reader, database_errors
from osmosis_ai.store.tables import Columns, select

__all__ = ["ScoringReader"]


class _Stored(Columns):
    table: ClassVar[str] = "rollouts"

    pk: int
    row_index: int
    run_index: int
    row_data: bytes
    trajectory: bytes


_SELECT = f"""
    SELECT {select(_Stored, row_data="rows.data", trajectory="trajectories.data")}
    FROM json_each(?) AS wanted JOIN rollouts ON pk = wanted.value JOIN trajectories ON rollout = pk
         JOIN rows ON rows.run = rollouts.run AND rows.row_id = rollouts.row_id
"""  # noqa: S608 - names of columns


class ScoringReader:
    """Reads the input of scoring functions over one open connection, without a transaction between two reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None

    def read(self, keys: Sequence[int]) -> list[StoredInput]:
        """Read the scoring input of stored rollouts, in the order of their keys (`RunStore.save_rollout`,
        `RunStore.unscored`).

        Raises StoreError if the file can't be read, or a rollout was removed.
        """
        with database_errors(self._path, "reading it"):
            if self._db is None:
                self._db = connect_reader(self._path)
            # One query for all rollouts costs half as much as one query each.
            found = starmap(_Stored, self._db.execute(_SELECT, (json.dumps(keys),)))
            inputs = {
                stored.pk: StoredInput(stored.row_index, stored.row_data, stored.trajectory, stored.run_index)
                for stored in found
            }
        if not inputs.keys() >= set(keys):
            raise StoreError(f"a rollout was removed from {self._path} in the meantime")
        return [inputs[key] for key in keys]

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
