"""What can be asked of the run store. Each query has a connection of its own that can't write; any thread may ask.

What streams reads a bounded number of records at a time and holds no transaction in between, so that a slow consumer
neither fills the memory nor keeps the write-ahead log from being emptied.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from osmosis_ai.errors import StoreError
from osmosis_ai.records import Outcome, Record, Rollout, Row, Score
from osmosis_ai.store.codec import decode_calls, decode_object, decode_rollout, decode_row, decode_score
from osmosis_ai.store.owners import process_alive
from osmosis_ai.store.schema import open_reader

__all__ = [
    "Completed",
    "FunctionTotals",
    "PairedRow",
    "Queries",
    "RolloutKey",
    "RunInfo",
    "RunStatus",
    "ScoredRollout",
    "ScoringInput",
    "ScoringKey",
    "SharedRows",
    "StoredRollout",
    "StoredScore",
]

T = TypeVar("T")

RunStatus: TypeAlias = Literal["running", "finished", "interrupted", "failed"]


class RolloutKey(NamedTuple):
    """What makes a rollout unique in its run."""

    policy: str
    row_id: str
    run_index: int


class RunInfo(Record, frozen=True):
    """A run, without its records. Times in seconds since the epoch.

    `rollouts` counts those recorded, `failed` the ones of them that failed. `alive` tells whether the process that
    writes a `running` run exists; a running run that isn't alive was killed.
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


class StoredRollout(Record, frozen=True):
    """A rollout and what is known of it without its trajectory. Times in seconds since the epoch.

    `requests` counts model requests, retries included; `attempt` is 2 when the record replaced a first one.
    """

    rollout: Rollout
    turns: int
    tool_calls: int
    requests: int
    attempt: int
    started_at: float
    finished_at: float


class StoredScore(Record, frozen=True):
    """A score and whose it is. `code_hash` is that of the code which computed it, when it was given."""

    rollout_id: str
    row_index: int
    row_id: str
    run_index: int
    policy: str
    score: Score
    code_hash: str | None = None


class ScoringInput(NamedTuple):
    """What a scorer needs. `missing` are the functions asked for whose score is missing or out of date."""

    rollout: Rollout
    row: Row
    missing: list[str]


class ScoringKey(NamedTuple):
    """A stored rollout that is to be scored: its key in this file, its row's index, and the functions to score with."""

    key: int
    row_index: int
    missing: list[str]


class ScoredRollout(NamedTuple):
    """A rollout, its row and its scores by function."""

    stored: StoredRollout
    row: Row
    scores: dict[str, Score]


class FunctionTotals(Record, frozen=True):
    """One function's scores in a run, added up by the database.

    `rollouts` counts the policy's, scored or not; `mean` counts a missing score as 0. `code` has the hashes of the code
    that computed the scores, as far as they were given.
    """

    function: str
    rollouts: int
    scored: int
    errors: int
    mean: float
    code: list[str] = []


class SharedRows(NamedTuple):
    """How many rows two runs have recorded in common, and each on its own."""

    shared: int
    only_a: int
    only_b: int


class Completed(NamedTuple):
    """The rollouts a run has recorded, and which of those failed."""

    keys: set[RolloutKey]
    failed: set[RolloutKey]


class PairedRow(NamedTuple):
    """One function's scores of one row in two runs, in the order of run indices; None where a score is missing."""

    row_index: int
    row_id: str
    a: list[float | None]
    b: list[float | None]


_RUNS = """
    SELECT id, command, status, created_at, finished_at, identity, config, summary, rollouts, failed,
           owner_pid, owner_started
    FROM runs
"""
_ROLLOUT = """
    rollouts.pk, id, rollouts.row_index, rollouts.row_id, run_index, policy, finish_reason, rollouts.duration_ms,
    failure_origin, failure_kind, failure_message, failure_file, failure_line, failure_detail,
    prompt_tokens, completion_tokens, total_tokens, cost_usd
"""
_LIST = "turns, tool_calls, requests, attempt, started_at, finished_at"
# A page goes on where the last one ended. The index `rollouts_in_order` gives the order, whatever the page's number.
_PAGE = """
    WHERE rollouts.run = :run AND rollouts.row_index <= :last
          AND (rollouts.row_index, run_index, policy, pk) > (:row, :index, :policy, :pk)
"""
_ORDER = "ORDER BY rollouts.row_index, run_index, policy, pk LIMIT :limit"

