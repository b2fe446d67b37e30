"""Query the run store. Each query opens its own read-only connection, so any thread may call.

Streaming queries read a bounded number of records at a time and hold no transaction in between, so a slow consumer
neither fills the memory nor keeps SQLite from truncating the write-ahead log.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from osmosis_ai.errors import StoreError
from osmosis_ai.records import Outcome, Record, Rollout, Row, Score, Verdict
from osmosis_ai.store.codec import (
    decode_calls,
    decode_object,
    decode_outcome,
    decode_rollout,
    decode_row,
    decode_score,
)
from osmosis_ai.store.owners import is_owned
from osmosis_ai.store.schema import open_reader
from osmosis_ai.store.tables import (
    JudgePromptColumns,
    PlaceColumns,
    RolloutColumns,
    RunColumns,
    RunStatus,
    ScoreColumns,
    VerdictColumns,
    select,
)

__all__ = [
    "Completed",
    "FunctionTotals",
    "JudgedScore",
    "PairedRow",
    "Queries",
    "RolloutFilter",
    "RolloutKey",
    "RunInfo",
    "ScoredRollout",
    "SharedRows",
    "StoredRollout",
    "Unscored",
    "scores_of",
    "verdicts_of",
]

P = TypeVar("P", bound=PlaceColumns)


class RolloutKey(NamedTuple):
    """The key that identifies a rollout in its run."""

    policy: str
    row_id: str
    run_index: int


class RunInfo(Record, frozen=True):
    """A run, without its records. Times are in seconds since the epoch.

    `rollouts` counts the recorded rollouts, `failed` those of them that failed. `alive` is True if a process owns a
    `running` run, which it then writes; a running run that isn't alive was killed.
    """

    id: str
    command: str
    status: RunStatus
    created_at: float
    finished_at: float | None
    identity: dict[str, Any]
    config: dict[str, Any]
    summary: dict[str, Any] | None
    rollouts: int
    failed: int
    alive: bool

    @property
    def pass_threshold(self) -> float:
        """The score from which a rollout passes."""
        return float(self.config.get("pass_threshold", 1.0))


class StoredRollout(Record, frozen=True):
    """A rollout and its data outside the trajectory. Times are in seconds since the epoch.

    `tool_errors` counts the tool calls that failed, `requests` the model requests, retries included; `attempt` is 2 if
    the record replaced a first one.
    """

    rollout: Rollout
    turns: int
    tool_calls: int
    tool_errors: int
    requests: int
    attempt: int
    started_at: float
    finished_at: float


class Unscored(NamedTuple):
    """A stored rollout and the functions still to score it. `key` identifies it in this file, `rollout` in its run."""

    key: int
    rollout: RolloutKey
    row_index: int
    functions: list[str]


class RolloutFilter(Record, frozen=True):
    """A filter for the rollouts of a run; all conditions that are set must hold.

    Attributes:
        row: The row index.
        run_index: The number of the attempt, from 0.
        failed: Rollouts that failed, or have a score that could not be computed.
        below: Rollouts that failed, or have a score that is lower than this or could not be computed.
        tool_errors: Rollouts with a tool call that failed.
        with_verdict: Rollouts with a user's verdict.
    """

    row: int | None = None
    run_index: int | None = None
    failed: bool = False
    tool_errors: bool = False
    below: float | None = None
    with_verdict: bool = False


_ALL = RolloutFilter()


class ScoredRollout(NamedTuple):
    """A rollout, its row, its scores by function, and a user's verdict."""

    stored: StoredRollout
    row: Row
    scores: dict[str, Score]
    verdict: Verdict | None = None


class JudgedScore(NamedTuple):
    """A function's score of a rollout, None if it could not be computed, and a user's verdict on the rollout."""

    rollout: int
    row_index: int
    verdict: Literal[0, 1]
    function: str | None
    score: float | None


class FunctionTotals(Record, frozen=True):
    """Totals of one function's scores in a run, for one policy. The database computes them."""

    function: str
    """Name of the function."""
    rollouts: int
    """Rollouts, scored or not; without those that their grader removed."""
    scored: int
    """Rollouts with a score."""
    errors: int
    """Rollouts whose score could not be computed."""
    mean: float
    """Mean score; a missing one counts as 0."""
    code: list[str] = []
    """Known hashes of the code that computed the scores."""


