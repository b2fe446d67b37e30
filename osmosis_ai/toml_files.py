"""Read TOML files within bounds, and find the lines of their keys."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osmosis_ai.folders import UnreadableError, read_bounded
from osmosis_ai.records import JsonObject

__all__ = ["MAX_TOML_BYTES", "KeyLines", "TomlError", "parse_toml", "read_toml", "read_toml_text"]

# In the standard library since Python 3.11; before that, the package it comes from.
_tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

MAX_TOML_BYTES = 256 * 1024
"""Far above any real config; the parser's time can grow with the square of a text's length."""

# The parser's time grows with the square of a key's parts; no real config has this many.
_LONG_KEY = re.compile(r"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")
_HEADER = re.compile(r"\s*\[{1,2}\s*([^\]#]+?)\s*\]{1,2}\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


class TomlError(UnreadableError):
    """A file can't be read as TOML."""


def read_toml_text(path: Path, root: Path) -> str:
    """Read the text of a TOML file that is in the repository after links are followed; raise TomlError."""
    try:
        if not path.resolve().is_relative_to(root.resolve()):
            raise TomlError("a link to a place outside the repository")
        too_large = f"larger than {MAX_TOML_BYTES // 1024} KiB, too large to be a config"
        data = read_bounded(path, MAX_TOML_BYTES, too_large)
    except RuntimeError:
        # Before Python 3.13, `resolve` raises this for a cycle.
        raise TomlError("can't be read: a cycle of links") from None
    except UnreadableError as error:
        raise TomlError(error.message) from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TomlError(f"not UTF-8 (byte 0x{data[error.start]:02x})", line) from None


def read_toml(path: Path, root: Path) -> JsonObject:
    """Read a TOML file that is in the repository; raise TomlError."""
    return parse_toml(read_toml_text(path, root))


def parse_toml(text: str) -> JsonObject:
    """Parse a TOML text; raise TomlError."""
    if (long_key := _LONG_KEY.search(text)) is not None:
        raise TomlError("a key of more than 64 parts", text.count("\n", 0, long_key.start()) + 1)
    try:
        document: JsonObject = _tomllib.loads(text)
        return document
    except _tomllib.TOMLDecodeError as error:
        message = str(error)
        place = re.search(r" \(at line (\d+), column \d+\)$", message)
        if place is None:
            raise TomlError(f"not valid TOML: {message}", text.count("\n") + 1) from None
        raise TomlError(f"not valid TOML: {message[: place.start()]}", int(place[1])) from None
    except RecursionError:
        raise TomlError("not usable: nested too deeply") from None
    except ValueError as error:
        raise TomlError(f"not usable: {error}") from None


class KeyLines:
    """The lines of a TOML text's tables and keys, found by matching its lines, because the parser doesn't tell."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        closing: str | None = None
        for number, line in enumerate(text.splitlines(), 1):
            if closing is not None:
                closing = None if line.count(closing) % 2 else closing
                continue
            header = _HEADER.match(line)
            if header is not None:
                table = _parts(header[1])
                self._note(table, number)
                continue
            key = _KEY.match(line)
            if key is not None:
                self._note((*table, *_parts(key[1])), number)
                # An inline table's keys are on the same line.
                for inner in re.finditer(r"[{,]\s*([A-Za-z0-9_-]+)\s*=", line[key.end() :]):
                    self._note((*table, *_parts(key[1]), inner[1]), number)
            # An odd number of triple quotes opens a multi-line string; its lines hold no keys.
            for quotes in ('"""', "'''"):
                if line.count(quotes) % 2:
                    closing = quotes

    def _note(self, path: tuple[str, ...], number: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], number)

    def of(self, *path: str) -> int | None:
        """Return the line of a key, else of the table it would be in; None if neither exists."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return self._lines[path[:length]]
        return None


def _parts(dotted: str) -> tuple[str, ...]:
    parts: Sequence[str] = _PART.findall(dotted)
    return tuple(part[1:-1] if part[0] in "\"'" else part for part in parts)
