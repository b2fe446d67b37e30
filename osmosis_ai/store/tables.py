"""The run store's tables, each declared once as a struct. Its fields are the columns, by name and type.

INSERT and SELECT statements are derived from a struct, and queries return it. To add a column, add it here, to the
codec, and as a migration in `schema`. A test compares these structs with the migrated tables.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from osmosis_ai.records import FailureKind, FinishReason, Origin

RunStatus: TypeAlias = Literal["running", "finished", "interrupted", "failed"]


class Columns(msgspec.Struct):
    """A record of `table`. Each field's type is its column's."""

    table: ClassVar[str]


class RunColumns(Columns):
    """A run. `identity`, `config` and `summary` are JSON objects.

    `owner_pid` is the process that writes the run, or wrote it last, for messages: see `owners`. `owner_started` had a
    meaning in schema 1.
    """

    table: ClassVar[str] = "runs"

    pk: int
    id: str
    status: RunStatus
    created_at: float
    finished_at: float | None
    command: str
    identity: str
    config: str
    summary: str | None
    owner_pid: int | None
    owner_started: float | None
    rollouts: int
    failed: int


class RowColumns(Columns):
    """A dataset row of a run. `data` is packed JSON."""

    table: ClassVar[str] = "rows"

    run: int
    row_id: str
    row_index: int
    data: bytes


class PlaceColumns(Columns):
    """The columns that identify a rollout and its position in the run."""

    table: ClassVar[str] = "rollouts"

    pk: int
    id: str
    row_index: int
    row_id: str
    run_index: int
    policy: str


class RolloutColumns(PlaceColumns):
    """A rollout without its trajectory.

    `failure_origin` is NULL if the rollout didn't fail. `requests` counts model requests, retries included; `attempt`
    is 2 if this record replaced a first one. `calls` is a JSON list: name, milliseconds and error of each tool call,
    and the failure of one that failed.
    """

    run: int
    finish_reason: FinishReason
    duration_ms: float
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cost_usd: float | None
    turns: int
    tool_calls: int
    requests: int
    attempt: int
    started_at: float
    finished_at: float
    calls: str
    failure_origin: Origin | None
    failure_kind: FailureKind | Literal[""] | None
    failure_message: str | None
    failure_file: str | None
    failure_line: int | None
    failure_detail: str | None


class TrajectoryColumns(Columns):
    """The part of a rollout that lists and statistics never read. `data` is packed JSON."""

    table: ClassVar[str] = "trajectories"

    rollout: int
    data: bytes


class ScoreColumns(Columns):
    """A score. `failure` is a JSON object; `judge_calls` is a JSON list, or NULL if no judge was called."""

    table: ClassVar[str] = "scores"

    rollout: int
    function: str
    value: float | None
    failure: str | None
    duration_ms: float
    explanation: str | None
    judge_calls: str | None
    code_hash: str | None


class JudgePromptColumns(Columns):
    """The requests to a score's judges, in a table apart from `scores`, which lists read. `data` is packed JSON."""

    table: ClassVar[str] = "judge_prompts"

    rollout: int
    function: str
    data: bytes


class VerdictColumns(Columns):
    """A person's verdict on a rollout."""

    table: ClassVar[str] = "verdicts"

    rollout: int
    value: Literal[0, 1]
    note: str | None


def insert(kind: type[Columns], verb: str = "INSERT", conflict: str = "") -> str:
    """Return the statement that inserts one record; its values are `msgspec.structs.astuple(record)`.

    A `pk` of 0 stands for the next free key. `verb` is `INSERT` or `INSERT OR REPLACE`.
    """
    names = kind.__struct_fields__
    values = ", ".join("nullif(?, 0)" if name == "pk" else "?" for name in names)
    return f"{verb} INTO {kind.table} ({', '.join(names)}) VALUES ({values}) {conflict}"


def select(kind: type[Columns], **elsewhere: str) -> str:
    """Return the expressions to SELECT; `kind(*columns)` makes the struct from a result.

    `elsewhere` maps fields that aren't columns of the struct's table to their expressions.
    """
    return ", ".join(elsewhere.get(name) or f"{kind.table}.{name}" for name in kind.__struct_fields__)
