"""Dataset rows from .jsonl, .json, .csv and .parquet: streamed, validated, identified.

No file is ever held: a reader keeps one row, or a few megabytes of rows, at a time. A row may take up to
`MAX_ROW_BYTES`; beyond that it is reported as a problem instead of being read.

Columns, names case-insensitive:
    system_prompt, user_prompt   strings with something in them
    ground_truth                 optional; what isn't a string becomes JSON text with sorted keys; null, an absent
                                 column and an empty CSV cell are None
    any other                    goes into `Row.extra` under its name as written

CSV values are always strings. Parquet values become JSON-able ones: dates and times ISO 8601 text, decimals and
durations text, bytes base64 text, maps lists of pairs, NaN None. Infinities have no such form and are a problem.
"""

from __future__ import annotations

import base64
import csv
import datetime
import decimal
import hashlib
import itertools
import math
import numbers
import re
import stat
import uuid
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from osmosis_ai.errors import DatasetError
from osmosis_ai.records import Record, Row
from osmosis_ai.text import counted

__all__ = ["MAX_ROW_BYTES", "SUFFIXES", "Dataset", "DatasetSummary", "RowProblem", "open_dataset"]

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_ROW_BYTES = 64 * 1024 * 1024

_CHUNK = 256 * 1024
_MAX_DEPTH = 200
_MAX_COLUMNS = 1000
_SHOWN_PROBLEMS = 10
_PARQUET_BATCH_ROWS = 256
_PARQUET_BATCH_BYTES = 4 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class DatasetSummary(Record, frozen=True):
    """What one pass over a dataset found.

    `count` and `with_ground_truth` are numbers of rows in the range that was checked, `columns` the column names in
    order of appearance (the first thousand), `sha256` the hash of the file's bytes.
    """

    count: int
    sha256: str
    columns: tuple[str, ...]
    with_ground_truth: int = 0


def open_dataset(path: Path) -> Dataset:
    """Return the dataset in `path`, chosen by its suffix; rows are not looked at yet.

    Raises:
        DatasetError: The file is missing, no regular file, empty, unreadable, of an unknown suffix or UTF-16.
    """
    known = ", ".join(SUFFIXES)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DatasetError(f"{path}: no such file. A dataset is one of {known}.") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: can't be read: {_reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        raise DatasetError(f"{path}: a folder, where a dataset file is expected ({known}).")
    if not stat.S_ISREG(status.st_mode):
        raise DatasetError(f"{path}: not a regular file. A dataset is read more than once, so save it as a file first.")
    if path.suffix.lower() not in SUFFIXES:
        found = f"unknown suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise DatasetError(f"{path}: {found}. A dataset is one of {known}.")
    if status.st_size == 0:
        raise DatasetError(f"{path}: the file is empty.")
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError as error:
        raise DatasetError(f"{path}: can't be read: {_reason(error)}") from None
    if path.suffix.lower() != ".parquet" and start in (b"\xff\xfe", b"\xfe\xff"):
        raise DatasetError(f"{path}: the file is UTF-16. Save it as UTF-8.")
    return Dataset(path)


