"""The rows of a run, kept as they were when the dataset was checked and hashed, whatever happens to its file since."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from osmosis_ai.data.dataset import Dataset, DatasetSummary
from osmosis_ai.errors import DatasetError
from osmosis_ai.records import Row
from osmosis_ai.row_numbers import RowNumbers
from osmosis_ai.shards import Shard

__all__ = ["KeptRows", "keep_rows"]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Row).decode


def keep_rows(
    dataset: Dataset,
    folder: Path,
    *,
    offset: int = 0,
    limit: int | None = None,
    only: RowNumbers | None = None,
    shard: Shard | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[DatasetSummary, KeptRows]:
    """Check a range of a dataset as `Dataset.check` does, and keep its rows in a file in `folder` that has no name.

    With a `shard`, only its rows are kept and counted. Everything else in the summary is about the range, so that all
    shards are checked, and choose a stand-in, alike.

    Raises:
        DatasetError: Rows have problems, or can't be kept.
    """
    kept = KeptRows(dataset, folder)
    try:
        each = kept.add if shard is None else lambda row: kept.add(row) if shard.has(row.id) else None
        summary = dataset.check(offset=offset, limit=limit, only=only, progress=progress, each=each)
        kept.finish(summary)
    except BaseException:
        # Also at Ctrl-C: the file has no name, and its space is free only once it is closed.
        kept.close()
        raise
    return msgspec.structs.replace(summary, count=len(kept)), kept


class KeptRows:
    """Rows in a temporary file, with a number per row in memory. Made by `keep_rows`."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self._dataset = dataset
        self._folder = folder
        # Row N lies between entries N and N + 1; 8 bytes per row, where a list of ints would take 40.
        self._starts = array("Q", [0])
        self._summary: DatasetSummary | None = None
        # Before the first row is read, so that a save in the middle of reading is noticed.
        self._status = dataset.status()
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise self._error(error) from error

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Row:
        """Return a row by its number in the range, from 0; raises IndexError."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        start, end = self._starts[number], self._starts[number + 1]
        # Leaves the position alone, so several readers don't disturb each other.
        return _decode(os.pread(self._file.fileno(), end - start, start))

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def add(self, row: Row) -> None:
        """Append a row; raises DatasetError."""
        try:
            self._starts.append(self._starts[-1] + self._file.write(_encode(row)))
        except OSError as error:
            raise self._error(error) from error

    def finish(self, summary: DatasetSummary) -> None:
        """Note what the rows come from, once all are added; raises DatasetError."""
        try:
            # `os.pread` reads from the descriptor, so it doesn't see what is still in Python's buffer.
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error
        self._summary = summary

    def outdated(self) -> bool:
        """Return True if the dataset's file has other content by now, or is gone. Reads it if it was saved since."""
        assert self._summary is not None
        try:
            return self._dataset.status() != self._status and self._dataset.sha256() != self._summary.sha256
        except DatasetError:
            return True

    def close(self) -> None:
        """Give the space back."""
        self._file.close()

    def _error(self, error: OSError) -> DatasetError:
        return DatasetError(
            f"{self._dataset.path}: its rows can't be kept in {self._folder} during the run: "
            f"{error.strerror or error}; free some space, or name another folder with --store DIR"
        )