# ruff: noqa: S608 - put together from the constants above; values are always bound
_ROLLOUTS = f"SELECT {_ROLLOUT}, {_LIST} FROM rollouts {_PAGE} {_ORDER}"
_ROLLOUTS_WITH_TRAJECTORY = f"""
    SELECT {_ROLLOUT}, {_LIST}, data FROM rollouts JOIN trajectories ON rollout = pk {_PAGE} {_ORDER}
"""
_MISSING = """
    FROM json_each(:without) AS wanted WHERE NOT EXISTS (
        SELECT 1 FROM scores
        WHERE scores.rollout = pk AND function = wanted.key AND (wanted.value IS NULL OR code_hash = wanted.value)
    )
"""
_SCORING_INPUTS = f"""
    SELECT {_ROLLOUT}, trajectories.data, rows.data, (SELECT json_group_array(wanted.key) {_MISSING})
    FROM rollouts JOIN trajectories ON rollout = pk
         JOIN rows ON rows.run = rollouts.run AND rows.row_id = rollouts.row_id
    {_PAGE} AND (:without IS NULL OR EXISTS (SELECT 1 {_MISSING}))
    {_ORDER}
"""
_SCORING_INPUT = f"""
    SELECT {_ROLLOUT}, trajectories.data, rows.data FROM rollouts JOIN trajectories ON rollout = pk
    JOIN rows ON rows.run = rollouts.run AND rows.row_id = rollouts.row_id WHERE pk = ?
"""
_SCORING_KEYS = f"""
    SELECT pk, id, rollouts.row_index, rollouts.row_id, run_index, policy,
           (SELECT json_group_array(wanted.key) {_MISSING})
    FROM rollouts {_PAGE} AND failure_origin IS NULL AND EXISTS (SELECT 1 {_MISSING}) {_ORDER}
"""
_SCORES = f"""
    SELECT pk, id, row_index, row_id, run_index, policy, function, value, failure, scores.duration_ms, explanation,
           judge_calls, code_hash
    FROM (SELECT pk, id, row_index, row_id, run_index, policy FROM rollouts {_PAGE} {_ORDER})
         LEFT JOIN scores ON scores.rollout = pk AND (:function IS NULL OR function = :function)
    ORDER BY row_index, run_index, policy, pk, function
"""
_OUTCOMES = f"""
    SELECT {_ROLLOUT}, calls, function, value, failure, scores.duration_ms, explanation,
           judge_calls
    FROM (SELECT * FROM rollouts {_PAGE} {_ORDER}) AS rollouts LEFT JOIN scores ON scores.rollout = pk
    ORDER BY rollouts.row_index, run_index, policy, pk, function
"""
_ROW_VALUES = """
    SELECT value FROM rollouts LEFT JOIN scores ON rollout = pk AND function = :function
    WHERE run = :run AND row_id = :row_id AND policy = :policy ORDER BY run_index
"""
_FILTER = """
    (:run_index IS NULL OR run_index = :run_index)
    AND (
        NOT :failed OR failure_origin IS NOT NULL
        OR EXISTS (SELECT 1 FROM scores WHERE scores.rollout = pk AND scores.failure IS NOT NULL)
    )
"""
_ITS_ROW = "JOIN rows ON rows.run = rollouts.run AND rows.row_id = rollouts.row_id"
_SCORED = f"SELECT {_ROLLOUT}, {_LIST}, rows.data, NULL FROM rollouts {_ITS_ROW} {_PAGE} AND {_FILTER} {_ORDER}"
_SCORED_WITH_TRAJECTORY = f"""
    SELECT {_ROLLOUT}, {_LIST}, rows.data, trajectories.data
    FROM rollouts JOIN trajectories ON rollout = pk {_ITS_ROW} {_PAGE} AND {_FILTER} {_ORDER}
"""
_COUNT = f"""
    SELECT count(*) FROM rollouts WHERE rollouts.run = :run AND (:row IS NULL OR row_index = :row) AND {_FILTER}
"""
_SCORES_OF = """
    SELECT function, value, failure, duration_ms, explanation, judge_calls FROM scores WHERE rollout = ?
    ORDER BY function
"""
_FUNCTION_TOTALS = """
    SELECT function, count(value), count(failure), total(value), group_concat(DISTINCT code_hash)
    FROM rollouts JOIN scores ON rollout = pk WHERE run = ? AND policy = ? GROUP BY function ORDER BY function
"""
_SHARED_ROWS = """
    SELECT count(*) FROM rows AS a JOIN rows AS b ON b.row_id = a.row_id WHERE a.run = ? AND b.run = ?
"""
_TRAJECTORY_CHUNK = 16  # a trajectory can be megabytes
_CHUNK = 500