class SharedRows(Record, frozen=True):
    """Number of rows recorded in both of two runs, and in only one of them."""

    shared: int
    """Rows in both runs."""
    only_a: int
    """Rows only in the first run."""
    only_b: int
    """Rows only in the second run."""


class Completed(NamedTuple):
    """The recorded rollouts of a run, and those of them that failed."""

    keys: set[RolloutKey]
    failed: set[RolloutKey]


class PairedRow(NamedTuple):
    """One function's scores of one row in two runs, ordered by run index; None for a missing score."""

    row_index: int
    row_id: str
    a: list[float | None]
    b: list[float | None]


class _Scored(RolloutColumns):
    row_data: bytes
    trajectory: bytes | None


class _Lacking(PlaceColumns):
    missing: str


class _Valued(PlaceColumns):
    value: float | None


# Keyset pagination: a page starts after the last one's last key, so with the index `rollouts_in_order` every page costs
# the same.
_PAGE = """
    WHERE rollouts.run = :run AND rollouts.row_index <= :last
          AND (rollouts.row_index, run_index, policy, pk) > (:row, :index, :policy, :pk)
"""
_ORDER = "ORDER BY rollouts.row_index, run_index, policy, pk LIMIT :limit"

# ruff: noqa: S608 - put together from the constants above; values are always bound
_RUNS = f"SELECT {select(RunColumns)} FROM runs "
_NAMED_SO = """
    EXISTS (
        SELECT 1 FROM json_each(:beginnings) AS beginning
        WHERE substr(json_extract(config, '$.name'), 1, length(beginning.value)) = beginning.value
    )
"""
_NAMED = "SELECT id FROM runs WHERE json_extract(config, '$.name') = ?"
# By the order of their creation: the clock may have been set back since.
_NEWEST_FIRST = "ORDER BY pk DESC"
_ITS_ROW = "JOIN rows ON rows.run = rollouts.run AND rows.row_id = rollouts.row_id"
_ITS_TRAJECTORY = "JOIN trajectories ON trajectories.rollout = pk"
_DATA = {"row_data": "rows.data", "trajectory": "trajectories.data"}
# Rollouts that their grader has removed don't count.
_KEPT = "finish_reason <> 'removed'"
_MISSING = """
    FROM json_each(:without) AS wanted WHERE NOT EXISTS (
        SELECT 1 FROM scores
        WHERE scores.rollout = pk AND function = wanted.key AND (wanted.value IS NULL OR code_hash = wanted.value)
    )
"""
_MISSING_NAMES = f"(SELECT json_group_array(wanted.key) {_MISSING})"
_UNSCORED = f"""
    SELECT {select(_Lacking, missing=_MISSING_NAMES)} FROM rollouts
    {_PAGE} AND {_KEPT} AND (failure_origin IS NULL OR :partial AND failure_origin = 'timeout')
    AND EXISTS (SELECT 1 {_MISSING})
    {_ORDER}
"""
_VALUE = "(SELECT value FROM scores WHERE scores.rollout = pk AND function = :function)"
_VALUES = f"SELECT {select(_Valued, value=_VALUE)} FROM rollouts {_PAGE} AND {_KEPT} AND policy = :whose {_ORDER}"
_ROW_VALUES = f"""
    SELECT {_VALUE} FROM rollouts
    WHERE run = :run AND row_id = :row_id AND policy = :policy AND {_KEPT} ORDER BY run_index
"""
_OUTCOMES = f"SELECT {select(RolloutColumns)} FROM rollouts {_PAGE} {_ORDER}"
_FILTER = """
    (:run_index IS NULL OR run_index = :run_index)
    AND (
        NOT :failed OR failure_origin IS NOT NULL
        OR EXISTS (SELECT 1 FROM scores WHERE scores.rollout = pk AND scores.failure IS NOT NULL)
    )
    AND (
        :below IS NULL OR failure_origin IS NOT NULL
        OR EXISTS (SELECT 1 FROM scores WHERE scores.rollout = pk AND coalesce(scores.value < :below, 1))
    )
    AND (
        NOT :tool_errors
        OR EXISTS (SELECT 1 FROM json_each(calls) AS call WHERE json_extract(call.value, '$[2]') IS NOT NULL)
    )
    AND (NOT :with_verdict OR EXISTS (SELECT 1 FROM verdicts WHERE verdicts.rollout = pk))
"""
_SCORED = f"""
    SELECT {select(_Scored, row_data="rows.data", trajectory="NULL")} FROM rollouts {_ITS_ROW}
    {_PAGE} AND {_FILTER} {_ORDER}
"""
_SCORED_WITH_TRAJECTORY = f"""
    SELECT {select(_Scored, **_DATA)} FROM rollouts {_ITS_TRAJECTORY} {_ITS_ROW} {_PAGE} AND {_FILTER} {_ORDER}
"""
_COUNT = f"""
    SELECT count(*) FROM rollouts WHERE rollouts.run = :run AND (:row IS NULL OR row_index = :row) AND {_FILTER}
"""
# CROSS JOIN makes SQLite follow the order of the keys, and so read the scores in the order they are stored.
_SCORES_OF = f"""
    SELECT {select(ScoreColumns)} FROM json_each(?) AS wanted CROSS JOIN scores ON scores.rollout = wanted.value
    ORDER BY scores.rollout, function
"""
_PROMPTS_OF = f"""
    SELECT {select(JudgePromptColumns)} FROM json_each(?) AS wanted
    CROSS JOIN judge_prompts ON judge_prompts.rollout = wanted.value
"""
_VERDICTS_OF = f"""
    SELECT {select(VerdictColumns)} FROM json_each(?) AS wanted CROSS JOIN verdicts ON verdicts.rollout = wanted.value
"""
# total() is 0.0 without any score, where sum() is NULL.
_FUNCTION_TOTALS = f"""
    SELECT function, count(value), count(failure), total(value), group_concat(DISTINCT code_hash)
    FROM rollouts JOIN scores ON rollout = pk WHERE run = ? AND policy = ? AND {_KEPT}
    GROUP BY function ORDER BY function
"""
_VERDICTS = """
    SELECT pk, row_index, verdicts.value, function, scores.value FROM rollouts JOIN verdicts ON verdicts.rollout = pk
    LEFT JOIN scores ON scores.rollout = pk WHERE run = ? ORDER BY row_index, run_index, policy
"""
_SHARED_ROWS = """
    SELECT count(*) FROM rows AS a JOIN rows AS b ON b.row_id = a.row_id WHERE a.run = ? AND b.run = ?
"""
_TRAJECTORY_CHUNK = 16  # a trajectory can be megabytes
_CHUNK = 500


