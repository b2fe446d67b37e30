"""Run a training run in the foreground: start the trainer, answer its requests, record what both sides report."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import msgspec

from osmosis_ai.config import StoreConfig, read_run_name
from osmosis_ai.errors import OsmosisError, UsageError
from osmosis_ai.records import JsonObject
from osmosis_ai.rollout.server.serve import address_of, open_socket
from osmosis_ai.runtime.run.prepare import find_store
from osmosis_ai.training.config import TrainingConfig
from osmosis_ai.training.contract import (
    Batch,
    BatchRequest,
    Checkpoint,
    Evaluation,
    EvaluationRequest,
    Ready,
    StepMetrics,
)
from osmosis_ai.training.record import MetricsLine, SavedCheckpoint, TrainingRecord, TrainingState, now, step_run
from osmosis_ai.training.rollouts import StepRunner
from osmosis_ai.training.rows import Rows
from osmosis_ai.training.server import Answers, serve_trainer
from osmosis_ai.training.trainer import Running, Trainer, last_words, start_trainer, write_job

__all__ = ["Listener", "TrainingError", "TrainingSession", "find_record", "new_state", "resumed_state"]

Given = TypeVar("Given", Batch, Evaluation)


class TrainingError(OsmosisError):
    """The trainer failed; the message ends with its last lines."""


class Listener(Protocol):
    """Receives the events of a training run."""

    def said(self, message: str) -> None:
        """Receive a notice for the user."""
        ...

    def measured(self, line: MetricsLine, state: TrainingState) -> None:
        """Receive metrics of a step, once they are recorded."""
        ...

    def saved(self, checkpoint: Checkpoint) -> None:
        """Receive a checkpoint, once it is on disk and recorded."""
        ...

    def printed(self, line: str) -> None:
        """Receive a line that the trainer printed."""
        ...


class TrainingSession:
    """A training run.

    Args:
        config: The training config.
        record: The folder to record the run in.
        state: The initial state, from `new_state` or `resumed_state`.
        environ: The environment of the workers and the trainer.
        store: The store's folder.
        listener: Receives the run's events.
        resumed: True if `state` is that of an interrupted run.
    """

    def __init__(
        self,
        config: TrainingConfig,
        record: TrainingRecord,
        state: TrainingState,
        environ: Mapping[str, str],
        store: str,
        listener: Listener,
        *,
        resumed: bool,
    ) -> None:
        self.state = state
        self._config = config
        self._record = record
        self._environ = environ
        self._listener = listener
        self._token = secrets.token_urlsafe(32)
        self._runner = StepRunner(
            config, record.name, store, environ, state.held_out, self._token, reusable=resumed, say=listener.said
        )
        self._running: Running | None = None
        self._stopping = False
        self._failure: OsmosisError | None = None
        # One batch at a time: a trainer that lost an answer and asks again must not start a second run of the step.
        self._busy = anyio.Lock()

    async def run(self, trainer: Trainer) -> TrainingState:
        """Train to the last step, and return the final state.

        Raises:
            TrainingError: The trainer failed.
            OsmosisError: A step's rollouts couldn't be run, or the record can't be written.
        """
        self._write(status="running", error=None, finished_at=None)
        try:
            await self._train(trainer)
        except OsmosisError as error:
            self._write(status="interrupted" if self._stopping else "failed", error=str(error), finished_at=now())
            raise
        # Cancelled, as by Ctrl-C: it can be resumed.
        except BaseException:
            self._write(status="interrupted", finished_at=now())
            raise
        self._write(status="interrupted" if self._stopping else "finished", finished_at=now())
        return self.state

    def stop(self) -> None:
        """Stop the trainer; the run can be resumed from its last checkpoint."""
        self._stopping = True
        if self._running is not None:
            self._running.stop()

    async def _train(self, trainer: Trainer) -> None:
        answers = Answers(self._batch, self._evaluation, self._metrics, self._checkpoint, self._ready)
        with open_socket("127.0.0.1", 0) as listener:
            write_job(self._config, self.state, self._record, address_of(listener))
            async with (
                serve_trainer(answers, self._token, listener),
                start_trainer(trainer, self._record.job, self._token, self._environ) as self._running,
            ):
                # `stop` may have been called before there was a process to stop.
                if self._stopping:
                    self._running.stop()
                # Read to its end before waiting for the process, which a full pipe would block.
                last = await last_words(self._running, self._record, self._token, self._environ, self._listener.printed)
                status = await self._running.wait()
        if self._failure is not None:
            raise self._failure
        # A trainer that was told to stop may end with any status.
        if status and not self._stopping:
            raise TrainingError(
                f"the trainer ended with status {status}; its last lines:\n{last}\nFull log: {self._record.log}"
            )

    async def _batch(self, request: BatchRequest) -> Batch:
        batch = await self._rolled_out(self._runner.batch(request))
        self._write(step=request.step, reward=batch.metrics["reward"])
        self._measured(request.step, "rollouts", batch.metrics)
        return batch

    async def _evaluation(self, request: EvaluationRequest) -> Evaluation:
        found = await self._rolled_out(self._runner.evaluation(request))
        if found.metrics:
            scored = {} if found.reward is None else {"reward": found.reward}
            self._measured(request.step, "evaluation", {**scored, **found.metrics})
        return found

    async def _rolled_out(self, rollouts: Awaitable[Given]) -> Given:
        async with self._busy:
            try:
                return await rollouts
            except OsmosisError as error:
                # The trainer will exit with this message, but the failure is the runtime's: report it as such.
                self._failure = error
                raise

    async def _metrics(self, given: StepMetrics) -> None:
        self._measured(given.step, "trainer", given.metrics)

    async def _checkpoint(self, given: Checkpoint) -> None:
        if not self._record.holds(given):
            raise UsageError(f"the checkpoint {given.path} is outside {self._record.checkpoints}")
        # A resumed run repeats steps, so it replaces their checkpoints.
        others = [each for each in self.state.checkpoints if each.step < given.step]
        self._write(checkpoints=[*others, SavedCheckpoint(given.step, given.path, given.kind, now())])
        self._listener.saved(given)

    async def _ready(self, given: Ready) -> None:
        raise UsageError("this trainer was started in train mode; it can't just serve")

    def _measured(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        line = MetricsLine(step, kind, dict(metrics), now())  # type: ignore[arg-type]
        self._record.add(line)
        self._listener.measured(line, self.state)

    def _write(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        self._record.write(self.state)


def new_state(config: TrainingConfig, name: str, rows: Rows) -> TrainingState:
    """Return the state of a new training run; raise UsageError if the rows don't fill one step."""
    # As in the trainer, an epoch leaves out the rest that doesn't fill a batch.
    steps = len(rows.trained) // config.batch_rows * int(config.training["total_epochs"])
    if steps == 0:
        raise UsageError(
            f"{config.path}: rollout_batch_size is {config.batch_rows}, but there are only {len(rows.trained)} rows to "
            "train on; lower it"
        )
    return TrainingState(
        name=name,
        config=config.path,
        model=config.model,
        dataset=config.dataset,
        trainer=config.trainer,
        status="running",
        created_at=now(),
        policy_port=_free_port(),
        total_steps=steps,
        rows=rows.trained,
        held_out=rows.held_out,
        left_out=rows.left_out,
        options=_options_of(config),
        rollouts_per_step=config.batch_rows * config.samples,
    )


