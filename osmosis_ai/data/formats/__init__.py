"""The dataset formats. To add one, write its module and a line in `FORMATS`, from which all lists of formats come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.data.formats import csv, json, jsonl, parquet
from osmosis_ai.data.formats.source import Item, Source

__all__ = ["FORMATS", "Format", "format_of", "suffixes"]


class Format(NamedTuple):
    """One format.

    `read` yields the rows of a file without holding more than a few megabytes of them, and raises UnreadableError if it
    can't continue. `is_text` is True if the file is UTF-8.
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
"""All formats, in the order shown to users."""


def format_of(path: Path) -> Format | None:
    """Return the format of a file by its suffix, ignoring case; None if it isn't a dataset's."""
    return next((one for one in FORMATS if one.suffix == path.suffix.lower()), None)


def suffixes(last: str = ", ") -> str:
    """Return the suffixes as text: `.jsonl, .json, .csv, .parquet`; `last` precedes the last one."""
    *others, final = (one.suffix for one in FORMATS)
    return f"{', '.join(others)}{last}{final}"
