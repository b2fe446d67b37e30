"""The pages' URLs: parse their queries, and link to other pages and other views."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args
from urllib.parse import quote, urlencode

from osmosis_ai.store.browsing import RowFilter, Selected, Selection

__all__ = [
    "Address",
    "beside",
    "compare_path",
    "decimal",
    "following",
    "number",
    "row_filter",
    "run_path",
    "training_path",
    "training_runs",
    "without",
]

_STATUSES: dict[str | None, Selected] = {name: name for name in get_args(Selected)}


def run_path(repository: str, run: str) -> str:
    """Return the path of a run's page."""
    return f"/runs/{quote(repository)}/{_quoted(run)}"


def training_path(repository: str, name: str) -> str:
    """Return the path of a training run's page."""
    return f"/training/{quote(repository)}/{_quoted(name)}"


def training_runs(name: str) -> str:
    """Return the URL of the list of runs that belong to a training run."""
    return f"/?training={_quoted(name)}"


def compare_path(repository: str, a: str, b: str) -> str:
    """Return the path of the page that compares two runs."""
    return f"/compare/{quote(repository)}/{quote(a)}/{quote(b)}"


class Address(NamedTuple):
    """A page's path and query, for making links to other views of the page."""

    path: str
    query: Mapping[str, str] = {}

    def __str__(self) -> str:
        return self.path + (f"?{urlencode(self.query)}" if self.query else "")

    def but(self, **changes: object) -> str:
        """Return the URL with some parameters changed; None removes a parameter."""
        query = {**self.query, **{name: None if value is None else str(value) for name, value in changes.items()}}
        return str(Address(self.path, {name: value for name, value in query.items() if value}))

    def at(self, path: str, **changes: object) -> str:
        """Return the URL of another page with the same query, except for some parameters."""
        return Address(f"{self.path}{path}", self.query).but(**changes)


def beside(selection: Selection, row: int, step: int, url: Address) -> str | None:
    """Return the URL of the row before (`step` −1) or after (1) a row in a list; `url` is the list's page."""
    found = selection.beside(row, step)
    return None if found is None else url.at(f"/rows/{found}")


def following(rows: Iterable[int], row: int, url: Address) -> str | None:
    """Return the URL of the first of these rows, by index, that comes after a row."""
    after = next((index for index in rows if index > row), None)
    return None if after is None else url.at(f"/rows/{after}")


def row_filter(query: Mapping[str, str]) -> RowFilter:
    """Return the row filter of a query; ignore parameters with invalid values."""
    return RowFilter(
        status=_STATUSES.get(query.get("status")),
        function=query.get("fn") or None,
        low=decimal(query.get("min")),
        high=decimal(query.get("max")),
        kind=query.get("kind") or None,
        message=query.get("message") or None,
        tool=query.get("tool") or None,
        text=query.get("q") or None,
        sort=query.get("sort") or "row",
    )


def _quoted(name: str) -> str:
    # A folder's name may not be valid UTF-8.
    return quote(name, errors="replace")


def decimal(text: str | None) -> float | None:
    """Parse a finite number; return None for anything else."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def number(text: str | None, default: int = 0) -> int:
    """Parse a natural number; return `default` for anything else."""
    # Longer numbers aren't positions, and int() raises for thousands of digits.
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else default


def without(query: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return a query without the named parameters."""
    return {name: value for name, value in query.items() if name not in names}
