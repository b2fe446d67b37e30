"""The formats of datasets. To add one, write its module and its line in `FORMATS`: whatever lists them reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.data.formats import csv, json, jsonl, parquet
from osmosis_ai.data.formats.source import Item, Source

__all__ = ["FORMATS", "Format", "format_of", "suffixes"]


class Format(NamedTuple):
    """One format.

    `read` gives the rows of a file without ever holding more than a few megabytes of them, and raises UnreadableError
    where it can't go on. `is_text` tells that the file is UTF-8.
    """

    suffix: str
    read: Callable[[Source], Iterator[Item]]
    description: str
    is_text: bool = True


FORMATS = (
    Format(".jsonl", jsonl.read, "one object per line"),
    Format(".json", json.read, "a list of objects"),
    Format(".csv", csv.read, "a header row, and all values text"),
    Format(".parquet", parquet.read, "as most data tools write it", is_text=False),
)
"""In the order in which they are listed."""


def format_of(path: Path) -> Format | None:
    """The format of a file, by its suffix in any case; None if it is no dataset."""
    return next((one for one in FORMATS if one.suffix == path.suffix.lower()), None)


def suffixes(last: str = ", ") -> str:
    """The suffixes as a text: `.jsonl, .json, .csv, .parquet`; `last` stands before the last one."""
    *others, final = (one.suffix for one in FORMATS)
    return f"{', '.join(others)}{last}{final}"
