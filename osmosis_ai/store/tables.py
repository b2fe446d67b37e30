"""The run store's tables, each declared once: a struct whose fields are its columns, by name and type.

INSERT and SELECT are made from a struct, and a record read is one, so a column is added here, in the codec that fills
and reads it, and as a migration in `schema`. A test compares these structs with what the migrations make.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from osmosis_ai.records import FailureKind, FinishReason, Origin

RunStatus: TypeAlias = Literal["running", "finished", "interrupted", "failed"]


class Columns(msgspec.Struct):
    """A record of the table `table`. A field's type is the column's."""

    table: ClassVar[str]


class RunColumns(Columns):
    """A run. `identity`, `config` and `summary` are JSON objects; the owner is the process that writes the run."""

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
    """The columns that identify a rollout and give it its place in the run's order."""

    table: ClassVar[str] = "rollouts"

    pk: int
    id: str
    row_index: int
    row_id: str
    run_index: int
    policy: str


class RolloutColumns(PlaceColumns):
    """A rollout without its trajectory.

    `failure_origin` is NULL when it didn't fail. `requests` counts model requests, retries included; `attempt` is 2
    when this record replaced a first one. `calls` is a JSON list: name, milliseconds and error of each tool call.
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
    """What lists and statistics never read of a rollout. `data` is packed JSON."""

    table: ClassVar[str] = "trajectories"

    rollout: int
    data: bytes


class ScoreColumns(Columns):
    """A score. `failure` is a JSON object, `judge_calls` a JSON list or NULL when no judge was asked."""

    table: ClassVar[str] = "scores"

    rollout: int
    function: str
    value: float | None
    failure: str | None
    duration_ms: float
    explanation: str | None
    judge_calls: str | None
    code_hash: str | None


def insert(kind: type[Columns], verb: str = "INSERT", conflict: str = "") -> str:
    """The statement that inserts one record; its values are `msgspec.structs.astuple(record)`.

    A `pk` of 0 stands for the next free one. The verb is `INSERT` or `INSERT OR REPLACE`.
    """
    names = kind.__struct_fields__
    values = ", ".join("nullif(?, 0)" if name == "pk" else "?" for name in names)
    return f"{verb} INTO {kind.table} ({', '.join(names)}) VALUES ({values}) {conflict}"


def select(kind: type[Columns], **elsewhere: str) -> str:
    """The expressions to SELECT, from which `kind(*columns)` makes the struct.

    `elsewhere` has the expressions of fields that aren't columns of the struct's table.
    """
    return ", ".join(elsewhere.get(name) or f"{kind.table}.{name}" for name in kind.__struct_fields__)