def resumed_state(config: TrainingConfig, record: TrainingRecord) -> TrainingState:
    """Return the state of a training run to resume; raise UsageError if the config has changed."""
    state = record.read()
    changed = sorted(
        name for name, value in _options_of(config).items() if msgspec.to_builtins(value) != state.options.get(name)
    )
    if changed:
        raise UsageError(
            f"{record.name} can't be resumed: {', '.join(changed)} changed in {config.path}. Change it back, or start "
            "a run under another name"
        )
    if state.status == "finished":
        raise UsageError(f"{record.name} has finished; start a run under another name")
    return state


def _options_of(config: TrainingConfig) -> JsonObject:
    """Return the settings that must not change between a training run and its resumption."""
    # Free to change: where the workspace is, and limits that don't alter the objective.
    free = ("path", "root", "timeouts", "in_flight", "save_frequency")
    known: JsonObject = msgspec.to_builtins(config)
    # By content, because the rows of the state are numbers in this very dataset.
    dataset = blake2b(Path(config.dataset).read_bytes(), digest_size=16).hexdigest()
    return {**{name: value for name, value in known.items() if name not in free}, "dataset": dataset}


def find_record(config: TrainingConfig, store: str | None, name: str, cwd: Path) -> tuple[TrainingRecord, str]:
    """Return a training run's record and its store's folder; raise UsageError if the name is unusable."""
    try:
        # The steps' runs have longer names, which must be valid too.
        read_run_name(step_run(name, 0))
    except ValueError as error:
        raise UsageError(
            f"a training run can't be named {name!r}: {error}; leave 11 of them for the steps' suffixes"
        ) from None
    folder = find_store(StoreConfig(store), Path(config.root), cwd)
    return TrainingRecord(folder, name), str(folder)


def _free_port() -> int:
    """Return a loopback port that is free now.

    It is fixed before the trainer starts, because a resumed run must serve the policy at the same URL.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
