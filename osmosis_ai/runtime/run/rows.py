"""Select the rows that a report lists: first those that fall short, each with the attempt that did.

A row falls short if one of its attempts failed, lacks a score, or has one below the pass threshold. A function that no
attempt passes, such as a reward for the process that never reaches 1, doesn't tell rows apart: it counts only if all
functions are like that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from osmosis_ai.records import Outcome, Record
from osmosis_ai.reward_fn.statistics import FunctionStatistics

__all__ = ["ListedRow", "RowTally", "lacking", "telling_functions"]

LISTED = 20
"""Rows of each kind that a report holds."""

_FAILED = 1


class ListedRow(Record, frozen=True):
    """A row in a report."""

    outcome: Outcome
    """The first attempt that falls short; the first one of all if none does."""
    attempts: int
    """Attempts recorded."""
    passed: int
    """Attempts that don't fall short."""


def telling_functions(functions: Mapping[str, FunctionStatistics], threshold: float) -> list[str]:
    """List the functions that at least one attempt passes, or all functions if no attempt passes any."""
    return [name for name, found in functions.items() if found.max >= threshold] or list(functions)


def lacking(outcome: Outcome, functions: Iterable[str], threshold: float) -> list[str]:
    """List the functions by which an attempt has no score, or one below the threshold."""
    return [
        name
        for name in functions
        if (score := outcome.scores.get(name)) is None or score.value is None or score.value < threshold
    ]


class _Attempt(NamedTuple):
    """An attempt and its shortfalls: one bit per function, and one for a failed rollout."""

    outcome: Outcome
    lacks: int


class RowTally:
    """Collects one policy's rows; outcomes arrive in the order of the dataset.

    Only at the end it is known which functions tell rows apart. So it keeps the first rows by everything that a row
    can lack, and counts rows by the combination.
    """

    def __init__(self, functions: list[str], threshold: float) -> None:
        self._bits = {name: _FAILED << number for number, name in enumerate(functions, start=1)}
        self._threshold = threshold
        self._row: list[_Attempt] = []
        self._first: dict[int, list[list[_Attempt]]] = {}
        self._counts: Counter[int] = Counter()

    def add(self, outcome: Outcome) -> None:
        """Add an attempt."""
        if self._row and self._row[0].outcome.row_id != outcome.row_id:
            self._close()
        lacks = _FAILED if outcome.failure is not None else 0
        for name in lacking(outcome, self._bits, self._threshold):
            lacks |= self._bits[name]
        self._row.append(_Attempt(outcome, lacks))

    def listed(self, telling: list[str]) -> tuple[int, list[ListedRow], list[ListedRow]]:
        """Return the number of rows that fall short by these functions, the first of them, and the first others."""
        self._close()
        mask = _FAILED | sum(self._bits[name] for name in telling)
        known = {id(row): row for rows in self._first.values() for row in rows}.values()
        short: list[ListedRow] = []
        others: list[ListedRow] = []
        for row in sorted(known, key=lambda row: row[0].outcome.row_index):
            bad = [attempt for attempt in row if attempt.lacks & mask]
            listed = ListedRow((bad or row)[0].outcome, len(row), len(row) - len(bad))
            (short if bad else others).append(listed)
        count = sum(number for lacks, number in self._counts.items() if lacks & mask)
        return count, short[:LISTED], others[:LISTED]

    def _close(self) -> None:
        row, self._row = self._row, []
        if not row:
            return
        lacks = 0
        for attempt in row:
            lacks |= attempt.lacks
        self._counts[lacks] += 1
        for bit in [bit for bit in (_FAILED, *self._bits.values()) if lacks & bit] or [0]:
            rows = self._first.setdefault(bit, [])
            if len(rows) < LISTED:
                rows.append(row)