@dataclass(frozen=True)
class Dataset:
    """Rows in a file; see `open_dataset`. Every pass reads the file anew."""

    path: Path

    def rows(self, *, offset: int = 0, limit: int | None = None) -> Iterator[Row]:
        """Stream the rows from number `offset` (the first is 0), at most `limit` of them.

        `Row.index` and `Row.id` are the same whatever the range. Rows with problems outside the range are passed over.

        Raises:
            DatasetError: At the first row in the range that has a problem; `check` finds them all beforehand.
            ValueError: `offset` or `limit` is negative.
        """
        _check_range(offset, limit)
        return self._rows(offset, limit)

    def scan(self) -> Iterator[Row | RowProblem]:
        """Stream every row, and for each that can't be used what is wrong with it."""
        return self._scan(0, None)

    def _rows(self, offset: int, limit: int | None) -> Iterator[Row]:
        for item in self._scan(offset, limit):
            if isinstance(item, RowProblem):
                raise DatasetError(f"{self.path}{item.shown()}")
            yield item

    def check(
        self,
        *,
        offset: int = 0,
        limit: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> DatasetSummary:
        """Read every row of a range once and summarize them.

        Args:
            offset: Number of the first row; the file's first is 0.
            limit: At most so many rows; None for all.
            progress: Called now and then with the bytes read so far and the file's size in bytes.

        Raises:
            DatasetError: Rows have problems (the first ten are listed, the others counted), no row is in the range, or
                the file changed while it was read.
            ValueError: `offset` or `limit` is negative.
        """
        _check_range(offset, limit)
        before = self._status()
        problems: list[RowProblem] = []
        unlisted = count = with_ground_truth = 0
        columns = dict.fromkeys(("system_prompt", "user_prompt"))
        for item in self._scan(offset, limit, progress):
            if isinstance(item, RowProblem):
                if len(problems) < _SHOWN_PROBLEMS or item.final:
                    problems.append(item)
                else:
                    unlisted += 1
                continue
            count += 1
            if item.ground_truth is not None:
                with_ground_truth += 1
                columns.setdefault("ground_truth")
            if len(columns) < _MAX_COLUMNS:
                columns.update(dict.fromkeys(item.extra))
        if problems:
            raise DatasetError(self._report(problems, unlisted))
        if not count:
            raise DatasetError(self._nothing(offset))
        digest = self._sha256()
        if self._status() != before:
            raise DatasetError(f"{self.path}: the file changed while it was read. Run again.")
        if progress is not None:
            progress(before[0], before[0])
        return DatasetSummary(
            count=count,
            sha256=digest,
            columns=tuple(itertools.islice(columns, _MAX_COLUMNS)),
            with_ground_truth=with_ground_truth,
        )

    def _scan(
        self, offset: int, limit: int | None, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[Row | RowProblem]:
        end = None if limit is None else offset + limit
        size = self._status()[0]
        occurrences = _Occurrences()
        due = 0
        try:
            for index, item in enumerate(itertools.islice(self._items(), end)):
                if progress is not None and item.read >= due:
                    progress(item.read, size)
                    due = item.read + _CHUNK
                problem = item.content if isinstance(item.content, str) else None
                if not isinstance(item.content, str):
                    try:
                        fields = _fields(item.content)
                    except _BadRow as error:
                        problem = str(error)
                if problem is not None:
                    if index >= offset:
                        yield RowProblem(item.where, problem)
                    continue
                # Rows before the offset count too, or an id would depend on the range.
                row_id = occurrences.identify(fields)
                if index >= offset:
                    yield Row(index, row_id, *fields)
        except _Unreadable as error:
            yield RowProblem(error.where, error.message, final=True)

    def _items(self) -> Iterator[_Item]:
        try:
            if self.path.suffix.lower() == ".parquet":
                yield from _read_parquet(self.path)
                return
            read = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}[self.path.suffix.lower()]
            with self.path.open("rb") as file:
                yield from read(file)
        except OSError as error:
            raise _Unreadable("", f"can't be read: {_reason(error)}") from None

    def _status(self) -> tuple[int, int]:
        """Size in bytes and time of last change in nanoseconds."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise DatasetError(f"{self.path}: can't be read: {_reason(error)}") from None
        return status.st_size, status.st_mtime_ns

    def _sha256(self) -> str:
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except OSError as error:
            raise DatasetError(f"{self.path}: can't be read: {_reason(error)}") from None
        return digest.hexdigest()

    def _report(self, problems: list[RowProblem], unlisted: int) -> str:
        if len(problems) == 1:
            return f"{self.path}{problems[0].shown()}"
        lines = [f"{self.path}: {len(problems) + unlisted} problems"]
        lines += [f"  {problem.where or 'file'}: {problem.message}" for problem in problems]
        if unlisted:
            lines.append(f"  and {unlisted} more")
        if problems[-1].final:
            lines.append("  Reading stopped there; what follows was not checked.")
        return "\n".join(lines)

    def _nothing(self, offset: int) -> str:
        total = sum(1 for _ in self._items())
        if total == 0:
            return f"{self.path}: the file has no rows."
        if offset >= total:
            return f"{self.path}: no row is left after offset {offset}; the file has {counted(total, 'row')}."
        return f"{self.path}: a limit of 0 leaves none of its {counted(total, 'row')}."


class _Item(NamedTuple):
    """One row as a reader found it: its values, or what is wrong with it; `read` is how many bytes are behind it."""

    where: str
    content: dict[str, Any] | str
    read: int


class RowProblem(NamedTuple):
    """A row that can't be used: `where` it is (`line 3`) and why; after a `final` one nothing more can be read."""

    where: str
    message: str
    final: bool = False

    def shown(self) -> str:
        return f", {self.where}: {self.message}" if self.where else f": {self.message}"


class _Unreadable(Exception):  # noqa: N818 - says what the file is, and never leaves this module
    """The file can't be read beyond this point."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where
        self.message = message


class _BadRow(Exception):  # noqa: N818 - says what the row is, and never leaves this module
    """One row can't be used; the ones after it can."""


# Rows


class _Fields(NamedTuple):
    system_prompt: str
    user_prompt: str
    ground_truth: str | None
    extra: dict[str, Any]


def _fields(values: dict[str, Any]) -> _Fields:
    names = {name.casefold(): name for name in values}
    if len(names) != len(values):
        raise _BadRow(_collision(list(values)))
    wrong: list[str] = []
    prompts: list[Any] = []
    for column in ("system_prompt", "user_prompt"):
        name = names.pop(column, None)
        value = None if name is None else values[name]
        if name is None:
            wrong.append(_missing(column, list(values)))
        elif not isinstance(value, str) or not value.strip():
            wrong.append(f"column {column}: {_found(value)}, where text is expected")
        prompts.append(value)
    name = names.pop("ground_truth", None)
    truth: Any = None if name is None else values[name]
    if isinstance(truth, bytes):
        wrong.append(f"column ground_truth: {_found(truth)}, where text is expected")
    elif truth is not None and not isinstance(truth, str):
        truth = _canonical(truth).decode()
    if wrong:
        raise _BadRow("; ".join(wrong))
    return _Fields(prompts[0], prompts[1], truth, {name: values[name] for name in names.values()})


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _check_columns(names: list[str], where: str) -> None:
    """Check a file's header once, so that a missing column isn't reported for every row."""
    folded = {name.casefold() for name in names}
    if len(folded) != len(names):
        raise _Unreadable(where, _collision(names))
    wrong = [_missing(column, names) for column in ("system_prompt", "user_prompt") if column not in folded]
    if wrong:
        raise _Unreadable(where, "; ".join(wrong))


def _collision(names: list[str]) -> str:
    seen: dict[str, str] = {}
    for name in names:
        if name.casefold() in seen:
            other = seen[name.casefold()]
            return f"columns {_quoted(other)} and {_quoted(name)} have the same name (case doesn't count)"
        seen[name.casefold()] = name
    raise AssertionError("called without a collision")


def _missing(column: str, names: list[str]) -> str:
    found = ", ".join(_quoted(name) for name in names[:20]) + (", …" if len(names) > 20 else "")
    return f"column {column} is missing (found: {found or 'no column'})"


def _quoted(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:60] + "…")


