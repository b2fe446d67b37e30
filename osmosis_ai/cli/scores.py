"""Columns of scores, with colours that show which scores pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from osmosis_ai.cli.console import BAD, GOOD
from osmosis_ai.cli.tables import Cell, Column
from osmosis_ai.records import Failure, Score
from osmosis_ai.text import counted, failure_line, score_number

if TYPE_CHECKING:
    from osmosis_ai.runtime.run.report import Report

__all__ = ["ScoreColumns", "below_title", "score_style", "short_name", "went_wrong"]

MAX_COLUMNS = 6
"""With more functions, one column lists the scores that don't pass."""


class ScoreColumns:
    """The columns of a rollout's scores by these functions."""

    def __init__(self, functions: Iterable[str], threshold: float) -> None:
        self._functions = list(functions)
        self._threshold = threshold
        self._names = {name: short_name(name, self._functions) for name in self._functions}

    @property
    def columns(self) -> list[Column]:
        if len(self._functions) > MAX_COLUMNS:
            return [Column("scores that don't pass", "list")]
        return [Column(name, "score") for name in self._names.values()]

    def cells(self, scores: Mapping[str, Score]) -> list[Cell]:
        cells = {name: self._cell(scores.get(name)) for name in self._functions}
        if len(cells) <= MAX_COLUMNS:
            return list(cells.values())
        low = [f"{self._names[name]} {cell.text}" for name, cell in cells.items() if cell.style != GOOD]
        return [Cell(", ".join(low) or "–", BAD if low else GOOD)]

    def _cell(self, score: Score | None) -> Cell:
        if score is None:
            return Cell("–")
        if score.value is None:
            return Cell("error", BAD)
        return Cell(score_number(score.value), score_style(score.value, self._threshold))


def score_style(value: float, threshold: float) -> str:
    """Return the style of a score: good from the threshold on, bad at 0 and below."""
    return GOOD if value >= threshold else BAD if value <= 0 else ""


def short_name(name: str, names: Iterable[str]) -> str:
    """Return a function's name without its module, if that is unambiguous."""
    short = name.rpartition(":")[2]
    return short if sum(other.rpartition(":")[2] == short for other in names) < 2 else name


def went_wrong(failure: Failure | None, scores: Mapping[str, Score]) -> str:
    """Describe in one line what failed in a rollout and its scoring."""
    parts = [] if failure is None else [failure_line(failure)]
    parts += [
        f"{short_name(name, scores)}: {score.failure.message}"
        for name, score in scores.items()
        if score.failure is not None
    ]
    return "; ".join(parts)


def below_title(report: Report) -> str:
    """Return the title of the rows that fall short."""
    return f"{counted(report.rows_below, 'row')} below the pass threshold {report.pass_threshold:g}"
