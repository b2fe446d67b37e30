"""What a run tells while it goes on, each a frozen record: the events that `async for event in run` gives."""

from __future__ import annotations

from typing import Literal, TypeAlias

from osmosis_ai.records import Message, Record, Rollout, Score, Tool, ToolCall, Turn


class Notice(Record, frozen=True):
    """Something a user should know: a stand-in that is no model, a function that can't be loaded."""

    message: str
    severity: Literal["info", "warning"] = "info"


class DatasetProgress(Record, frozen=True):
    """The dataset is being checked: bytes read so far, and in total."""

    read: int
    total: int


class RunLoaded(Record, frozen=True):
    """Workers have loaded the repository, and every row is checked.

    Attributes:
        models: The model, and the baseline's if one is compared.
        dataset: The dataset's file.
        total_rows: Rows to run.
        attempts: Attempts per row.
        tools: The tools the model sees.
        functions: The functions that score.
        agent: The repository's own agent loop, as it was asked for and by its own name; None for the built-in one.
    """

    models: list[str]
    dataset: str
    total_rows: int
    attempts: int
    tools: list[Tool]
    functions: list[str]
    agent: tuple[str, str] | None = None


class RunStarted(Record, frozen=True):
    """The run has its record in the store. `recorded` counts the rollouts that an earlier time has left in it."""

    run_id: str
    total_rollouts: int
    recorded: int | None = None


class RolloutStarted(Record, frozen=True):
    """A worker gets a rollout."""

    rollout_id: str
    row_index: int
    run_index: int
    policy: str


class TurnDone(Record, frozen=True):
    """The model replied; the tool calls in `message` start now."""

    rollout_id: str
    turn: Turn
    message: Message


class ToolCallDone(Record, frozen=True):
    """A tool call ended; `message` is its result for the model."""

    rollout_id: str
    call: ToolCall
    message: Message


class RolloutDone(Record, frozen=True):
    """A rollout is recorded, whether or not it failed."""

    rollout: Rollout


class RolloutScored(Record, frozen=True):
    """A rollout's scores are recorded; none when it could not be scored."""

    row_index: int
    run_index: int
    policy: str
    scores: list[Score]


class LimitReached(Record, frozen=True):
    """A bound of the whole run ends it before its last rollout."""

    limit: Literal["max_cost"]
    message: str


RunEvent: TypeAlias = (
    Notice
    | DatasetProgress
    | RunLoaded
    | RunStarted
    | RolloutStarted
    | TurnDone
    | ToolCallDone
    | RolloutDone
    | RolloutScored
    | LimitReached
)