def _found(value: Any) -> str:
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


class _Occurrences:
    """Counts equal rows. An open-addressing table in two arrays: 12 bytes a slot, where a dict needs over 100."""

    def __init__(self) -> None:
        self._used = 0
        self._allocate(1024)

    def _allocate(self, slots: int) -> None:
        self._mask = slots - 1
        self._keys = array("Q", bytes(8 * slots))
        self._counts = array("I", bytes(array("I").itemsize * slots))

    def identify(self, fields: _Fields) -> str:
        """Return the row's id: 16 hex digits from its content and its occurrence number among equal rows."""
        content = hashlib.blake2b(_canonical(fields), digest_size=8).digest()
        number = self._count(int.from_bytes(content, "big"))
        return hashlib.blake2b(content + number.to_bytes(8, "big"), digest_size=8).hexdigest()

    def _slot(self, key: int) -> int:
        slot = key & self._mask
        while self._counts[slot] and self._keys[slot] != key:
            slot = (slot + 1) & self._mask
        return slot

    def _count(self, key: int) -> int:
        slot = self._slot(key)
        if not self._counts[slot]:
            if 3 * self._used > 2 * self._mask:
                keys, counts = self._keys, self._counts
                self._allocate(2 * len(keys))
                for old_key, count in zip(keys, counts, strict=True):
                    if count:
                        moved = self._slot(old_key)
                        self._keys[moved], self._counts[moved] = old_key, count
                slot = self._slot(key)
            self._used += 1
            self._keys[slot] = key
        self._counts[slot] += 1
        return self._counts[slot]