class Queries:
    """Reads the run store.

    Every method raises StoreError when the file can't be read or a run doesn't exist.

    Args:
        path: The database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def list_runs(self, limit: int = 20) -> list[RunInfo]:
        """The latest runs, newest first."""
        with open_reader(self._path) as db:
            found = db.execute(_RUNS + "ORDER BY created_at DESC, pk DESC LIMIT ?", (limit,))
            return [_run_info(columns) for columns in found]

    def find_run(self, name: str) -> RunInfo:
        """The run with this id, the only one whose id begins so, or the newest one for `latest`."""
        if name == "latest":
            newest = self.list_runs(1)
            if not newest:
                raise StoreError(f"there is no run yet in {self._path}; `osmosis test` and `osmosis eval` make one")
            return newest[0]
        with open_reader(self._path) as db:
            found = db.execute(_RUNS + "WHERE id = ?", (name,)).fetchall()
            if not found and name:
                bounds = (name, name + "\U0010ffff")
                found = db.execute(_RUNS + "WHERE id >= ? AND id < ? ORDER BY id LIMIT 11", bounds).fetchall()
        if len(found) == 1:
            return _run_info(found[0])
        if found:
            ids = ", ".join(columns[0] for columns in found[:10]) + (", …" if len(found) > 10 else "")
            raise StoreError(f"several runs begin with {name!r}: {ids}; give more of the id")
        raise StoreError(f"there is no run {name!r} in {self._path}; `osmosis runs` lists those there are")

    def unfinished_runs(self, command: str) -> list[RunInfo]:
        """Runs of a command that didn't reach their end and that no process is working on, newest first."""
        query = _RUNS + "WHERE command = ? AND status <> 'finished' ORDER BY created_at DESC, pk DESC"
        with open_reader(self._path) as db:
            found = [_run_info(columns) for columns in db.execute(query, (command,))]
        return [run for run in found if not run.alive]

    def completed_keys(self, run_id: str) -> Completed:
        """Which rollouts are recorded."""
        completed = Completed(set(), set())
        query = "SELECT policy, row_id, run_index, failure_origin IS NOT NULL FROM rollouts WHERE run = ?"
        with open_reader(self._path) as db:
            for *columns, failed in db.execute(query, (self._pk(db, run_id),)):
                key = RolloutKey(*columns)
                completed.keys.add(key)
                if failed:
                    completed.failed.add(key)
        return completed

    def iter_rollouts(
        self, run_id: str, *, with_trajectory: bool = False, row: int | None = None
    ) -> Iterator[StoredRollout]:
        """Rollouts in the order of rows, run indices and policies.

        Args:
            run_id: The run.
            with_trajectory: Whether to read messages, turns, tool calls and samples too; else their lists are empty.
            row: Only this row index.
        """

        def decode(columns: Sequence[Any]) -> StoredRollout:
            data = columns[24] if with_trajectory else None
            return StoredRollout(decode_rollout(columns[1:18], data), *columns[18:24])

        if with_trajectory:
            return self._stream(_ROLLOUTS_WITH_TRAJECTORY, decode, run_id, _TRAJECTORY_CHUNK, row=row)
        return self._stream(_ROLLOUTS, decode, run_id, _CHUNK, row=row)

    def outcomes(self, run_id: str) -> Iterator[Outcome]:
        """Rollouts without their trajectories but with their scores, in the order of rows, run indices and policies.

        Args:
            run_id: The run.
        """
        found = self._stream(_OUTCOMES, tuple, run_id, _CHUNK)
        for _, group in groupby(found, key=lambda columns: columns[0]):
            # One line for each score of the rollout, a single one when it has none.
            first, *others = group
            scores = {c[19]: decode_score(c[19:25]) for c in (first, *others) if c[19] is not None}
            rollout = decode_rollout(first[1:18], None)
            yield Outcome(
                id=rollout.id,
                row_index=rollout.row_index,
                row_id=rollout.row_id,
                run_index=rollout.run_index,
                policy=rollout.policy,
                finish_reason=rollout.finish_reason,
                duration_ms=rollout.duration_ms,
                failure=rollout.failure,
                usage=rollout.usage,
                cost_usd=rollout.cost_usd,
                calls=decode_calls(first[18]),
                scores=scores,
            )

    def scored(
        self,
        run_id: str,
        *,
        with_trajectory: bool = False,
        row: int | None = None,
        run_index: int | None = None,
        failed: bool = False,
    ) -> Iterator[ScoredRollout]:
        """Rollouts with their rows and scores, in the order of rows, run indices and policies.

        Args:
            run_id: The run.
            with_trajectory: Whether to read messages, turns, tool calls and samples too; else their lists are empty.
            row: Only this row index.
            run_index: Only this run index.
            failed: Only rollouts that failed or have a score that could not be computed.
        """

        def decode(columns: Sequence[Any]) -> tuple[int, StoredRollout, Row]:
            rollout = decode_rollout(columns[1:18], columns[25])
            stored = StoredRollout(rollout, *columns[18:24])
            return columns[0], stored, decode_row(rollout.row_index, rollout.row_id, columns[24])

        query = _SCORED_WITH_TRAJECTORY if with_trajectory else _SCORED
        chunk = _TRAJECTORY_CHUNK if with_trajectory else _CHUNK
        found = self._stream(query, decode, run_id, chunk, row=row, run_index=run_index, failed=failed)
        with open_reader(self._path) as db:
            for pk, stored, its_row in found:
                scores = {columns[0]: decode_score(columns) for columns in db.execute(_SCORES_OF, (pk,))}
                yield ScoredRollout(stored, its_row, scores)

    def count_rollouts(
        self, run_id: str, *, row: int | None = None, run_index: int | None = None, failed: bool = False
    ) -> int:
        """How many rollouts `scored` gives; the arguments are the same."""
        with open_reader(self._path) as db:
            values = {"run": self._pk(db, run_id), "row": row, "run_index": run_index, "failed": failed}
            return int(db.execute(_COUNT, values).fetchone()[0])

    def row_span(self, run_id: str) -> tuple[int, int] | None:
        """The first and the last row index that has a rollout; None when there is none."""
        with open_reader(self._path) as db:
            query = "SELECT min(row_index), max(row_index) FROM rollouts WHERE run = ?"
            first, last = db.execute(query, (self._pk(db, run_id),)).fetchone()
        return None if first is None else (first, last)

    def row(self, run_id: str, row_id: str) -> Row:
        """A row that has a rollout in the run."""
        with open_reader(self._path) as db:
            query = "SELECT row_index, row_id, data FROM rows WHERE run = ? AND row_id = ?"
            found = db.execute(query, (self._pk(db, run_id), row_id)).fetchone()
            if found is None:
                raise StoreError(f"there is no row {row_id!r} in run {run_id}")
            return decode_row(*found)

    def shared_rows(self, run_a: str, run_b: str) -> SharedRows:
        """How many rows two runs have recorded in common."""
        with open_reader(self._path) as db:
            keys = self._pk(db, run_a), self._pk(db, run_b)
            counts = [db.execute("SELECT count(*) FROM rows WHERE run = ?", (key,)).fetchone()[0] for key in keys]
            (shared,) = db.execute(_SHARED_ROWS, keys).fetchone()
        return SharedRows(shared, counts[0] - shared, counts[1] - shared)

    def function_totals(self, run_id: str, policy: str = "policy") -> list[FunctionTotals]:
        """Every function's scores of one policy, added up. Looks at every score, but decodes none."""
        with open_reader(self._path) as db:
            key = (self._pk(db, run_id), policy)
            (rollouts,) = db.execute("SELECT count(*) FROM rollouts WHERE run = ? AND policy = ?", key).fetchone()
            return [
                FunctionTotals(function, rollouts, scored, errors, total / rollouts, code.split(",") if code else [])
                for function, scored, errors, total, code in db.execute(_FUNCTION_TOTALS, key)
            ]

    def iter_for_scoring(
        self, run_id: str, *, without: Mapping[str, str | None] | None = None
    ) -> Iterator[ScoringInput]:
        """Rollouts with their trajectories and rows, in the order of rows, run indices and policies.

        Args:
            run_id: The run.
            without: Functions, each with the hash of its code or None for any: only rollouts that lack a score by at
                least one of them.
        """

        def decode(columns: Sequence[Any]) -> ScoringInput:
            rollout = decode_rollout(columns[1:18], columns[18])
            row = decode_row(rollout.row_index, rollout.row_id, columns[19])
            return ScoringInput(rollout, row, json.loads(columns[20]))

        wanted = None if without is None else json.dumps(dict(without))
        return self._stream(_SCORING_INPUTS, decode, run_id, _TRAJECTORY_CHUNK, without=wanted)

    def scoring_keys(self, run_id: str, without: Mapping[str, str | None]) -> Iterator[ScoringKey]:
        """Rollouts that ended without failure and lack a score, in the order of rows, run indices and policies.

        Args:
            run_id: The run.
            without: Functions, each with the hash of its code or None for any: only rollouts that lack a score by at
                least one of them.
        """

        def decode(columns: Sequence[Any]) -> ScoringKey:
            return ScoringKey(columns[0], columns[2], json.loads(columns[6]))

        return self._stream(_SCORING_KEYS, decode, run_id, _CHUNK, without=json.dumps(dict(without)))

    def scoring_input(self, key: int) -> ScoringInput:
        """One rollout with its trajectory and row, by its key from `scoring_keys`."""
        with open_reader(self._path) as db:
            columns = db.execute(_SCORING_INPUT, (key,)).fetchone()
        if columns is None:
            raise StoreError(f"a rollout was removed from {self._path} meanwhile")
        rollout = decode_rollout(columns[1:18], columns[18])
        return ScoringInput(rollout, decode_row(rollout.row_index, rollout.row_id, columns[19]), [])

    def scores(self, run_id: str, function: str | None = None) -> Iterator[StoredScore]:
        """Scores in the order of rows, run indices, policies and function names.

        Args:
            run_id: The run.
            function: Only this function's.
        """

        def decode(columns: Sequence[Any]) -> StoredScore | None:
            if columns[6] is None:
                return None
            rollout_id, row_index, row_id, run_index, policy = columns[1:6]
            return StoredScore(
                rollout_id, row_index, row_id, run_index, policy, decode_score(columns[6:12]), code_hash=columns[12]
            )

        found = self._stream(_SCORES, decode, run_id, _CHUNK, function=function)
        return (score for score in found if score is not None)

    def functions(self, run_id: str) -> list[str]:
        """The functions that have scores in a run, by name. Looks at every score."""
        query = "SELECT DISTINCT function FROM rollouts JOIN scores ON rollout = pk WHERE run = ? ORDER BY function"
        with open_reader(self._path) as db:
            return [function for (function,) in db.execute(query, (self._pk(db, run_id),))]

    def paired_scores(
        self, run_a: str, run_b: str, function: str, *, policy_a: str = "policy", policy_b: str = "policy"
    ) -> Iterator[PairedRow]:
        """One function's scores on the rows that two runs share, in the order of the first run's rows.

        Args:
            run_a: A run.
            run_b: Another one, or the same with another policy.
            function: The function.
            policy_a: Whose rollouts of the first run.
            policy_b: Whose rollouts of the second run.
        """

        def decode(columns: Sequence[Any]) -> tuple[int, str, str, float | None]:
            return columns[2], columns[3], columns[5], columns[7]

        with open_reader(self._path) as db:
            other = {"run": self._pk(db, run_b), "function": function, "policy": policy_b}
            found = self._stream(_SCORES, decode, run_a, _CHUNK, function=function)
            for (row_index, row_id), group in groupby(found, key=lambda score: score[:2]):
                a = [value for _, _, policy, value in group if policy == policy_a]
                b = [value for (value,) in db.execute(_ROW_VALUES, {**other, "row_id": row_id})]
                if a and b:
                    yield PairedRow(row_index, row_id, a, b)

    def _stream(
        self,
        query: str,
        decode: Callable[[Sequence[Any]], T],
        run_id: str,
        chunk: int,
        row: int | None = None,
        **parameters: str | int | None,
    ) -> Iterator[T]:
        with open_reader(self._path) as db:
            bounds = {"run": self._pk(db, run_id), "last": _LAST if row is None else row, "limit": chunk}
            after = {"row": 0 if row is None else row, "index": -1, "policy": "", "pk": 0}
            while page := db.execute(query, {**bounds, **after, **parameters}).fetchall():
                for columns in page:
                    yield decode(columns)
                pk, _, row_index, _, run_index, policy = page[-1][:6]
                after = {"row": row_index, "index": run_index, "policy": policy, "pk": pk}

    def _pk(self, db: sqlite3.Connection, run_id: str) -> int:
        found = db.execute("SELECT pk FROM runs WHERE id = ?", (run_id,)).fetchone()
        if found is None:
            raise StoreError(f"there is no run {run_id!r} in {self._path}; `osmosis runs` lists those there are")
        return int(found[0])


_LAST = 2**63 - 1


def _run_info(columns: Sequence[Any]) -> RunInfo:
    run_id, command, status, created_at, finished_at, identity, config, summary, rollouts, failed, pid, started = (
        columns
    )
    return RunInfo(
        id=run_id,
        command=command,
        status=status,
        created_at=created_at,
        finished_at=finished_at,
        identity=decode_object(identity),
        config=decode_object(config),
        summary=None if summary is None else decode_object(summary),
        rollouts=rollouts,
        failed=failed,
        alive=status == "running" and process_alive(pid, started),
    )
