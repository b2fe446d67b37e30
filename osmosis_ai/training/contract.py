"""The messages between the runtime and a trainer: a job file, then JSON over HTTP. See docs/training-protocol.md."""

from __future__ import annotations

from typing import Literal

from osmosis_ai.records import JsonObject, Record

__all__ = [
    "TOKEN_VARIABLE",
    "Batch",
    "BatchRequest",
    "Checkpoint",
    "Evaluation",
    "EvaluationRequest",
    "Group",
    "Mode",
    "Ready",
    "Sample",
    "StepMetrics",
    "TrainerJob",
]

TOKEN_VARIABLE = "OSMOSIS_TRAINER_TOKEN"  # noqa: S105 - the name of the variable that holds it
"""Holds the bearer token for all requests, in both directions."""

Mode = Literal["train", "serve"]


class TrainerJob(Record, frozen=True, omit_defaults=False):
    """The JSON file that a trainer is started with.

    In `serve` mode the trainer trains nothing: it serves `model` as it is until it is stopped.
    """

    name: str
    runtime_url: str
    policy_port: int
    """The loopback port to serve the policy on. A resumed run keeps it, because the URL is part of a run's identity."""
    model: str
    output: str
    rows: list[int]
    training: JsonObject
    sampling: JsonObject
    checkpoints: JsonObject
    advanced: JsonObject
    resume_from: str | None = None
    seed: int = 0
    mode: Mode = "train"
    schema_version: int = 1


class BatchRequest(Record, frozen=True):
    """`POST /v1/batches`: roll out these rows with the current policy."""

    step: int
    rows: list[int]
    samples: int
    policy_url: str


class Sample(Record, frozen=True, omit_defaults=False):
    """One rollout, in the form that a trainer learns from. `reward` is None if it must be skipped: see `left_out`."""

    rollout_id: str
    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """1 for each completion token that the policy sampled, 0 for tokens of tool results and the chat template."""
    logprobs: list[float] | None
    reward: float | None
    left_out: str | None = None


class Group(Record, frozen=True):
    """All samples of one row."""

    row: int
    samples: list[Sample]


class Batch(Record, frozen=True):
    """The answer to a `BatchRequest`: a group per row, in the order of the request."""

    step: int
    groups: list[Group]
    metrics: dict[str, float]


class EvaluationRequest(Record, frozen=True):
    """`POST /v1/evaluations`: roll out the held-out rows."""

    step: int
    policy_url: str


class Evaluation(Record, frozen=True, omit_defaults=False):
    """The answer to an `EvaluationRequest`; `reward` is None if no rows are held out, or none got a score."""

    step: int
    reward: float | None
    metrics: dict[str, float]


class StepMetrics(Record, frozen=True):
    """`POST /v1/metrics`: the trainer's own measurements of a step."""

    step: int
    metrics: dict[str, float]


class Checkpoint(Record, frozen=True):
    """`POST /v1/checkpoints`: a checkpoint, either a LoRA adapter or full weights, is complete on disk."""

    step: int
    path: str
    kind: Literal["lora", "full"]


class Ready(Record, frozen=True):
    """`POST /v1/ready`: in `serve` mode, the policy now answers requests."""

    policy_url: str
