"""Serve an untrained model through a trainer in `serve` mode."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NoReturn

import anyio

from osmosis_ai.errors import OsmosisError, UsageError
from osmosis_ai.rollout.server.serve import address_of, open_socket
from osmosis_ai.tasks import task_group
from osmosis_ai.training.config import TrainingConfig
from osmosis_ai.training.contract import Ready
from osmosis_ai.training.record import TrainingRecord, TrainingState
from osmosis_ai.training.server import Answers, serve_trainer
from osmosis_ai.training.session import TrainingError
from osmosis_ai.training.trainer import Trainer, last_words, start_trainer, write_job

__all__ = ["served_policy"]


@asynccontextmanager
async def served_policy(
    config: TrainingConfig, state: TrainingState, record: TrainingRecord, trainer: Trainer, environ: Mapping[str, str]
) -> AsyncIterator[tuple[str, str]]:
    """Serve the model during the block, and yield the policy's URL and token.

    Raises:
        TrainingError: The trainer ended before it served the model.
    """
    token = secrets.token_urlsafe(32)
    ready = anyio.Event()
    url = ""
    failure: OsmosisError | None = None

    async def is_ready(given: Ready) -> None:
        nonlocal url
        url = given.policy_url
        ready.set()

    record.create()
    with open_socket("127.0.0.1", 0) as listener:
        write_job(config, state, record, address_of(listener), "serve")
        answers = Answers(_refuse, _refuse, _refuse, _refuse, is_ready)
        async with (
            serve_trainer(answers, token, listener),
            start_trainer(trainer, record.job, token, environ) as running,
            task_group() as group,
        ):

            async def follow() -> None:
                nonlocal failure
                last = await last_words(running, record, token, environ)
                failure = TrainingError(f"the trainer ended before it served the model; its last lines:\n{last}")
                ready.set()

            group.start_soon(follow)
            await ready.wait()
            if failure is not None:
                raise failure
            yield url, token
            group.cancel_scope.cancel()
    # The record only held the job and the log: nothing was trained, so no training run should be listed.
    shutil.rmtree(record.folder, ignore_errors=True)


async def _refuse(_: object) -> NoReturn:
    raise UsageError("this trainer was started in serve mode; it can't train")
