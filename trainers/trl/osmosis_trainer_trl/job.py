"""Read the job that the runtime writes, and order its rows for training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from osmosis_trainer_trl.errors import JobError

Count = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=0, lt=2**32)]


class Training(msgspec.Struct, frozen=True, kw_only=True):
    lr: Annotated[float, Meta(gt=0)]
    total_epochs: Count
    n_samples_per_prompt: Annotated[int, Meta(ge=2)]  # an advantage is relative to the other samples of the row
    rollout_batch_size: Count
    max_response_length: Count


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    temperature: Annotated[float, Meta(gt=0)]
    top_p: Annotated[float, Meta(gt=0, le=1)]


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint_save_freq: Count | None = None
    eval_interval: Count | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: Literal[1]
    name: str
    runtime_url: str
    model: Path
    output: Path
    resume_from: Path | None
    rows: list[int]
    seed: Seed
    training: Training
    sampling: Sampling
    checkpoints: Checkpoints
    advanced: dict[str, Any]
    mode: Literal["train", "serve"] = "train"
    policy_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # 0: any free port

    @property
    def steps_per_epoch(self) -> int:
        return len(self.rows) // self.training.rollout_batch_size

    @property
    def steps(self) -> int:
        return self.training.total_epochs * self.steps_per_epoch


def read_job(path: Path) -> Job:
    """Read a job file; a `seed` in `[advanced]` overrides the job's.

    Raises JobError if the file isn't a job, or its rows don't fill one batch.
    """
    try:
        job = msgspec.json.decode(path.read_bytes(), type=Job, dec_hook=lambda kind, text: kind(text))
        seed = msgspec.convert(job.advanced.pop("seed", job.seed), Seed)
    except (OSError, msgspec.MsgspecError) as error:
        raise JobError(f"{path} is not a training job: {error}") from error
    job = msgspec.structs.replace(job, seed=seed)
    if len(set(job.rows)) < len(job.rows):
        raise JobError(f"{path}: rows lists a row twice")
    if job.mode == "train" and len(job.rows) < job.training.rollout_batch_size:
        raise JobError(
            f"{len(job.rows)} rows don't fill a batch of rollout_batch_size {job.training.rollout_batch_size}: "
            "lower it, or train on more rows"
        )
    return job


def row_order(job: Job, *, shuffled: bool) -> list[int]:
    """Return the rows of all batches in order: each epoch visits each row once, except those that don't fill a batch.

    The order depends on the seed and the epoch only; TRL's own sampler would reshuffle when a run is resumed.
    """
    size = job.training.rollout_batch_size
    order: list[int] = []
    for epoch in range(job.training.total_epochs):
        rows = job.rows.copy()
        if shuffled:
            random.Random(f"{job.seed}/{epoch}").shuffle(rows)  # noqa: S311 - an order, not a secret
        order += rows[: len(rows) - len(rows) % size]
    return order
