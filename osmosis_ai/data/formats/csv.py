"""Read CSV with a header row; all values are text."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO

from osmosis_ai.data.formats.source import (
    MAX_ROW_BYTES,
    Item,
    Source,
    UnreadableError,
    check_columns,
    not_utf8,
    text_lines,
    too_large,
)
from osmosis_ai.records import JsonObject
from osmosis_ai.text import counted

__all__ = ["read"]


class _CsvLines:
    """The file's lines as text, for csv.reader; `size` counts the bytes of the record being read."""

    def __init__(self, file: BinaryIO) -> None:
        self._lines = enumerate(text_lines(file), 1)
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, line = next(self._lines)
        # Final, unlike in JSON lines: inside a record, nothing shows where the next one begins.
        if line is None or self.size + len(line) > MAX_ROW_BYTES:
            raise UnreadableError(f"line {number}", f"{too_large()} (is a quote not closed?)")
        self.size += len(line)
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableError(f"line {number}", not_utf8(error)) from None


def read(source: Source) -> Iterator[Item]:
    """Yield the records after the header."""
    # The default limit of 128 KiB is shorter than a long prompt. The limit is global, so it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
    lines = _CsvLines(source.file)
    # Without `strict`, a quote that is never closed takes the rest of the file into one cell without an error.
    records = csv.reader(lines, strict=True)
    header: list[str] | None = None
    while True:
        first, lines.size = records.line_num + 1, 0
        try:
            cells = next(records, None)
        except csv.Error as error:
            raise UnreadableError(f"line {first}", _csv_message(error)) from None
        if cells is None:
            break
        where = f"line {first}"
        # The reader yields an empty record for a blank line.
        if not cells:
            continue
        if header is None:
            header = cells
            _check_separator(cells, where)
            check_columns(header, where)
            truths = {name for name in header if name.casefold() == "ground_truth"}
        elif len(cells) != len(header):
            message = f"{counted(len(cells), 'cell')}, where the header has {len(header)}"
            yield Item(where, message, source.consumed)
        else:
            values: JsonObject = dict(zip(header, cells, strict=True))
            for name in truths:
                # CSV has no null: an empty cell is its only way to have no ground truth.
                values[name] = values[name] or None
            yield Item(where, values, source.consumed)
    if header is None:
        raise UnreadableError("", "the file has no header row.")


def _check_separator(header: list[str], where: str) -> None:
    """Name another separator than the comma, rather than a missing column; raises UnreadableError."""
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and "user_prompt" in header[0].casefold().split(separator):
            raise UnreadableError(where, f"the cells are separated by {name}; save it with commas")


def _csv_message(error: csv.Error) -> str:
    # The `csv` module's text, which names neither the quote nor its place.
    if str(error) == "unexpected end of data":
        return "not valid CSV: a quote opened in this row is never closed"
    return f"not valid CSV: {error}"