# Lines


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines, without a byte order mark; None for one that is longer than a row may be."""
    line = file.readline(MAX_ROW_BYTES + 1)
    line = line.removeprefix(_BOM)
    while line:
        if len(line) > MAX_ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(_CHUNK)
            yield None
        else:
            yield line
        line = file.readline(MAX_ROW_BYTES + 1)


def _read_jsonl(file: BinaryIO) -> Iterator[_Item]:
    for number, line in enumerate(_lines(file), 1):
        if line is None:
            yield _Item(f"line {number}", _too_large(), file.tell())
        elif not line.isspace():
            yield _Item(f"line {number}", _decoded(line), file.tell())


def _decoded(data: bytes) -> dict[str, Any] | str:
    """Return a JSON object's values, or what is wrong with it."""
    try:
        value = msgspec.json.decode(data)
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} (byte 0x{error.object[error.start]:02x})"
    except RecursionError:
        return _too_deep()
    except msgspec.DecodeError as error:
        return f"not valid JSON: {error}"
    if not isinstance(value, dict):
        return f"{'a string' if isinstance(value, str) else _found(value)}, where an object is expected"
    # Counting first is cheap; hardly a row needs the walk.
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH and _depth_exceeds(value, _MAX_DEPTH):
        return _too_deep()
    return value


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _too_deep() -> str:
    return f"nested more than {_MAX_DEPTH} levels deep"


def _too_large() -> str:
    return f"larger than {MAX_ROW_BYTES // 1024**2} MiB, the most a row may take"


# CSV


class _CsvLines:
    """The file's lines as text, for csv.reader; `size` counts the bytes of the record being read."""

    def __init__(self, file: BinaryIO) -> None:
        self._lines = enumerate(_lines(file), 1)
        self.size = 0
        self.read = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, line = next(self._lines)
        if line is None or self.size + len(line) > MAX_ROW_BYTES:
            raise _Unreadable(f"line {number}", f"{_too_large()} (is a quote not closed?)")
        self.size += len(line)
        self.read += len(line)
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"not UTF-8: {error.reason} (byte 0x{line[error.start]:02x})"
            raise _Unreadable(f"line {number}", message) from None


def _read_csv(file: BinaryIO) -> Iterator[_Item]:
    # The limit is the process's, so it is only ever raised; the default of 128 KiB is less than a long prompt.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
    lines = _CsvLines(file)
    records = csv.reader(lines, strict=True)
    header: list[str] | None = None
    while True:
        first, lines.size = records.line_num + 1, 0
        try:
            cells = next(records, None)
        except csv.Error as error:
            raise _Unreadable(f"line {first}", _csv_message(error)) from None
        if cells is None:
            break
        where = f"line {first}"
        if not cells:
            continue
        if header is None:
            header = cells
            _check_columns(header, where)
            truths = {name for name in header if name.casefold() == "ground_truth"}
        elif len(cells) != len(header):
            message = f"{counted(len(cells), 'cell')}, where the header has {len(header)}"
            yield _Item(where, message, lines.read)
        else:
            values: dict[str, Any] = dict(zip(header, cells, strict=True))
            for name in truths:
                values[name] = values[name] or None
            yield _Item(where, values, lines.read)
    if header is None:
        raise _Unreadable("", "the file has no header row.")


