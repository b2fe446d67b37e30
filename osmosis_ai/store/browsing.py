"""Browse a large run: filter and sort its rows, read any part of the list, and compute totals.

A selection holds the rows of a filter as an array of row indexes: 800 KB for 100,000 rows. With it, reading a page or
moving to the next row costs the same anywhere in the list.
"""

from __future__ import annotations

import json
import math
import sqlite3
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from osmosis_ai.records import Message, Outcome, Record, Row, Verdict
from osmosis_ai.store.codec import decode_messages, decode_outcome, decode_row, unpack
from osmosis_ai.store.live import RunningRollout, live_path, read_live
from osmosis_ai.store.owners import is_owned
from osmosis_ai.store.queries import Queries, RunInfo, scores_of, verdicts_of
from osmosis_ai.store.schema import connect_reader, database_errors, open_reader
from osmosis_ai.store.tables import RolloutColumns, select
from osmosis_ai.text import content_text

__all__ = [
    "SORTS",
    "VERDICTS",
    "Browser",
    "FailureGroup",
    "ListedRow",
    "RowFilter",
    "RunTotals",
    "ScoreCount",
    "Selection",
    "ToolTotals",
]

Selected: TypeAlias = Literal[
    "failed", "passed", "not-passed", "tool-errors", "verdict-good", "verdict-bad", "no-verdict", "disagrees"
]
"""A status to filter by. `failed` and `not-passed` include rollouts whose score could not be computed; `disagrees`
means that a function and a user's verdict differ."""
VERDICTS = frozenset({"verdict-good", "verdict-bad", "no-verdict", "disagrees"})
"""The statuses that depend on users' verdicts."""


class RowFilter(Record, frozen=True):
    """A filter and an order for the rows of a run: it selects rows with a rollout that meets all given conditions.

    `sort` is one of `SORTS`, prefixed with `-` for descending order. `low` and `high` bound the score of `function`,
    which is also the one to sort by; without a function, they bound any score, and rows are sorted by their mean.
    `text` is searched in the conversation, ignoring the case of ASCII letters.
    """

    status: Selected | None = None
    function: str | None = None
    low: float | None = None
    high: float | None = None
    kind: str | None = None
    message: str | None = None
    tool: str | None = None
    text: str | None = None
    sort: str = "row"


class Selection:
    """The indexes of the rows that a filter selects, in its order."""

    def __init__(self, rows: array[int], *, ordered: bool) -> None:
        self.rows = rows
        self._ordered = ordered

    def __len__(self) -> int:
        return len(self.rows)

    def beside(self, row: int, step: int) -> int | None:
        """Return the row before (`step` −1) or after (1) a row, or None if there is none.

        In a list ordered by row, this works even for a row that is no longer in the list.
        """
        at = self.position(row)
        if at is None and self._ordered:
            at = bisect_left(self.rows, row) - (step > 0)
        return self.rows[at + step] if at is not None and 0 <= at + step < len(self.rows) else None

    def position(self, row: int) -> int | None:
        """Return a row's position in the list, or None if it isn't in it."""
        if self._ordered:
            found = bisect_left(self.rows, row)
            return found if found < len(self.rows) and self.rows[found] == row else None
        try:
            return self.rows.index(row)
        except ValueError:
            return None


class ListedRow(NamedTuple):
    """A row with its rollouts, the model's before the baseline's, by attempt. Verdicts are keyed by rollout id."""

    row: Row
    outcomes: list[Outcome]
    verdicts: dict[str, Verdict]


class ScoreCount(NamedTuple):
    """The number of scores in one part of a function's range, from `low` to `high`."""

    low: float
    high: float
    number: int


class ToolTotals(Record, frozen=True):
    """Totals of a tool's calls in a run."""

    tool: str
    calls: int
    errors: int
    mean_ms: float
    rollouts: int


class RunTotals(NamedTuple):
    """Totals over a run's rollouts. Times are in seconds since the epoch; None if there are no rollouts."""

    rollouts: int
    prompt_tokens: float
    completion_tokens: float
    cost_usd: float | None
    duration_ms: float
    started_at: float | None
    finished_at: float | None


