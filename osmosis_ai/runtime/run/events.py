"""The events of a run, each a frozen record, as yielded by `async for event in run`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from osmosis_ai.records import Message, Record, Rollout, Score, Tool, ToolCall, Turn


class Notice(Record, frozen=True):
    """A message for the user, for example about an offline stand-in or a function that was left out."""

    message: str
    severity: Literal["info", "warning"] = "info"


class DatasetProgress(Record, frozen=True):
    """Progress of the dataset's check: bytes read so far, and in total."""

    read: int
    total: int


class Waiting(Record, frozen=True):
    """The run is waiting for something before its first rollout, such as `loading tools from mcp/main.py`."""

    what: str


class RunLoaded(Record, frozen=True):
    """Workers have loaded the repository, and every row has passed its check.

    Attributes:
        models: Name of the model, then of the baseline model, if any.
        dataset: Path of the dataset.
        total_rows: Rows to run.
        attempts: Attempts per row.
        tools: The tools that the model sees.
        functions: Names of the scoring functions.
        agent: The repository's own agent loop, as named by the config and by itself; None for the built-in one.
        workflow: True if the agent is the workflow of a rollout server, which a grader rewards.
        shard: The shard of the rows that the run is, as in 2/4; None for all.
    """

    models: list[str]
    dataset: str
    total_rows: int
    attempts: int
    tools: list[Tool]
    functions: list[str]
    agent: tuple[str, str] | None = None
    workflow: bool = False
    shard: str | None = None


class RunStarted(Record, frozen=True):
    """The run has a record in the store. If resumed, `recorded` counts its existing rollouts."""

    run_id: str
    total_rollouts: int
    recorded: int | None = None


class RolloutStarted(Record, frozen=True):
    """A rollout starts in a worker."""

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
    """A rollout, failed or not, is recorded."""

    rollout: Rollout


class RolloutScored(Record, frozen=True):
    """A rollout's scores are recorded; `scores` is empty if it could not be scored."""

    row_index: int
    run_index: int
    policy: str
    scores: list[Score]


class LimitReached(Record, frozen=True):
    """A limit of the whole run ended it before its last rollout."""

    limit: Literal["max_cost"]
    message: str


RunEvent: TypeAlias = (
    Notice
    | DatasetProgress
    | Waiting
    | RunLoaded
    | RunStarted
    | RolloutStarted
    | TurnDone
    | ToolCallDone
    | RolloutDone
    | RolloutScored
    | LimitReached
)