def _csv_message(error: csv.Error) -> str:
    if str(error) == "unexpected end of data":
        return "not valid CSV: a quote opened in this row is never closed"
    return f"not valid CSV: {error}"


# A JSON list

_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb'[^ \t\r\n,"\[\]{}]*')
# Runs over text and strings without escapes, up to a bracket or a harder string. The repetition is bounded because
# the expression engine keeps a record of each round.
_PLAIN = re.compile(rb'[^"\[\]{}]*(?:"[^"\\]*"[^"\[\]{}]*){0,500}')


def _read_json(file: BinaryIO) -> Iterator[_Item]:
    window = _JsonWindow(file)
    start = window.peek()
    if start != b"[":
        raise _Unreadable(f"line {window.line}", _not_a_list(start))
    window.take(1)
    index = 0
    last = window.peek() == b"]"
    if last:
        window.take(1)
    while not last:
        window.peek()
        where = f"line {window.line}, row {index} (the first is 0)"
        element = window.element(where)
        yield _Item(where, _decoded(element), window.consumed)
        index += 1
        separator = window.peek()
        if separator not in (b",", b"]"):
            found = f"found {_shown(separator)}" if separator else "the file ends"
            raise _Unreadable(f"line {window.line}", f"a comma or ] is expected after row {index - 1}; {found}")
        window.take(1)
        last = separator == b"]"
    if window.peek():
        raise _Unreadable(f"line {window.line}", "there is more text after the end of the list")


def _not_a_list(start: bytes) -> str:
    kinds = {b"{": "an object", b'"': "a string", b"t": "a boolean", b"f": "a boolean", b"n": "null", b"": "nothing"}
    kind = kinds.get(start, "a number" if start in b"-0123456789" else f"text that begins with {_shown(start)}")
    hint = " (a file with one object per line is called .jsonl)" if start == b"{" else ""
    return f"{kind}, where a list of objects is expected{hint}"


def _shown(byte: bytes) -> str:
    return repr(byte.decode("ascii", "backslashreplace"))