class FailureGroup(Record, frozen=True):
    """Failures of a run with the same cause; `function` is the one that failed to score, None if the rollout failed."""

    kind: str
    message: str
    function: str | None
    count: int
    row_index: int


# ruff: noqa: S608 - put together from the constants here; values are always bound
_FUNCTION = "(:function IS NULL OR function = :function)"
_WITH_SCORE = f"EXISTS (SELECT 1 FROM scores WHERE rollout = pk AND {_FUNCTION} AND"
_UNSCORED = f"{_WITH_SCORE} failure IS NOT NULL)"
_LOW = f"{_WITH_SCORE} coalesce(value < :threshold, 1))"
_VERDICT = "EXISTS (SELECT 1 FROM verdicts WHERE verdicts.rollout = pk"
_STATUS: dict[Selected, str] = {
    "failed": f"(failure_origin IS NOT NULL OR {_UNSCORED})",
    "not-passed": f"(failure_origin IS NOT NULL OR {_LOW})",
    "passed": f"failure_origin IS NULL AND {_WITH_SCORE} 1) AND NOT {_LOW}",
    "tool-errors": "EXISTS (SELECT 1 FROM json_each(calls) AS call WHERE json_extract(call.value, '$[2]') IS NOT NULL)",
    "verdict-good": f"{_VERDICT} AND value = 1)",
    "verdict-bad": f"{_VERDICT} AND value = 0)",
    "no-verdict": f"NOT {_VERDICT})",
    "disagrees": f"EXISTS (SELECT 1 FROM verdicts JOIN scores USING (rollout) WHERE rollout = pk AND {_FUNCTION} "
    "AND (scores.value >= :threshold) <> verdicts.value)",
}
_CONDITIONS = {
    # Each condition includes the other bound, because a single score must satisfy both.
    "low": f"{_WITH_SCORE} value >= :low AND (:high IS NULL OR value <= :high))",
    "high": f"{_WITH_SCORE} value <= :high AND (:low IS NULL OR value >= :low))",
    "kind": f"(failure_kind = :kind OR {_WITH_SCORE} json_extract(failure, '$.kind') = :kind))",
    "message": f"(failure_message = :message OR {_WITH_SCORE} json_extract(failure, '$.message') = :message))",
    "tool": "instr(calls, :tool_text) "
    "AND EXISTS (SELECT 1 FROM json_each(calls) AS call WHERE json_extract(call.value, '$[0]') = :tool)",
    "text": "(SELECT conversation_has(data) FROM trajectories WHERE rollout = pk)",
}
_MEAN = f"(SELECT total(value) / max(count(*), 1) FROM scores WHERE rollout = pk AND {_FUNCTION})"
SORTS = {
    "row": "row_index",
    "score": f"avg({_MEAN})",
    "tokens": "sum(total_tokens)",
    "turns": "sum(turns)",
    "time": "sum(duration_ms)",
    "cost": "total(cost_usd)",
}
"""The keys to sort by, each with its SQL expression over a row's rollouts."""
_ROW_INDEXES = "SELECT DISTINCT row_index FROM rollouts WHERE run = :run ORDER BY row_index"
_LISTED = f"""
    SELECT {select(RolloutColumns)} FROM json_each(:wanted) AS wanted
    CROSS JOIN rollouts ON run = :run AND row_index = wanted.value
    ORDER BY wanted.key, policy DESC, run_index
"""
_ROWS = """
    SELECT row_index, row_id, data FROM rows
    WHERE run = :run AND row_id IN (SELECT value FROM json_each(:wanted))
"""
_RANGES = """
    SELECT function, min(value), max(value) FROM rollouts JOIN scores ON rollout = pk
    WHERE run = ? AND policy = 'policy' AND value IS NOT NULL GROUP BY function ORDER BY function
"""
_HISTOGRAM = """
    SELECT min(CAST((value - :low) / :width AS INTEGER), :bins - 1) AS bin, count(*)
    FROM rollouts JOIN scores ON rollout = pk
    WHERE run = :run AND policy = 'policy' AND function = :function AND value IS NOT NULL GROUP BY bin
"""
_TOOLS = """
    SELECT json_extract(call.value, '$[0]') AS tool, count(*), count(json_extract(call.value, '$[2]')),
           avg(json_extract(call.value, '$[1]')), count(DISTINCT pk)
    FROM rollouts, json_each(calls) AS call WHERE run = ? GROUP BY tool ORDER BY count(*) DESC, tool
"""
_FAILURES = """
    SELECT failure_kind, failure_message, NULL, count(*), min(row_index) FROM rollouts
    WHERE run = :run AND failure_origin IS NOT NULL GROUP BY failure_kind, failure_message
    UNION ALL
    SELECT json_extract(failure, '$.kind'), json_extract(failure, '$.message'), function, count(*), min(row_index)
    FROM rollouts JOIN scores ON rollout = pk WHERE run = :run AND failure IS NOT NULL GROUP BY 1, 2, 3
    ORDER BY 4 DESC, 5 LIMIT :limit
"""
_BY_ROW = """
    SELECT row_index, value FROM rollouts LEFT JOIN scores ON rollout = pk AND function = :function
    WHERE run = :run AND policy = :policy ORDER BY row_index, run_index
"""
_TOTALS = """
    SELECT count(*), total(prompt_tokens), total(completion_tokens), sum(cost_usd), total(duration_ms),
           min(started_at), max(finished_at)
    FROM rollouts WHERE run = ?
"""
_BINS = 20
_row_numbers = msgspec.json.Decoder(list[int])


