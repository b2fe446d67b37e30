"""Stream, validate and identify dataset rows in any registered format.

No file is ever held in memory: a reader keeps one row, or a few megabytes of rows, at a time. A row larger than
`source.MAX_ROW_BYTES` is reported as a problem instead of being read.

Columns, names case-insensitive:
    system_prompt, user_prompt   non-blank strings; for rollout servers, the first is optional, and with a `metadata`
                                 column so is the second
    ground_truth                 optional; values other than strings become JSON text with sorted keys; null, an absent
                                 column and an empty CSV cell are None
    solution                     optional: a reference solution (see `data.solution`), a list of steps or its JSON text;
                                 other text makes it an ordinary column
    any other                    goes into `Row.extra` under its name as written

CSV values are always strings. Parquet values are converted to JSON: dates and times to ISO 8601 text, decimals and
durations to text, bytes to base64 text, maps to lists of pairs, NaN to null. Infinities can't be converted and are a
problem.
"""

from __future__ import annotations

import hashlib
import itertools
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from osmosis_ai.data.formats import format_of, suffixes
from osmosis_ai.data.formats.source import CHUNK, BadRowError, Item, Source, UnreadableError, collision, found, missing
from osmosis_ai.data.solution import read_solution
from osmosis_ai.errors import DatasetError
from osmosis_ai.records import JsonObject, Record, Row, SolutionStep
from osmosis_ai.row_numbers import RowNumbers
from osmosis_ai.text import counted

__all__ = ["Dataset", "DatasetSummary", "RowIds", "RowProblem", "open_dataset"]

_MAX_COLUMNS = 1000
_SHOWN_PROBLEMS = 10
"""Problems that an error lists; the others are only counted."""


class DatasetSummary(Record, frozen=True):
    """The summary of one pass over a dataset.

    `count`, `with_ground_truth` and `with_solution` count rows in the range checked. `columns` are the first thousand
    column names in order of appearance. `sha256` is the hash of the file's bytes, `solutions` that of the solutions
    alone, empty if there are none.
    """

    count: int
    sha256: str
    columns: tuple[str, ...]
    with_ground_truth: int = 0
    with_solution: int = 0
    solutions: str = ""


