"""Check an uploaded dataset in a separate process: `python -m osmosis_ai.platform.dataset_check FILE`.

A malicious file can exhaust memory or keep a parser busy, so the process has limits and leaves the server responsive.
It prints one JSON object.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import msgspec

from osmosis_ai.data.dataset import open_dataset
from osmosis_ai.errors import DatasetError
from osmosis_ai.records import JsonObject, Record, Row

__all__ = ["Checked", "check_file"]

PREVIEW_ROWS = 20
PREVIEW_TEXT = 2000
MAX_COLUMNS = 200
"""Bounds on what the database stores for a dataset: rows, characters of a value, and columns."""
MEMORY = 3 << 30
SECONDS = 1500
"""Limits of the process: bytes of address space, and seconds of CPU time."""


class Checked(Record, frozen=True):
    """The result of a check: an error, or the columns' statistics and the first rows."""

    error: str | None = None
    row_count: int = 0
    preview: list[JsonObject] = []
    statistics: JsonObject = {}


def check_file(path: Path, name: str) -> Checked:
    """Check a file in a process with limits; error messages call it `name`."""
    try:
        done = subprocess.run(  # noqa: S603 - this module itself
            [sys.executable, "-m", "osmosis_ai.platform.dataset_check", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # CPU time doesn't pass while the process waits for the disk.
            timeout=SECONDS * 2,
        )
    except subprocess.TimeoutExpired:
        return Checked(error=f"{name}: the check took more than {SECONDS * 2} s")
    # The limits end the process by a signal or a MemoryError.
    if done.returncode:
        return Checked(error=f"{name}: the check needs more than {MEMORY >> 30} GiB of memory or {SECONDS} s of CPU")
    checked = msgspec.json.decode(done.stdout, type=Checked)
    if checked.error is None:
        return checked
    # The user knows the file by its name, not by its path on the server.
    return Checked(error=checked.error.replace(str(path), name))


class _Column:
    """Collects statistics of one column."""

    def __init__(self) -> None:
        self._count = self._characters = self._longest = 0
        self._types: dict[str, int] = {}

    def add(self, value: object) -> None:
        if value is None:
            return
        self._count += 1
        kind = {str: "text", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}[type(value)]
        self._types[kind] = self._types.get(kind, 0) + 1
        if isinstance(value, str):
            self._characters += len(value)
            self._longest = max(self._longest, len(value))

    def figures(self) -> JsonObject:
        found: JsonObject = {"count": self._count, "types": self._types}
        if "text" in self._types:
            found |= {"mean_characters": round(self._characters / self._types["text"], 1), "longest": self._longest}
        return found


def _check(path: Path) -> Checked:
    columns: dict[str, _Column] = {}
    preview: list[JsonObject] = []

    def each(row: Row) -> None:
        values = _values(row)
        if len(preview) < PREVIEW_ROWS:
            preview.append({name: _short(value) for name, value in values.items()})
        for name, value in values.items():
            if name in columns or len(columns) < MAX_COLUMNS:
                columns.setdefault(name, _Column()).add(value)

    try:
        summary = open_dataset(path, bare=True).check(each=each)
    except DatasetError as error:
        return Checked(error=str(error))
    figures = {name: column.figures() for name, column in columns.items()}
    return Checked(
        row_count=summary.count,
        preview=preview,
        statistics={"rows": summary.count, "with_ground_truth": summary.with_ground_truth, "columns": figures},
    )


def _values(row: Row) -> JsonObject:
    named = {"system_prompt": row.system_prompt, "user_prompt": row.user_prompt, "ground_truth": row.ground_truth}
    return {**{name: value for name, value in named.items() if value not in (None, "")}, **row.extra}


def _short(value: object) -> object:
    return f"{value[:PREVIEW_TEXT]}…" if isinstance(value, str) and len(value) > PREVIEW_TEXT else value


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    sys.stdout.buffer.write(msgspec.json.encode(_check(Path(sys.argv[1]))))


if __name__ == "__main__":
    _main()
