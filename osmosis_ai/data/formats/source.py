"""Shared parts of the format readers: the file they read, the items they yield, and their error texts."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from osmosis_ai import bounds
from osmosis_ai.bounds import MAX_DEPTH
from osmosis_ai.records import JsonObject

__all__ = [
    "BYTE_ORDER_MARK",
    "CHUNK",
    "MAX_ROW_BYTES",
    "BadRowError",
    "Item",
    "Source",
    "UnreadableError",
    "check_columns",
    "collision",
    "decoded",
    "found",
    "missing",
    "not_utf8",
    "quoted",
    "text_lines",
    "too_deep",
    "too_large",
]

MAX_ROW_BYTES = 64 * 1024 * 1024
"""Largest row. Without a bound, a file without line ends would be read into memory as one row."""
CHUNK = 256 * 1024
"""Bytes per read, and between two calls of a progress callback."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Spreadsheets write it before UTF-8, where it would become part of the first column's name."""


class Item(NamedTuple):
    """One row from a reader: its place (`line 3`), and its values or its problem.

    `read` is the number of bytes read from the file so far.
    """

    where: str
    content: JsonObject | str
    read: int


class UnreadableError(Exception):
    """The file can't be read beyond this point."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where
        self.message = message


class BadRowError(Exception):
    """One row can't be used; later ones can."""


class _HashedFile(io.FileIO):
    """A file that hashes its bytes as they are read, from beginning to end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.hash = hashlib.sha256()
        self.consumed = 0

    def readinto(self, buffer: Any) -> int:
        # `BufferedReader` reads through this method, except in `read()` without a size, which no reader may call.
        count = super().readinto(buffer) or 0
        self.hash.update(memoryview(buffer)[:count])
        self.consumed += count
        return count


class Source:
    """A dataset's file under a reader. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = _HashedFile(path)
        self.file = io.BufferedReader(self._raw, CHUNK)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    @property
    def consumed(self) -> int:
        """The number of bytes read so far."""
        return self._raw.consumed

    def sha256(self) -> str:
        """Read the rest of the file and return the hash of all its bytes."""
        # For Parquet that is the whole file, because PyArrow opens it a second time.
        while self.file.read(CHUNK):
            pass
        return self._raw.hash.hexdigest()


def text_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines without a byte order mark; None for a line that is too long for a row."""
    line = file.readline(MAX_ROW_BYTES + 1)
    line = line.removeprefix(BYTE_ORDER_MARK)
    while line:
        if len(line) > MAX_ROW_BYTES:
            # In pieces, so that the line is never in memory as a whole.
            while line and not line.endswith(b"\n"):
                line = file.readline(CHUNK)
            yield None
        else:
            yield line
        line = file.readline(MAX_ROW_BYTES + 1)


def decoded(data: bytes) -> JsonObject | str:
    """Return a JSON object's values, or its problem as text."""
    try:
        value = msgspec.json.decode(data)
    except UnicodeDecodeError as error:
        return not_utf8(error)
    except RecursionError:
        return too_deep()
    except msgspec.DecodeError as error:
        return f"not valid JSON: {_constant(data) or error}"
    if not isinstance(value, dict):
        return f"{'a string' if isinstance(value, str) else found(value)}, where an object is expected"
    # Counting brackets is cheap; few rows need the walk.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and bounds.too_deep(value):
        return too_deep()
    return value


def _constant(data: bytes) -> str | None:
    """Name the first NaN or Infinity in a row that isn't valid JSON, which many programs write; None if it has none."""

    def refuse(name: str) -> None:
        raise UnreadableError("", f"{name} is not a JSON value; write null, or leave the column out")

    try:
        json.loads(data, parse_constant=refuse)
    except UnreadableError as error:
        return error.message
    except (ValueError, RecursionError):
        return None
    return None


# Error texts


def check_columns(names: list[str], where: str) -> None:
    """Check a file's header once, so that a missing column isn't reported for every row; raises UnreadableError."""
    folded = {name.casefold() for name in names}
    if len(folded) != len(names):
        raise UnreadableError(where, collision(names))
    wrong = [missing(column, names) for column in ("system_prompt", "user_prompt") if column not in folded]
    if wrong:
        raise UnreadableError(where, "; ".join(wrong))


def collision(names: list[str]) -> str:
    """Name two columns whose names differ only in case; the caller knows that there are some."""
    seen: dict[str, str] = {}
    for name in names:
        if name.casefold() in seen:
            other = seen[name.casefold()]
            return f"columns {quoted(other)} and {quoted(name)} have the same name (case doesn't count)"
        seen[name.casefold()] = name
    raise AssertionError("called without a collision")


def missing(column: str, names: list[str]) -> str:
    """Name a missing column and the columns found."""
    there = ", ".join(quoted(name) for name in names[:20]) + (", …" if len(names) > 20 else "")
    return f"column {column} is missing (found: {there or 'no column'})"


def quoted(name: str) -> str:
    """Quote a column's name, cut if it is long."""
    return repr(name if len(name) <= 60 else name[:60] + "…")


def found(value: object) -> str:
    """Describe a value in a few words."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, str):
        return "only whitespace" if value else "an empty string"
    if isinstance(value, bool):
        return f"a boolean ({'true' if value else 'false'})"
    if isinstance(value, (int, float)):
        text = str(value)
        return f"a number ({text if len(text) <= 40 else text[:40] + '…'})"
    return "a list" if isinstance(value, list) else "an object"


def too_deep() -> str:
    """Describe a row that is nested too deeply."""
    return f"nested more than {MAX_DEPTH} levels deep"


def too_large() -> str:
    """Describe a row that is too large."""
    return f"larger than {MAX_ROW_BYTES // 1024**2} MiB, the most a row may take"


def not_utf8(error: UnicodeDecodeError) -> str:
    """Describe bytes that aren't UTF-8, with the first of them."""
    return f"not UTF-8: {error.reason} (byte 0x{error.object[error.start]:02x}). Save it as UTF-8"
