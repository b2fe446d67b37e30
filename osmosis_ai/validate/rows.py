"""Check every row of the dataset in one pass with bounded memory."""

from __future__ import annotations

import ast
import hashlib
import re
from array import array
from collections.abc import Callable, Iterator, Set
from itertools import islice
from pathlib import Path
from statistics import median

from osmosis_ai.data.dataset import Dataset, RowProblem, open_dataset
from osmosis_ai.discovery.source import UnreadableError, parse_file, python_files
from osmosis_ai.errors import DatasetError
from osmosis_ai.records import Row
from osmosis_ai.reward_fn.expected import COLUMN, expects_tools
from osmosis_ai.validate.check import Check, Subject
from osmosis_ai.validate.expectations import KnownTools, Problem, known_tools, problems_with
from osmosis_ai.validate.findings import Finding, Place, codes, finding

__all__ = ["CHECKS", "check_dataset", "first_rows", "keys_read", "line_of_row"]

SHOWN_PROBLEMS = 20
"""Unusable rows, or problems with `expect`, that get a finding each."""
MAX_REMEMBERED = 1_000_000
MAX_COLUMNS = 1000
"""Bounds on the memory of one pass: rows whose digests are kept, and columns whose types are."""
MAX_SCANNED_ROWS = 10_000
"""Rows searched for those that the controls or the solutions can use."""
OUTLIER_FACTOR = 10
OUTLIER_TOKENS = 2000
"""A prompt is an outlier beyond this many times the median, but not below this many tokens."""
TOO_LONG_TOKENS = 2_000_000
"""Reported however long the other rows are: hardly any model has such a context."""

CHARACTERS_PER_TOKEN = 4
"""The usual rule of thumb for English."""

# `format` fills in the ground truth, so the pattern's own braces are doubled.
_LEAK = r"(?:####|\\boxed\{{|\b(?:answer|solution|result|ground.?truth)\b\W{{0,5}}(?:is|are|=|:)?)\W{{0,5}}{}(?!\w)"


_KINDS = {bool: "booleans", int: "numbers", float: "numbers", str: "strings", list: "lists", dict: "objects"}


class _Noted:
    """The number of rows of one kind, and the first few of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []

    def add(self, index: int) -> None:
        self.count += 1
        if len(self.first) < 5:
            self.first.append(index)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.first))
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return f"row {shown}" if self.count == 1 else f"rows {shown}{more}"


def check_dataset(path: Path, shown: str, read: Set[str], tools: KnownTools | None = None) -> Iterator[Finding]:
    """Check a dataset's rows. A column counts as read if its name is in `read`; see `keys_read`."""
    try:
        dataset = open_dataset(path)
        yield from _Rows(dataset, shown, read, tools or {}).check()
    except DatasetError as error:
        yield finding("OSM402", str(error).removeprefix(str(path)).lstrip(":, "), Place(shown))


def keys_read(root: Path) -> set[str]:
    """Return the string constants and parameter names in the repository's code, a superset of the columns it reads."""
    found: set[str] = set()
    for folder in ("reward_fn", "reward_rubric", "mcp", "rollouts"):
        for path in python_files(root / folder, root, []) if (root / folder).is_dir() else ():
            try:
                tree = parse_file(path)
            except UnreadableError:
                continue  # the scan reports it
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
                elif isinstance(node, ast.arg):
                    found.add(node.arg)
    return found