class Queries:
    """Reads the run store. Every method raises StoreError if the file can't be read or a run doesn't exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def list_runs(self, limit: int = 20) -> list[RunInfo]:
        """List the latest runs, newest first."""
        with open_reader(self._path) as db:
            found = db.execute(f"{_RUNS} {_NEWEST_FIRST} LIMIT ?", (limit,))
            return [self._run_info(RunColumns(*columns)) for columns in found]

    def list_named(self, limit: int, beginnings: Sequence[str], *, so: bool = True) -> list[RunInfo]:
        """List the latest runs whose names start with one of these prefixes, newest first.

        Args:
            limit: Maximum number of runs.
            beginnings: The prefixes.
            so: False to list the runs whose names start with none of them.
        """
        query = f"{_RUNS} WHERE {_NAMED_SO} = :so {_NEWEST_FIRST} LIMIT :limit"
        values = {"beginnings": json.dumps(list(beginnings)), "so": so, "limit": limit}
        with open_reader(self._path) as db:
            return [self._run_info(RunColumns(*columns)) for columns in db.execute(query, values)]

    def named_run(self, name: str, command: str, shard: str | None = None) -> str | None:
        """Return the id of a command's newest run with this name and shard, or None if there is none."""
        query = f"{_NAMED} AND command = ? AND json_extract(identity, '$.shard') IS ? {_NEWEST_FIRST} LIMIT 1"
        with open_reader(self._path) as db:
            found = db.execute(query, (name, command, shard)).fetchone()
        return None if found is None else str(found[0])

    def find_run(self, name: str) -> RunInfo:
        """Return a run.

        Args:
            name: A run's id, a name (its newest run), a unique prefix of an id, or `latest`.

        Raises:
            StoreError: There is no such run, or several ids have the prefix.
        """
        if name == "latest":
            newest = self.list_runs(1)
            if not newest:
                raise StoreError(f"{self._path} has no runs yet; `osmosis test` and `osmosis eval` create them")
            return newest[0]
        with open_reader(self._path) as db:
            found = db.execute(_RUNS + "WHERE id = ?", (name,)).fetchall()
            if not found:
                named = db.execute(f"{_NAMED} {_NEWEST_FIRST} LIMIT 1", (name,)).fetchone()
                found = db.execute(_RUNS + "WHERE id = ?", named or ("",)).fetchall()
            if not found and name:
                # A range instead of LIKE, whose wildcards the name may contain.
                bounds = (name, name + "\U0010ffff")
                # One more than the message below shows.
                found = db.execute(_RUNS + "WHERE id >= ? AND id < ? ORDER BY id LIMIT 11", bounds).fetchall()
        if len(found) == 1:
            return self._run_info(RunColumns(*found[0]))
        if found:
            ids = ", ".join(RunColumns(*columns).id for columns in found[:10]) + (", …" if len(found) > 10 else "")
            raise StoreError(f"several runs begin with {name!r}: {ids}; give more of the id")
        raise StoreError(f"there is no run {name!r} in {self._path}; `osmosis runs` lists all runs")

    def unfinished_runs(self, command: str) -> list[RunInfo]:
        """List a command's unfinished runs that no process is working on, newest first."""
        query = f"{_RUNS} WHERE command = ? AND status <> 'finished' {_NEWEST_FIRST}"
        with open_reader(self._path) as db:
            found = [self._run_info(RunColumns(*columns)) for columns in db.execute(query, (command,))]
        return [run for run in found if not run.alive]

    def completed_keys(self, run_id: str) -> Completed:
        """Return the keys of the recorded rollouts."""
        completed = Completed(set(), set())
        query = "SELECT policy, row_id, run_index, failure_origin IS NOT NULL FROM rollouts WHERE run = ?"
        with open_reader(self._path) as db:
            for *columns, failed in db.execute(query, (self._pk(db, run_id),)):
                key = RolloutKey(*columns)
                completed.keys.add(key)
                if failed:
                    completed.failed.add(key)
        return completed

    def outcomes(self, run_id: str) -> Iterator[Outcome]:
        """Stream rollouts with scores but without trajectories, ordered by row, run index and policy."""
        with open_reader(self._path) as db:
            for page in self._pages(db, _OUTCOMES, RolloutColumns, run_id, _CHUNK):
                scores = scores_of(db, page)
                yield from (decode_outcome(columns, scores.get(columns.pk, {})) for columns in page)

    def scored(
        self, run_id: str, wanted: RolloutFilter = _ALL, *, with_trajectory: bool = False
    ) -> Iterator[ScoredRollout]:
        """Stream rollouts with their rows and scores, ordered by row, run index and policy.

        Args:
            run_id: The run's id.
            wanted: Which rollouts to read; all by default.
            with_trajectory: False to leave the rollouts' lists (messages, turns, tool calls, samples) empty, which is
                much faster.
        """

        query = _SCORED_WITH_TRAJECTORY if with_trajectory else _SCORED
        chunk = _TRAJECTORY_CHUNK if with_trajectory else _CHUNK
        with open_reader(self._path) as db:
            for page in self._pages(db, query, _Scored, run_id, chunk, **msgspec.structs.asdict(wanted)):
                scores, verdicts = scores_of(db, page, with_prompts=with_trajectory), verdicts_of(db, page)
                for columns in page:
                    rollout = decode_rollout(columns, columns.trajectory)
                    stored = StoredRollout(
                        rollout=rollout,
                        turns=columns.turns,
                        tool_calls=columns.tool_calls,
                        tool_errors=sum(call.error is not None for call in decode_calls(columns)),
                        requests=columns.requests,
                        attempt=columns.attempt,
                        started_at=columns.started_at,
                        finished_at=columns.finished_at,
                    )
                    its_row = decode_row(columns.row_index, columns.row_id, columns.row_data)
                    yield ScoredRollout(stored, its_row, scores.get(columns.pk, {}), verdicts.get(columns.pk))

    def count_rollouts(self, run_id: str, wanted: RolloutFilter = _ALL) -> int:
        """Count the rollouts that `scored` yields for the same filter."""
        with open_reader(self._path) as db:
            values = {"run": self._pk(db, run_id), **msgspec.structs.asdict(wanted)}
            return int(db.execute(_COUNT, values).fetchone()[0])

    def row_span(self, run_id: str) -> tuple[int, int] | None:
        """Return the first and the last row index with a rollout, or None if there are no rollouts."""
        with open_reader(self._path) as db:
            query = "SELECT min(row_index), max(row_index) FROM rollouts WHERE run = ?"
            first, last = db.execute(query, (self._pk(db, run_id),)).fetchone()
        return None if first is None else (first, last)

    def row(self, run_id: str, row_id: str) -> Row:
        """Return a row that has a rollout in the run."""
        with open_reader(self._path) as db:
            query = "SELECT row_index, row_id, data FROM rows WHERE run = ? AND row_id = ?"
            found = db.execute(query, (self._pk(db, run_id), row_id)).fetchone()
            if found is None:
                raise StoreError(f"there is no row {row_id!r} in run {run_id}")
            return decode_row(*found)

    def shared_rows(self, run_a: str, run_b: str) -> SharedRows:
        """Count the rows recorded in both runs, and in only one of them."""
        with open_reader(self._path) as db:
            keys = self._pk(db, run_a), self._pk(db, run_b)
            counts = [db.execute("SELECT count(*) FROM rows WHERE run = ?", (key,)).fetchone()[0] for key in keys]
            (shared,) = db.execute(_SHARED_ROWS, keys).fetchone()
        return SharedRows(shared, counts[0] - shared, counts[1] - shared)

    def function_totals(self, run_id: str, policy: str = "policy") -> list[FunctionTotals]:
        """Total every function's scores of one policy. Reads every score, but decodes none."""
        with open_reader(self._path) as db:
            key = (self._pk(db, run_id), policy)
            query = f"SELECT count(*) FROM rollouts WHERE run = ? AND policy = ? AND {_KEPT}"
            (rollouts,) = db.execute(query, key).fetchone()
            return [
                FunctionTotals(function, rollouts, scored, errors, total / rollouts, code.split(",") if code else [])
                for function, scored, errors, total, code in db.execute(_FUNCTION_TOTALS, key)
            ]

    def unscored(self, run_id: str, without: Mapping[str, str | None], *, partial: bool = False) -> Iterator[Unscored]:
        """Stream rollouts that ended without failure but lack a score, ordered by row, run index and policy.

        Args:
            run_id: The run's id.
            without: The functions, each mapped to the hash of its code, or to None for any code. A rollout qualifies if
                it lacks a score by at least one of them.
            partial: True to include rollouts that ran out of time.
        """
        wanted = json.dumps(dict(without))
        with open_reader(self._path) as db:
            for page in self._pages(db, _UNSCORED, _Lacking, run_id, _CHUNK, without=wanted, partial=partial):
                for columns in page:
                    place = RolloutKey(columns.policy, columns.row_id, columns.run_index)
                    yield Unscored(columns.pk, place, columns.row_index, json.loads(columns.missing))

    def verdicts(self, run_id: str) -> Iterator[JudgedScore]:
        """Stream the scores of rollouts with a verdict; a rollout without scores yields one without a function."""
        with open_reader(self._path) as db:
            yield from starmap(JudgedScore, db.execute(_VERDICTS, (self._pk(db, run_id),)))

    def functions(self, run_id: str) -> list[str]:
        """List the functions that have scores in a run, by name. Reads every score."""
        query = "SELECT DISTINCT function FROM rollouts JOIN scores ON rollout = pk WHERE run = ? ORDER BY function"
        with open_reader(self._path) as db:
            return [function for (function,) in db.execute(query, (self._pk(db, run_id),))]

    def paired_scores(
        self, run_a: str, run_b: str, function: str, *, policy_a: str = "policy", policy_b: str = "policy"
    ) -> Iterator[PairedRow]:
        """Stream one function's scores of the rows in both runs, in the order of the first run's rows.

        Args:
            run_a, run_b: The runs' ids; they may be equal, with different policies.
            function: The function's name.
            policy_a, policy_b: `policy` or `baseline`.
        """

        with open_reader(self._path) as db:
            other = {"run": self._pk(db, run_b), "function": function, "policy": policy_b}
            found = self._pages(db, _VALUES, _Valued, run_a, _CHUNK, function=function, whose=policy_a)
            values = (columns for page in found for columns in page)
            for (row_index, row_id), group in groupby(values, key=lambda columns: (columns.row_index, columns.row_id)):
                b = [value for (value,) in db.execute(_ROW_VALUES, {**other, "row_id": row_id})]
                if b:
                    yield PairedRow(row_index, row_id, [columns.value for columns in group], b)

    def _pages(
        self,
        db: sqlite3.Connection,
        query: str,
        kind: type[P],
        run_id: str,
        limit: int,
        row: int | None = None,
        **parameters: str | float | None,
    ) -> Iterator[list[P]]:
        """Run a paginated query, and yield pages of at most `limit` records, decoded as `kind`."""
        bounds = {"run": self._pk(db, run_id), "last": _LAST if row is None else row, "limit": limit}
        after: dict[str, int | str] = {"row": 0 if row is None else row, "index": -1, "policy": "", "pk": 0}
        while page := [kind(*columns) for columns in db.execute(query, {**bounds, **after, **parameters})]:
            yield page
            last = page[-1]
            after = {"row": last.row_index, "index": last.run_index, "policy": last.policy, "pk": last.pk}

    def _pk(self, db: sqlite3.Connection, run_id: str) -> int:
        found = db.execute("SELECT pk FROM runs WHERE id = ?", (run_id,)).fetchone()
        if found is None:
            raise StoreError(f"there is no run {run_id!r} in {self._path}; `osmosis runs` lists all runs")
        return int(found[0])

    def _run_info(self, columns: RunColumns) -> RunInfo:
        return RunInfo(
            id=columns.id,
            command=columns.command,
            status=columns.status,
            created_at=columns.created_at,
            finished_at=columns.finished_at,
            identity=decode_object(columns.identity),
            config=decode_object(columns.config),
            summary=None if columns.summary is None else decode_object(columns.summary),
            rollouts=columns.rollouts,
            failed=columns.failed,
            alive=columns.status == "running" and is_owned(self._path, columns.id),
        )