def open_dataset(path: Path, *, bare: bool = False) -> Dataset:
    """Open the dataset in `path` in the format of its suffix, without reading rows. Raises DatasetError.

    Rows of a `bare` dataset may lack prompts, as those of rollout servers may.
    """
    known = suffixes()
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DatasetError(f"{path}: no such file. A dataset is one of {known}.") from None
    except (OSError, ValueError) as error:
        # A null byte in a path is a ValueError.
        raise DatasetError(f"{path}: can't be read: {_reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        raise DatasetError(f"{path}: a folder, where a dataset file is expected ({known}).")
    # Before it is opened, because opening a pipe blocks until someone writes to it.
    if not stat.S_ISREG(status.st_mode):
        raise DatasetError(f"{path}: not a regular file. A dataset is read more than once, so save it as a file first.")
    format_ = format_of(path)
    if format_ is None:
        problem = f"unknown suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise DatasetError(f"{path}: {problem}. A dataset is one of {known}.")
    if status.st_size == 0:
        raise DatasetError(f"{path}: the file is empty.")
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError as error:
        raise DatasetError(f"{path}: can't be read: {_reason(error)}") from None
    # Excel saves "Unicode text" as UTF-16, whose parse errors would say nothing helpful.
    if format_.is_text and start in (b"\xff\xfe", b"\xfe\xff"):
        raise DatasetError(f"{path}: the file is UTF-16. Save it as UTF-8.")
    return Dataset(path, bare)


@dataclass(frozen=True)
class Dataset:
    """Rows in a file; see `open_dataset`. Every pass reads the file again."""

    path: Path
    bare: bool = False

    def rows(self, *, offset: int = 0, limit: int | None = None) -> Iterator[Row]:
        """Stream at most `limit` rows from number `offset` (the first is 0).

        `Row.index` and `Row.id` don't depend on the range. Rows with problems outside the range are skipped.

        Raises:
            DatasetError: A row in the range has a problem; `check` finds all problems beforehand.
            ValueError: `offset` or `limit` is negative.
        """
        _check_range(offset, limit)
        # A generator would raise for a wrong range only when its first row is asked for.
        return self._rows(offset, limit)

    def scan(self) -> Iterator[Row | RowProblem]:
        """Stream every row, with a `RowProblem` in place of each that can't be used."""
        with self._open() as source:
            yield from self._scan(source, 0, None)

    def _rows(self, offset: int, limit: int | None) -> Iterator[Row]:
        with self._open() as source:
            for item in self._scan(source, offset, limit):
                if isinstance(item, RowProblem):
                    raise DatasetError(f"{self.path}{item.shown()}")
                yield item

    def status(self) -> tuple[int, int]:
        """Return the file's size in bytes and its modification time in nanoseconds; raises DatasetError."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise self._unreadable(error) from None
        return status.st_size, status.st_mtime_ns

    def sha256(self) -> str:
        """Return the hash of the file's bytes. Raises DatasetError."""
        try:
            with self._open() as source:
                return source.sha256()
        except OSError as error:
            raise self._unreadable(error) from None

    def check(
        self,
        *,
        offset: int = 0,
        limit: int | None = None,
        only: RowNumbers | None = None,
        progress: Callable[[int, int], None] | None = None,
        each: Callable[[Row], None] | None = None,
    ) -> DatasetSummary:
        """Read every row of a range once and summarize them, hashing the file in the same pass.

        Args:
            offset: Number of the first row; the file's first is 0.
            limit: Maximum number of rows; None for all.
            only: The numbers of the rows, instead of a range.
            progress: Called now and then with the bytes read so far and the file's size in bytes.
            each: Called with every row in the range, as it was hashed.

        Raises:
            DatasetError: Rows have problems (ten are listed, the others counted), no row is in the range, the file has
                fewer rows than `only` names, or it changed while it was read.
            ValueError: `offset` or `limit` is negative.
        """
        _check_range(offset, limit)
        before = self.status()
        problems: list[RowProblem] = []
        unlisted = count = with_ground_truth = with_solution = 0
        solutions = hashlib.sha256()
        columns = dict.fromkeys(("system_prompt", "user_prompt"))
        with self._open() as source:
            for item in self._scan(source, offset, limit, progress, only):
                if isinstance(item, RowProblem):
                    # A final problem is always listed: it says that the rest of the file was not checked.
                    if len(problems) < _SHOWN_PROBLEMS or item.final:
                        problems.append(item)
                    else:
                        unlisted += 1
                    continue
                count += 1
                if each is not None:
                    each(item)
                if item.ground_truth is not None:
                    with_ground_truth += 1
                    columns.setdefault("ground_truth")
                if item.solution is not None:
                    with_solution += 1
                    columns.setdefault("solution")
                    solutions.update(_canonical(item.solution))
                # Bounded, because a file may have different columns in every row.
                if len(columns) < _MAX_COLUMNS:
                    columns.update(dict.fromkeys(item.extra))
            if problems:
                raise DatasetError(self._report(problems, unlisted))
            if only is not None and count < sum(map(len, only.ranges)):
                raise DatasetError(self._too_short(only))
            if not count:
                raise DatasetError(self._nothing(offset))
            try:
                digest = source.sha256()
            except OSError as error:
                raise self._unreadable(error) from None
        # The rows and the hash may come from a mixture of the two versions.
        if self.status() != before:
            raise DatasetError(f"{self.path}: the file changed while it was read. Run again.")
        if progress is not None:
            progress(before[0], before[0])
        return DatasetSummary(
            count=count,
            sha256=digest,
            columns=tuple(itertools.islice(columns, _MAX_COLUMNS)),
            with_ground_truth=with_ground_truth,
            with_solution=with_solution,
            solutions=solutions.hexdigest() if with_solution else "",
        )

    def _scan(
        self,
        source: Source,
        offset: int,
        limit: int | None,
        progress: Callable[[int, int], None] | None = None,
        only: RowNumbers | None = None,
    ) -> Iterator[Row | RowProblem]:
        end = None if limit is None else offset + limit
        if only is not None:
            end = only.end
        size = self.status()[0]
        occurrences: Counter[bytes] = Counter()
        due = 0
        try:
            for index, item in enumerate(itertools.islice(self._items(source), end)):
                # Once per chunk: a call per row would slow down the check of a large file.
                if progress is not None and item.read >= due:
                    progress(item.read, size)
                    due = item.read + CHUNK
                problem = item.content if isinstance(item.content, str) else None
                if not isinstance(item.content, str):
                    try:
                        fields, solution = _fields(item.content, bare=self.bare)
                    except BadRowError as error:
                        problem = str(error)
                wanted = index >= offset if only is None else index in only
                if problem is not None:
                    if wanted:
                        yield RowProblem(item.where, problem)
                    continue
                # Rows before the offset count too; otherwise an id would depend on the range.
                row_id = _row_id(fields, occurrences)
                if wanted:
                    yield Row(index, row_id, *fields, solution)
        except UnreadableError as error:
            yield RowProblem(error.where, error.message, final=True)

    def _items(self, source: Source) -> Iterator[Item]:
        format_ = format_of(self.path)
        assert format_ is not None, self.path
        try:
            yield from format_.read(source)
        except OSError as error:
            raise UnreadableError("", f"can't be read: {_reason(error)}") from None

    def _open(self) -> Source:
        try:
            return Source(self.path)
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> DatasetError:
        return DatasetError(f"{self.path}: can't be read: {_reason(error)}")

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

    def count(self) -> int:
        """Count the rows, usable or not. Raises DatasetError."""
        with self._open() as source:
            return sum(1 for _ in self._items(source))

    def _too_short(self, only: RowNumbers) -> str:
        total = self.count()
        return f"{self.path}: there is no row {only.end - 1}; the file has {counted(total, 'row')}, counted from 0."

    def _nothing(self, offset: int) -> str:
        total = self.count()
        if total == 0:
            return f"{self.path}: the file has no rows."
        if offset >= total:
            return f"{self.path}: no row is left after offset {offset}; the file has {counted(total, 'row')}."
        return f"{self.path}: a limit of 0 leaves none of its {counted(total, 'row')}."


class RowProblem(NamedTuple):
    """A row that can't be used: its place (`line 3`) and the reason; nothing can be read after a `final` one."""

    where: str
    message: str
    final: bool = False

    def shown(self) -> str:
        return f", {self.where}: {self.message}" if self.where else f": {self.message}"


# Rows


class _Fields(NamedTuple):
    """The fields that identify a row. The solution isn't one: no model sees it and no function scores with it, so a row
    that gains one keeps its id and its recorded rollouts."""

    system_prompt: str
    user_prompt: str
    ground_truth: str | None
    extra: JsonObject


def _fields(values: JsonObject, *, bare: bool) -> tuple[_Fields, list[SolutionStep] | None]:
    names = {name.casefold(): name for name in values}
    if len(names) != len(values):
        raise BadRowError(collision(list(values)))
    wrong: list[str] = []
    prompts: list[str] = []
    for column in ("system_prompt", "user_prompt"):
        name = names.pop(column, None)
        value = None if name is None else values[name]
        # A rollout server may build its prompt from the row's metadata.
        if bare and value in (None, "") and (column == "system_prompt" or "metadata" in names):
            prompts.append("")
        elif name is None:
            wrong.append(missing(column, list(values)))
        elif not isinstance(value, str) or not value.strip():
            wrong.append(f"column {column}: {found(value)}, where text is expected")
        else:
            prompts.append(value)
    name = names.pop("ground_truth", None)
    value = None if name is None else values[name]
    truth: str | None = None
    if isinstance(value, bytes):
        wrong.append(f"column ground_truth: {found(value)}, where text is expected")
    elif value is not None:
        truth = value if isinstance(value, str) else _canonical(value).decode()
    solution = None
    if (name := names.get("solution")) is not None:
        try:
            solution = None if values[name] is None else read_solution(values[name])
        except ValueError as error:
            wrong.append(f"column solution: {error} (a column that holds something else needs another name)")
        if solution is not None:
            del names["solution"]
    if wrong:
        raise BadRowError("; ".join(wrong))
    system_prompt, user_prompt = prompts
    extra = {name: values[name] for name in names.values()}
    return _Fields(system_prompt, user_prompt, truth, extra), solution


class RowIds:
    """Makes rows from elsewhere, with the ids that rows of a dataset with their content would have."""

    def __init__(self) -> None:
        self._occurrences: Counter[bytes] = Counter()

    def row(self, index: int, system_prompt: str, user_prompt: str, ground_truth: str | None, extra: JsonObject) -> Row:
        """Return the next row."""
        fields = _Fields(system_prompt, user_prompt, ground_truth, extra)
        return Row(index, _row_id(fields, self._occurrences), *fields)


def _canonical(value: object) -> bytes:
    # With sorted keys, equal rows have the same id in whatever order a file has its columns.
    return msgspec.json.encode(value, order="deterministic")


def _row_id(fields: _Fields, occurrences: Counter[bytes]) -> str:
    """Return 16 hex digits from a row's content and its number among equal rows, which are counted here."""
    # Counted by digest, so that memory holds 8 bytes per distinct row instead of its content.
    content = hashlib.blake2b(_canonical(fields), digest_size=8).digest()
    occurrences[content] += 1
    return hashlib.blake2b(content + occurrences[content].to_bytes(8, "big"), digest_size=8).hexdigest()


def _check_range(offset: int, limit: int | None) -> None:
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError(f"offset and limit can't be negative: {offset}, {limit}")


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
