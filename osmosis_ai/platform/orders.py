"""What the server tells a job's process, and what that tells the server: JSON objects, one per line.

A training run's job hands its frozen inputs on to the trainer, as a `TrainingOrder`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from osmosis_ai.records import JsonObject, Record

__all__ = [
    "Ended",
    "JobMessage",
    "JobOrder",
    "Logged",
    "Resolved",
    "Results",
    "Started",
    "Step",
    "TrainingOrder",
    "decode_message",
]

Step: TypeAlias = Literal[
    "submit", "clone", "secrets", "select", "environment", "preflight", "rollout", "train", "stop", "finish"
]


class JobOrder(Record, frozen=True):
    """Everything that a job needs. It comes through a pipe, because it holds the secrets' values.

    `secrets` are those from the vault and those provided for this run; `variables` are the environment that the
    operator lets jobs have. `commit` is known once an earlier process of this job has resolved it, and from the start
    for a training run. `trainer` is the command of a training run's trainer.
    """

    run_id: str
    name: str
    document: JsonObject
    folder: str
    repository: str
    store: str
    dataset: str
    dataset_sha256: str
    dataset_rows: int
    row_numbers: str | None
    retry_failed: bool
    seed: int
    sources: list[str]
    commit: str | None
    variables: dict[str, str]
    secrets: dict[str, str]
    scopes: dict[str, str]
    trainer: str | None = None


class TrainingOrder(Record, frozen=True, omit_defaults=False):
    """What the trainer is given: a training run's inputs, as they were when it was submitted.

    `code` is the workspace at `commit`. `output` is the trainer's own folder; it stays when the run is started again.
    `store` is the folder of the workspace's runs, which the platform's pages show.
    The environment has `env` and the values of `secrets`.
    """

    schema_version: int
    run_id: str
    name: str
    model: str
    code: str
    commit: str
    rollout: str
    entrypoint: str
    dataset: str
    dataset_sha256: str
    dataset_rows: int
    training: JsonObject
    sampling: JsonObject
    checkpoints: JsonObject
    advanced: JsonObject
    env: dict[str, str]
    secrets: list[str]
    output: str
    store: str


class Logged(Record, frozen=True, tag="log"):
    """An entry for the run's log."""

    step: Step
    message: str
    level: Literal["INFO", "WARNING", "ERROR"] = "INFO"
    details: JsonObject | None = None


class Resolved(Record, frozen=True, tag="resolved"):
    """The run's code is at this commit."""

    commit: str


class Started(Record, frozen=True, tag="started"):
    """The first rollout starts; these rows are run."""

    row_numbers: str | None


class Results(Record, frozen=True, tag="results"):
    """The results so far."""

    results: JsonObject


class Ended(Record, frozen=True, tag="ended"):
    """The run has ended."""

    status: Literal["finished", "failed", "stopped"]


JobMessage: TypeAlias = Logged | Resolved | Started | Results | Ended

decode_message = msgspec.json.Decoder(JobMessage).decode