_LAST = 2**63 - 1


def scores_of(
    db: sqlite3.Connection, page: Sequence[PlaceColumns], *, with_prompts: bool = False
) -> dict[int, dict[str, Score]]:
    """Return the scores of these rollouts, by rollout key and function."""
    scores: defaultdict[int, dict[str, Score]] = defaultdict(dict)
    keys = _keys(page)
    asked = starmap(JudgePromptColumns, db.execute(_PROMPTS_OF, keys)) if with_prompts else ()
    prompts = {(columns.rollout, columns.function): columns.data for columns in asked}
    for columns in starmap(ScoreColumns, db.execute(_SCORES_OF, keys)):
        score = decode_score(columns, prompts.get((columns.rollout, columns.function)))
        scores[columns.rollout][columns.function] = score
    return scores


def verdicts_of(db: sqlite3.Connection, page: Sequence[PlaceColumns]) -> dict[int, Verdict]:
    """Return the verdicts on these rollouts, by rollout key."""
    found = starmap(VerdictColumns, db.execute(_VERDICTS_OF, _keys(page)))
    return {columns.rollout: Verdict(columns.value, columns.note) for columns in found}


def _keys(page: Sequence[PlaceColumns]) -> tuple[str]:
    return (json.dumps([columns.pk for columns in page]),)