class Browser(Queries):
    """Queries that read parts of large runs."""

    _watching: sqlite3.Connection | None = None

    def version(self) -> tuple[int, int, int]:
        """Return a value that changes when another process commits, starts or ends a run, or a run makes progress.

        Values are comparable only within the lifetime of this object. Only one thread may call it at a time.
        """
        with database_errors(self._path, "reading it"):
            if self._watching is None:
                self._watching = connect_reader(self._path)
            (commits,) = self._watching.execute("PRAGMA data_version").fetchone()
            running = self._watching.execute("SELECT id FROM runs WHERE status = 'running'").fetchall()
        # A killed process doesn't commit its end, so look at the lock.
        alive = [run_id for (run_id,) in running if is_owned(self._path, run_id)]
        return commits, len(alive), sum(_written_at(live_path(self._path, run_id)) for run_id in alive)

    def in_flight(self, run: RunInfo) -> list[RunningRollout]:
        """Return the rollouts of a run that are in flight, oldest first."""
        return read_live(self._path, run.id) if run.alive else []

    def close(self) -> None:
        """Close the connection that `version` keeps open."""
        if self._watching is not None:
            self._watching.close()
            self._watching = None

    def select(self, run_id: str, wanted: RowFilter, threshold: float) -> Selection:
        """Return the rows of a run that a filter selects. A score of at least `threshold` passes."""
        conditions = [text for name, text in _CONDITIONS.items() if getattr(wanted, name) not in (None, "")]
        if wanted.status is not None:
            conditions.append(_STATUS[wanted.status])
        descending = wanted.sort.startswith("-")
        sort = SORTS.get(wanted.sort.removeprefix("-"), SORTS["row"])
        ordered = sort == SORTS["row"] and not descending
        where = " AND ".join(["run = :run", *conditions])
        query = f"SELECT row_index FROM rollouts WHERE {where} GROUP BY row_index ORDER BY {sort} "
        query += "DESC, row_index" if descending else ", row_index"
        with open_reader(self._path) as db:
            values = {"run": self._pk(db, run_id), "threshold": threshold, **msgspec.structs.asdict(wanted)}
            if wanted.text:
                db.create_function("conversation_has", 1, _finder(wanted.text), deterministic=True)
            if wanted.tool:
                values["tool_text"] = msgspec.json.encode(wanted.tool).decode()
            # The plain list is read from an index alone.
            listed = query if conditions or not ordered else _ROW_INDEXES
            # One text of 100,000 numbers arrives in half the time that as many results take.
            (text,) = db.execute(f"SELECT json_group_array(row_index) FROM ({listed})", values).fetchone()
            return Selection(array("q", _row_numbers.decode(text)), ordered=ordered)

    def page(self, run_id: str, rows: Sequence[int]) -> list[ListedRow]:
        """Read the rows with these indexes, in this order, with their rollouts but without trajectories."""
        with open_reader(self._path) as db:
            run = self._pk(db, run_id)
            found = [
                RolloutColumns(*each) for each in db.execute(_LISTED, {"run": run, "wanted": json.dumps(list(rows))})
            ]
            scores, by_key = scores_of(db, found), verdicts_of(db, found)
            verdicts = {each.id: by_key[each.pk] for each in found if each.pk in by_key}
            # A watched run also keeps earlier versions of edited rows.
            latest = {each.row_index: each.row_id for each in sorted(found, key=attrgetter("finished_at"))}
            listed: dict[str, list[Outcome]] = {}
            for columns in found:
                if latest[columns.row_index] == columns.row_id:
                    listed.setdefault(columns.row_id, []).append(decode_outcome(columns, scores.get(columns.pk, {})))
            wanted = {"run": run, "wanted": json.dumps(list(listed))}
            each_row = {row_id: decode_row(index, row_id, data) for index, row_id, data in db.execute(_ROWS, wanted)}
        return [ListedRow(each_row[row_id], outcomes, verdicts) for row_id, outcomes in listed.items()]

    def scores_by_row(self, run_id: str, function: str, policy: str = "policy") -> list[list[float | None]]:
        """Return one function's scores by row, each row's ordered by attempt; None for a missing score."""
        with open_reader(self._path) as db:
            found = db.execute(_BY_ROW, {"run": self._pk(db, run_id), "function": function, "policy": policy})
            return [[value for _, value in group] for _, group in groupby(found, key=itemgetter(0))]

    def histograms(self, run_id: str) -> dict[str, list[ScoreCount]]:
        """Count the scores of each function in bins of equal width, for `policy`."""
        found: dict[str, list[ScoreCount]] = {}
        with open_reader(self._path) as db:
            run = self._pk(db, run_id)
            for function, low, high in db.execute(_RANGES, (run,)).fetchall():
                # Scores outside 0 to 1 are rare, and a common axis makes runs comparable.
                low, high = min(low, 0.0), max(high, 1.0)
                width = (high - low) / _BINS
                if not math.isfinite(width):
                    continue
                values = {"run": run, "function": function, "low": low, "width": width, "bins": _BINS}
                counts = dict(db.execute(_HISTOGRAM, values).fetchall())
                found[function] = [
                    ScoreCount(low + width * bin, low + width * (bin + 1), counts.get(bin, 0)) for bin in range(_BINS)
                ]
        return found

    def tool_totals(self, run_id: str) -> list[ToolTotals]:
        """Total every tool's calls, most used first."""
        with open_reader(self._path) as db:
            return [ToolTotals(*columns) for columns in db.execute(_TOOLS, (self._pk(db, run_id),))]

    def failure_groups(self, run_id: str, limit: int = 50) -> list[FailureGroup]:
        """Group the failures of rollouts and scores by cause, most frequent first, at most `limit` groups."""
        with open_reader(self._path) as db:
            values = {"run": self._pk(db, run_id), "limit": limit}
            return [FailureGroup(*columns) for columns in db.execute(_FAILURES, values)]

    def run_totals(self, run_id: str) -> RunTotals:
        """Add up the tokens, cost and durations of a run's rollouts."""
        with open_reader(self._path) as db:
            return RunTotals(*db.execute(_TOTALS, (self._pk(db, run_id),)).fetchone())


def _written_at(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _finder(text: str) -> Callable[[bytes], bool]:
    """Return a function that tests if a stored trajectory's conversation contains a text."""
    # A search in the encoded bytes rules out most trajectories before decoding them.
    encoded = msgspec.json.encode(text)[1:-1].lower()
    wanted = text.lower()

    def has(data: bytes) -> bool:
        stored = unpack(data)
        if encoded not in stored.lower():
            return False
        return any(wanted in part.lower() for message in decode_messages(stored) for part in _texts(message))

    return has


def _texts(message: Message) -> Iterator[str]:
    yield content_text(message.get("content"))
    yield content_text(message.get("reasoning_content"))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield content_text(function.get("name"))
        yield content_text(function.get("arguments"))