class _JsonWindow:
    """A moving window on a JSON list: finds where an element ends without decoding it, each byte looked at a bounded
    number of times."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = file.read(_CHUNK).removeprefix(_BOM)
        self._at = 0
        self.line = 1
        self.consumed = 0

    def peek(self) -> bytes:
        """Skip white space and return the next byte; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._data, self._at)
            assert space is not None
            self.take(space.end() - self._at)
            if self._at < len(self._data) or not self._more():
                return self._data[self._at : self._at + 1]

    def take(self, count: int) -> bytes:
        """Consume `count` bytes of the window."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        self.consumed += count
        self.line += taken.count(b"\n")
        return taken

    def element(self, where: str) -> bytes:
        """Consume one element."""
        start = self.peek()
        if start in (b"{", b"[", b'"'):
            return self.take(self._closed(where))
        length = 0
        while True:
            scalar = _SCALAR.match(self._data, self._at + length)
            assert scalar is not None
            length = scalar.end() - self._at
            if self._at + length < len(self._data) or not self._grow(where):
                break
        if not length:
            found = f"found {_shown(start)}" if start else "the file ends"
            raise _Unreadable(f"line {self.line}", f"an object is expected; {found}")
        return self.take(length)

    def _closed(self, where: str) -> int:
        """Length of the string, list or object that begins here."""
        depth = 0
        length = 0
        while True:
            plain = _PLAIN.match(self._data, self._at + length)
            assert plain is not None
            length = plain.end() - self._at if depth else length
            if self._at + length == len(self._data):
                if not self._grow(where):
                    raise _Unreadable(where, "the file ends inside this row")
                continue
            byte = self._data[self._at + length]
            if byte == 0x22:
                length = self._string(length, where)
            else:
                length += 1
                depth += 1 if byte in b"{[" else -1
            if depth > _MAX_DEPTH:
                raise _Unreadable(where, _too_deep())
            if depth <= 0:
                return length
            if length > MAX_ROW_BYTES:
                raise _Unreadable(where, _too_large())

    def _string(self, start: int, where: str) -> int:
        """Length up to the end of the string whose opening quote is `start` bytes from here."""
        at = start + 1
        while True:
            quote = self._data.find(b'"', self._at + at)
            if quote < 0:
                at = len(self._data) - self._at
                if not self._grow(where):
                    raise _Unreadable(where, "the file ends inside a string of this row")
                continue
            before = quote
            while self._data[before - 1] == 0x5C:
                before -= 1
            at = quote - self._at + 1
            if (quote - before) % 2 == 0:
                return at

    def _grow(self, where: str) -> bool:
        if len(self._data) - self._at > MAX_ROW_BYTES:
            raise _Unreadable(where, _too_large())
        return self._more()

    def _more(self) -> bool:
        """Drop what was consumed and read on. Reading as much again as there is keeps the copying linear."""
        rest = self._data[self._at :]
        chunk = self._file.read(max(_CHUNK, len(rest)))
        self._data = rest + chunk
        self._at = 0
        return bool(chunk)


# Parquet


def _read_parquet(path: Path) -> Iterator[_Item]:
    import pyarrow
    import pyarrow.parquet

    index = 0
    try:
        # With a buffer size, columns are read page by page; without one, a row group at once.
        with pyarrow.parquet.ParquetFile(path, buffer_size=_CHUNK, pre_buffer=False) as parquet:
            names = list(parquet.schema_arrow.names)
            _check_columns(names, "")
            metadata = parquet.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            row_bytes = max(1, sum(group.total_byte_size for group in groups) // max(1, metadata.num_rows))
            batch_rows = max(1, min(_PARQUET_BATCH_ROWS, _PARQUET_BATCH_BYTES // row_bytes))
            size = path.stat().st_size
            for batch in parquet.iter_batches(batch_size=batch_rows, use_threads=False):
                columns = [_python_values(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    read = size * (index + 1) // max(1, metadata.num_rows)
                    yield _Item(f"row {index} (the first is 0)", _plain_row(names, values), min(size, read))
                    index += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        where = f"after row {index - 1} (the first is 0)" if index else ""
        reason = " ".join(str(error).split())[:300]
        raise _Unreadable(where, f"not a readable parquet file: {reason}") from None


def _python_values(column: Any) -> list[Any]:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
        # Python's own datetime ends at microseconds; finer digits would need pandas.
        column = column.cast(pyarrow.timestamp("us", kind.tz), safe=False)
    try:
        values: list[Any] = column.to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError, LookupError, TypeError):
        # One value without a Python form; as scalars the others in the column can still be used.
        return list(column)
    return values


def _plain_row(names: list[str], values: tuple[Any, ...]) -> dict[str, Any] | str:
    row: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        # Text columns written as bytes are refused with the row rather than passed on as base64.
        if isinstance(value, bytes) and name.casefold() in ("system_prompt", "user_prompt", "ground_truth"):
            row[name] = value
            continue
        try:
            row[name] = _plain(value)
        except _BadRow as error:
            return f"column {_quoted(name)}: {error}"
    return row


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, (datetime.timedelta, uuid.UUID)):
        return str(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isinf(number):
            raise _BadRow("an infinite number, which has no JSON form")
        return None if math.isnan(number) else number
    return _plain(_scalar_value(value))


def _scalar_value(value: Any) -> Any:
    import pyarrow

    if not isinstance(value, pyarrow.Scalar):
        raise _BadRow(f"a value of type {type(value).__name__}, which has no JSON form")
    try:
        found = value.as_py()
    except (pyarrow.ArrowException, ValueError, OverflowError, LookupError, TypeError) as error:
        raise _BadRow(f"a value of type {value.type} that can't be read: {error}") from None
    if isinstance(found, pyarrow.Scalar):
        raise _BadRow(f"a value of type {value.type}, which has no JSON form")
    return found


def _check_range(offset: int, limit: int | None) -> None:
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError(f"offset and limit can't be negative: {offset}, {limit}")


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
