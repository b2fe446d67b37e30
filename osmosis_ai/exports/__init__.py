"""Export stored rollouts as training data.

To add a format, write it in a file here and add it to `EXPORT_FORMATS`; the command line's choices, help and errors
and the table in docs/runs.md follow.
"""

from __future__ import annotations

from osmosis_ai.exports import jsonl, parquet
from osmosis_ai.exports.base import ExportFormat

__all__ = ["EXPORT_FORMATS", "ExportFormat", "format_of"]

EXPORT_FORMATS = {each.name: each for each in (jsonl.FORMAT, parquet.FORMAT)}
"""Every format by name; the first is the default."""


def format_of(file: str | None) -> ExportFormat:
    """Return the format of a file's suffix; the default for any other suffix, and without a file."""
    by_suffix = (each for each in EXPORT_FORMATS.values() if file is not None and file.endswith(each.suffix))
    return next(by_suffix, next(iter(EXPORT_FORMATS.values())))