class _Rows:
    """One pass over the rows, which keeps only hashes, lengths and counts."""

    def __init__(self, dataset: Dataset, shown: str, read: Set[str], tools: KnownTools) -> None:
        self._dataset = dataset
        self._shown = shown
        self._read = read
        self._tools = tools
        self._expecting = False
        self._misled: dict[Problem, _Noted] = {}
        self._rows = 0
        self._seen: set[int] = set()
        self._truths: dict[int, int] = {}
        self._lengths = array("Q")
        self._indexes = array("Q")
        self._types: dict[str, set[str]] = {}
        self._equal, self._conflicting = _Noted(), _Noted()
        self._without, self._blank = _Noted(), _Noted()
        self._given_away, self._contained = _Noted(), _Noted()

    def check(self) -> Iterator[Finding]:
        problems = 0
        for item in self._dataset.scan():
            if isinstance(item, RowProblem):
                problems += 1
                if problems <= SHOWN_PROBLEMS or item.final:
                    yield self._problem(item)
                continue
            self._take(item)
        if problems > SHOWN_PROBLEMS:
            yield finding("OSM402", f"{problems - SHOWN_PROBLEMS} further rows can't be used", Place(self._shown))
        if not self._rows:
            if not problems:
                yield finding("OSM402", "the file has no rows", Place(self._shown))
            return
        yield from self._summary()

    def _problem(self, problem: RowProblem) -> Finding:
        line = re.match(r"line (\d+)(?:, )?", problem.where)
        rest = problem.where[line.end() :] if line else problem.where
        message = f"{rest}: {problem.message}" if rest else problem.message
        column = re.search(r"column (\w+)", problem.message)
        at = Place(self._shown, int(line[1]) if line else None, column[1] if column else None)
        return finding("OSM402", message + ("; what follows could not be checked" if problem.final else ""), at)

    def _take(self, row: Row) -> None:
        self._rows += 1
        self._indexes.append(row.index)
        self._lengths.append((len(row.system_prompt) + len(row.user_prompt)) // CHARACTERS_PER_TOKEN)
        # Hashes of more rows would take too much memory; duplicates among those go unnoticed.
        if len(self._seen) < MAX_REMEMBERED:
            prompts = _digest(row.system_prompt, row.user_prompt)
            whole = _digest(str(prompts), row.ground_truth or "", repr(sorted(row.extra.items())))
            truth = _digest(row.ground_truth or "")
            if whole in self._seen:
                self._equal.add(row.index)
            elif self._truths.setdefault(prompts, truth) != truth:
                self._conflicting.add(row.index)
            self._seen.add(whole)
        for column, value in row.extra.items():
            if len(self._types) < MAX_COLUMNS or column in self._types:
                kinds = self._types.setdefault(column, set())
                if value is not None:
                    kinds.add(_KINDS[type(value)])
        if COLUMN in row.extra:
            self._expecting = self._expecting or expects_tools(row.extra)
            for problem in problems_with(row, self._tools):
                if len(self._misled) < SHOWN_PROBLEMS or problem in self._misled:
                    self._misled.setdefault(problem, _Noted()).add(row.index)
        if row.ground_truth is None:
            self._without.add(row.index)
        elif not row.ground_truth.strip():
            self._blank.add(row.index)
        else:
            self._look_for_leak(row, row.ground_truth.strip())

    def _look_for_leak(self, row: Row, truth: str) -> None:
        if len(truth) > 10_000:
            return
        for prompt in (row.user_prompt, row.system_prompt):
            # A plain search rules most prompts out before a pattern of their own is compiled for them.
            at = prompt.find(truth)
            if at < 0:
                continue
            marked = re.search(_LEAK.format(re.escape(truth)), prompt, re.IGNORECASE)
            if marked:
                self._given_away.add(row.index)
                return
            # Questions often contain a number or short word of the answer, but rarely a whole phrase.
            if len(truth) >= 12 and re.search(r"\s", truth):
                self._contained.add(row.index)
                return

    def _summary(self) -> Iterator[Finding]:
        if self._equal.count:
            hint = "Remove them, unless they should count twice."
            yield self._about("OSM403", self._equal, "equal to an earlier row", hint=hint)
        if self._conflicting.count:
            yield self._about("OSM404", self._conflicting, "same prompts as an earlier row, but another ground_truth")
        truth = "ground_truth"
        if self._blank.count:
            yield self._about("OSM405", self._blank, "ground_truth is empty", truth)
        # A dataset without any ground truth is a choice; one that has some has probably lost the others.
        if 0 < self._without.count < self._rows:
            yield self._about("OSM405", self._without, "there is no ground_truth", truth)
        if self._given_away.count:
            message, hint = "the prompt gives the ground truth away as the answer", "Remove it from the prompt."
            yield self._about("OSM406", self._given_away, message, truth, hint)
        if self._contained.count:
            message = "the prompt contains the ground truth word for word"
            hint = "Remove it, unless the task is to find it there."
            yield self._about("OSM406", self._contained, message, truth, hint)
        for problem, noted in self._misled.items():
            yield self._about(problem.code, noted, problem.message, COLUMN, problem.hint)
        yield from self._check_columns()
        yield from self._check_lengths()

    def _check_columns(self) -> Iterator[Finding]:
        for column, kinds in self._types.items():
            if column == COLUMN and self._expecting:
                continue
            at = Place(self._shown, subject=column)
            if column not in self._read:
                hint = "Remove it, unless people or other programs need it."
                yield finding("OSM407", f"no function or tool mentions the column {column}", at, hint)
            if len(kinds) > 1:
                listed = ", ".join(sorted(kinds))
                message = f"the column {column} holds values of several types: {listed}"
                yield finding("OSM409", message, at)

    def _check_lengths(self) -> Iterator[Finding]:
        usual = median(self._lengths)
        limit = min(max(OUTLIER_TOKENS, OUTLIER_FACTOR * usual), TOO_LONG_TOKENS)
        outliers = _Noted()
        for index, length in zip(self._indexes, self._lengths, strict=True):
            if length > limit:
                outliers.add(index)
        if outliers.count:
            longest = max(self._lengths)
            message = f"the longest prompt has about {longest:,} tokens; the median is {usual:,.0f}"
            yield self._about("OSM408", outliers, message, hint="Make sure they fit the model's context.")

    def _about(self, code: str, noted: _Noted, message: str, subject: str | None = None, hint: str = "") -> Finding:
        at = Place(self._shown, line_of_row(self._dataset.path, noted.first[0]), subject)
        return finding(code, f"{noted}: {message}", at, hint)


def first_rows(dataset: Path, wanted: Callable[[Row], bool], limit: int) -> list[Row]:
    """Return the first usable rows that are `wanted`; none if the dataset can't be read, as its own check reports."""
    try:
        scanned = islice(open_dataset(dataset).scan(), MAX_SCANNED_ROWS)
        rows = (item for item in scanned if not isinstance(item, RowProblem) and wanted(item))
        return list(islice(rows, limit))
    except DatasetError:
        return []


def line_of_row(path: Path, index: int) -> int | None:
    """Return the line number of a row in a .jsonl file; None for other files."""
    if path.suffix.lower() != ".jsonl":
        return None
    rows = -1
    with path.open("rb") as file:
        number, begins, blank = 1, True, True
        # Read in bounded pieces, because a line may be huge.
        while chunk := file.readline(1 << 20):
            blank = blank and not chunk.strip() if not begins else not chunk.strip()
            begins = chunk.endswith(b"\n")
            if begins:
                rows += not blank
                if rows == index and not blank:
                    return number
                number += 1
    return number


def _digest(*parts: str) -> int:
    # The separator keeps text that moves from one part to the next from giving the same digest.
    content = "\0".join(parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _check(subject: Subject) -> Iterator[Finding]:
    path, root = subject.dataset, subject.root
    if path.exists() or path.is_symlink():
        if subject.loaded is not None:
            tools: KnownTools = known_tools(subject.loaded.tools)
        else:
            tools = {component.name: None for component in subject.components["tool"]}
        yield from check_dataset(path, subject.shown(path), keys_read(root), tools)
    elif (root / "mcp").is_dir() or (root / "reward_fn").is_dir():
        hint = "Write one, or name another file with -d FILE."
        message = "there is no test_data.jsonl, so nothing can be run here"
        yield finding("OSM401", message, Place(subject.shown(path)), hint)


CHECKS = (Check("dataset", f"{codes(401, 409)} {codes(412, 414)}", _check),)
