"""Export stored rollouts as training data.

To add a format, write it in a file here and add it to `EXPORT_FORMATS`; the command line's choices, help and errors
and the table in docs/runs.md follow.
"""

from __future__ import annotations

from pathlib import Path

from osmosis_ai.errors import UsageError
from osmosis_ai.exports import atif, jsonl, parquet, tokens, trl, verifiers
from osmosis_ai.exports.base import ExportFormat

__all__ = ["EXPORT_FORMATS", "ExportFormat", "format_of"]

EXPORT_FORMATS = {
    each.name: each
    for each in (
        jsonl.FORMAT,
        parquet.FORMAT,
        trl.SFT,
        trl.PREFERENCE,
        trl.PROMPTS,
        tokens.FORMAT,
        atif.FORMAT,
        verifiers.FORMAT,
    )
}
"""Every format by name; the first is the default."""


def format_of(file: str | None) -> ExportFormat:
    """Return the format of a file's suffix; the default without a file or a suffix. Raises UsageError."""
    suffix = Path(file).suffix if file is not None else ""
    known: dict[str, ExportFormat] = {}
    for each in EXPORT_FORMATS.values():
        known.setdefault(each.suffix, each)
    if not suffix:
        return next(iter(known.values()))
    if suffix not in known:
        formats = ", ".join(f"{each.name} ({each.suffix})" for each in known.values())
        raise UsageError(f"-o {file}: no export format has the suffix {suffix}; use one of {formats}, or --format")
    return known[suffix]
