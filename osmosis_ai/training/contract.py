"""What the runtime and a trainer tell each other: a job, and JSON over HTTP. See docs/training-protocol.md."""

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
"""The bearer token of all requests, in both directions."""

Mode = Literal["train", "serve"]


class TrainerJob(Record, frozen=True, omit_defaults=False):
    """What a trainer is started with, as a JSON file.

    With the mode `serve`, it serves the policy of `model` and trains nothing, until it is ended.
    """

    name: str
    runtime_url: str
    policy_port: int
    """The port on loopback to serve the policy at; the same one when the run is resumed."""
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
    """`POST /v1/batches`: roll out these rows with the policy as it is now."""

    step: int
    rows: list[int]
    samples: int
    policy_url: str


class Sample(Record, frozen=True, omit_defaults=False):
    """One rollout as a trainer learns from it. Without a reward it isn't learned from, and `left_out` says why."""

    rollout_id: str
    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """1 for each token of the completion that the policy sampled, 0 for those of tool results and the template."""
    logprobs: list[float] | None
    reward: float | None
    left_out: str | None = None


class Group(Record, frozen=True):
    """The samples of a row."""

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
    """The answer to an `EvaluationRequest`; no reward if no row is held out, or none was scored."""

    step: int
    reward: float | None
    metrics: dict[str, float]


class StepMetrics(Record, frozen=True):
    """`POST /v1/metrics`: what the trainer measured in a step."""

    step: int
    metrics: dict[str, float]


class Checkpoint(Record, frozen=True):
    """`POST /v1/checkpoints`: a checkpoint is on disk, a LoRA adapter or the full weights."""

    step: int
    path: str
    kind: Literal["lora", "full"]


class Ready(Record, frozen=True):
    """`POST /v1/ready`: the policy is served, in the mode `serve`."""

    policy_url: str
