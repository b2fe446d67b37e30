"""The messages between the server and a job's process: JSON objects, one per line.

A training job passes its frozen inputs on to the trainer, as a `TrainingOrder`.
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
    """Everything that a job needs, sent through a pipe because it holds the values of secrets.

    `secrets` come from the vault and from the submission; `variables` are the environment variables that the operator
    allows jobs. `commit` is set once an earlier process of this job has resolved it, and from the start for a training
    run. `trainer` is the command that starts a training run's trainer. `workers` are the operator's options
    for where evaluations run.
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
    workers: JsonObject = {}


class TrainingOrder(Record, frozen=True, omit_defaults=False):
    """The trainer's input: a training run as it was submitted.

    `code` is the workspace's folder at `commit`. `output` is the trainer's own folder, which survives a restart of the
    run. `store` is the run store of the workspace, which the platform's pages show. The trainer's environment has the
    variables of `env` and the values of `secrets`.
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
    """The first rollout starts; `rows` are the rows of the run."""

    row_numbers: str | None


class Results(Record, frozen=True, tag="results"):
    """The results so far."""

    results: JsonObject


class Ended(Record, frozen=True, tag="ended"):
    """The run has ended."""

    status: Literal["finished", "failed", "stopped"]


JobMessage: TypeAlias = Logged | Resolved | Started | Results | Ended

decode_message = msgspec.json.Decoder(JobMessage).decode
