"""Import other tools' files: logs and traces as runs, configs and datasets as rows.

To add a format, write it in a file here and add it to `IMPORT_FORMATS`; the command line's choices, help and errors and
the table in docs/coming-from.md follow.
"""

from __future__ import annotations

from pathlib import Path

from osmosis_ai.data.formats.source import BYTE_ORDER_MARK
from osmosis_ai.errors import UsageError
from osmosis_ai.importers import eval_protocol, inspect_ai, promptfoo, verifiers, vf_eval
from osmosis_ai.importers.base import ImportFormat

__all__ = ["HEAD_BYTES", "IMPORT_FORMATS", "ImportFormat", "file_in", "recognised"]

HEAD_BYTES = 4 * 1024 * 1024
"""Bytes by which a format is recognised: the first line of a file of traces may be this long."""
FILES = ("traces.jsonl", "results.jsonl", "promptfooconfig.yaml", "promptfooconfig.json")
"""The files to read if a tool's results folder is given."""

IMPORT_FORMATS = {
    each.name: each
    for each in (
        inspect_ai.FORMAT,
        verifiers.FORMAT,
        vf_eval.FORMAT,
        promptfoo.FORMAT,
        eval_protocol.FORMAT,
    )
}
"""Every format by name, in the order in which they are tried."""


def file_in(path: Path) -> Path:
    """Return the file itself, or the results file in a tool's results folder."""
    return next((path / name for name in FILES if (path / name).is_file()), path) if path.is_dir() else path


def recognised(path: Path) -> ImportFormat:
    """Return the format of a file; raise UsageError if no format matches, or the file can't be read."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES).removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from None
    # A later line may mention the fields of any format.
    if path.suffix == ".jsonl":
        head = head.lstrip().partition(b"\n")[0]
    for each in IMPORT_FORMATS.values():
        if each.recognises(path, head):
            return each
    known = "; ".join(f"{each.name}: {each.description}" for each in IMPORT_FORMATS.values())
    hint = "; a dataset of rows needs no import: name it with -d" if b"user_prompt" in head else ""
    raise UsageError(f"{path} is in no format that can be imported ({known}){hint}. --format names one")
