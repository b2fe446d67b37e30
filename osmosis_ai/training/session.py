"""A training run in the foreground: rows, rollouts, a trainer, and what both report."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio
import msgspec

from osmosis_ai.config import StoreConfig
from osmosis_ai.errors import OsmosisError, UsageError
from osmosis_ai.masking import Masker
from osmosis_ai.models.policy.template import ChatTemplateError, load_template
from osmosis_ai.records import JsonObject, Tool, opening_messages
from osmosis_ai.rollout.server.serve import address_of, open_socket
from osmosis_ai.runtime.run.prepare import find_store
from osmosis_ai.runtime.run.session import RunSession
from osmosis_ai.training.config import TrainingConfig
from osmosis_ai.training.contract import (
    Batch,
    BatchRequest,
    Checkpoint,
    Evaluation,
    EvaluationRequest,
    Mode,
    Ready,
    StepMetrics,
    TrainerJob,
)
from osmosis_ai.training.record import LeftOutRow, MetricsLine, SavedCheckpoint, TrainingRecord, TrainingState, now
from osmosis_ai.training.rollouts import StepRunner
from osmosis_ai.training.server import Answers, serve_trainer
from osmosis_ai.training.trainer import Running, Trainer, start_trainer

__all__ = ["Listener", "Rows", "TrainingError", "TrainingSession", "choose_rows"]

LAST_LINES = 12


class TrainingError(OsmosisError):
    """The trainer failed; the message has its last lines."""


class Rows(NamedTuple):
    """What becomes of a dataset's rows, and the tokens of each prompt whose length can be told before the start."""

    trained: list[int]
    held_out: list[int]
    left_out: list[LeftOutRow]
    tools: list[Tool]
    functions: list[str]
    prompt_tokens: dict[int, int]


class Listener(Protocol):
    """Hears what happens in a training run."""

    def said(self, message: str) -> None:
        """Something that a user should know."""
        ...

    def measured(self, line: MetricsLine, state: TrainingState) -> None:
        """A step's figures are recorded."""
        ...

    def saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is on disk."""
        ...

    def printed(self, line: str) -> None:
        """The trainer has printed a line."""
        ...


async def choose_rows(config: TrainingConfig, store: str, environ: Mapping[str, str]) -> Rows:
    """Load the repository, and choose the rows to train on and to hold out.

    Which rows are held out depends on their content alone. The prompts of the built-in loop are rendered with its
    tools; another agent's are known only once it runs.

    Raises:
        StartError: The repository, the dataset or the model's tokenizer can't be used.
    """
    template = load_template(config.model)
    # A stand-in, because no policy is served yet; nothing is rolled out.
    look = config.run_config(model="offline/empty", store=store)
    async with RunSession.open(look, Path(config.root), environ) as session:
        loaded = session.pool.loaded
        rows = [session.row(number) for number in session.rows]
    lengths: dict[int, int] = {}
    left_out: list[LeftOutRow] = []
    if "mcp" in config.agent:
        for row in rows:
            try:
                lengths[row.index] = len(template.render(opening_messages(row), loaded.tools))
            except ChatTemplateError as error:
                left_out.append(LeftOutRow(row.index, str(error)))
    too_long = [number for number, length in lengths.items() if length > config.max_prompt]
    left_out += [
        LeftOutRow(number, f"its prompt has {lengths[number]:,} tokens; max_prompt_length is {config.max_prompt:,}")
        for number in too_long
    ]
    without = {each.row for each in left_out}
    usable = [row for row in rows if row.index not in without]
    if len(usable) < 2:
        raise UsageError(
            f"{config.dataset}: {len(usable)} of {len(rows)} rows can be trained on, and there must be 2 or more"
            + (f"; row {left_out[0].row}: {left_out[0].reason}" if left_out else "")
        )
    by_content = sorted(usable, key=lambda row: blake2b(row.id.encode(), digest_size=8).digest())
    held_out = sorted(row.index for row in by_content[: config.held_out_of(len(usable))])
    trained = [row.index for row in usable if row.index not in set(held_out)]
    return Rows(trained, held_out, left_out, loaded.tools, loaded.functions, lengths)


class TrainingSession:
    """A training run.

    Args:
        config: The training config.
        record: Where it is recorded.
        state: Its state: that of a new run, or of the one to resume.
        environ: The environment of workers and trainer.
        listener: Hears what happens.
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
        # One request at a time: a trainer that asks again hasn't heard the answer.
        self._busy = anyio.Lock()

    async def run(self, trainer: Trainer) -> TrainingState:
        """Train to the end, and return the state.

        Raises:
            TrainingError: The trainer failed.
            OsmosisError: A step's rollouts could not be run, or the record can't be written.
        """
        self._write(status="running", error=None, finished_at=None)
        try:
            await self._train(trainer)
        except OsmosisError as error:
            self._write(status="interrupted" if self._stopping else "failed", error=str(error), finished_at=now())
            raise
        except BaseException:
            self._write(status="interrupted", finished_at=now())
            raise
        self._write(status="interrupted" if self._stopping else "finished", finished_at=now())
        return self.state

    def stop(self) -> None:
        """End the trainer; the run can be resumed from its last checkpoint."""
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
                if self._stopping:
                    self._running.stop()
                last = await last_words(self._running, self._record, self._token, self._environ, self._listener.printed)
                status = await self._running.wait()
        if self._failure is not None:
            raise self._failure
        if status and not self._stopping:
            raise TrainingError(
                f"the trainer ended with status {status}; it said last:\n{last}\nAll: {self._record.log}"
            )

    async def _batch(self, request: BatchRequest) -> Batch:
        async with self._busy:
            try:
                batch = await self._runner.batch(request)
            except OsmosisError as error:
                # The trainer ends with this message, but it is ours.
                self._failure = error
                raise
        self._write(step=request.step, reward=batch.metrics["reward"])
        self._measured(request.step, "rollouts", batch.metrics)
        return batch

    async def _evaluation(self, request: EvaluationRequest) -> Evaluation:
        async with self._busy:
            try:
                found = await self._runner.evaluation(request)
            except OsmosisError as error:
                self._failure = error
                raise
        if found.metrics:
            scored = {} if found.reward is None else {"reward": found.reward}
            self._measured(request.step, "evaluation", {**scored, **found.metrics})
        return found

    async def _metrics(self, given: StepMetrics) -> None:
        self._measured(given.step, "trainer", given.metrics)

    async def _checkpoint(self, given: Checkpoint) -> None:
        if not self._record.holds(given):
            raise UsageError(f"the checkpoint {given.path} is outside {self._record.checkpoints}")
        others = [each for each in self.state.checkpoints if each.step < given.step]
        self._write(checkpoints=[*others, SavedCheckpoint(given.step, given.path, given.kind, now())])
        self._listener.saved(given)

    async def _ready(self, given: Ready) -> None:
        raise UsageError("this trainer was started to train, not to serve")

    def _measured(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        line = MetricsLine(step, kind, dict(metrics), now())  # type: ignore[arg-type]
        self._record.add(line)
        self._listener.measured(line, self.state)

    def _write(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        self._record.write(self.state)


def write_job(
    config: TrainingConfig, state: TrainingState, record: TrainingRecord, url: str, mode: Mode = "train"
) -> None:
    """Write the file that a trainer is started with; `url` is the runtime's address."""
    job = TrainerJob(
        name=record.name,
        runtime_url=url,
        policy_port=state.policy_port,
        model=config.model,
        output=str(record.checkpoints),
        rows=state.rows,
        training=config.training,
        sampling={"temperature": config.temperature, "top_p": config.top_p},
        checkpoints={"checkpoint_save_freq": config.save_frequency, "eval_interval": config.eval_interval},
        advanced=config.advanced,
        resume_from=state.checkpoints[-1].path if state.checkpoints else None,
        seed=config.seed,
        mode=mode,
    )
    record.job.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=2))


async def last_words(
    running: Running,
    record: TrainingRecord,
    token: str,
    environ: Mapping[str, str],
    heard: Callable[[str], None] = lambda _: None,
) -> str:
    """Keep what a trainer prints, without keys, and return its last lines once it has ended."""
    masker = Masker.from_environment(environ, [token])
    last: list[str] = []
    with record.log.open("a", encoding="utf-8") as log:
        async for text in running.lines():
            line = masker.text(text)
            log.write(f"{line}\n")
            log.flush()
            last = [*last[1 - LAST_LINES :], line]
            heard(line)
    return "\n".join(f"  {line}" for line in last) or "  (no output)"


def new_state(config: TrainingConfig, name: str, rows: Rows) -> TrainingState:
    """Return the state of a new training run."""
    steps = len(rows.trained) // config.batch_rows * int(config.training["total_epochs"])
    if steps == 0:
        raise UsageError(
            f"{config.path}: rollout_batch_size is {config.batch_rows}; there are {len(rows.trained)} rows to train on"
        )
    return TrainingState(
        name=name,
        config=config.path,
        model=config.model,
        dataset=config.dataset,
        trainer=config.trainer,
        status="running",
        created_at=now(),
        policy_port=free_port(),
        total_steps=steps,
        rows=rows.trained,
        held_out=rows.held_out,
        left_out=rows.left_out,
        options=options_of(config),
        rollouts_per_step=config.batch_rows * config.samples,
    )


def resumed_state(config: TrainingConfig, record: TrainingRecord) -> TrainingState:
    """Return the state of a training run to resume; raise UsageError if the config has changed."""
    state = record.read()
    changed = sorted(
        name for name, value in options_of(config).items() if msgspec.to_builtins(value) != state.options.get(name)
    )
    if changed:
        raise UsageError(
            f"{record.name} can't be resumed: {', '.join(changed)} changed in {config.path}. Change it back, or begin "
            "a run of another name"
        )
    if state.status == "finished":
        raise UsageError(f"{record.name} is finished; begin a run of another name")
    return state


def options_of(config: TrainingConfig) -> JsonObject:
    """Return everything that must be equal to resume a training run."""
    free = ("path", "root", "timeouts", "in_flight", "save_frequency")
    known: JsonObject = msgspec.to_builtins(config)
    dataset = blake2b(Path(config.dataset).read_bytes(), digest_size=16).hexdigest()
    return {**{name: value for name, value in known.items() if name not in free}, "dataset": dataset}


def find_record(config: TrainingConfig, store: str | None, name: str, cwd: Path) -> tuple[TrainingRecord, str]:
    """Return the record of a training run, and the folder of its store."""
    folder = find_store(StoreConfig(store), Path(config.root), cwd)
    return TrainingRecord(folder, name), str(folder)


def free_port() -> int:
    """Return a port of loopback that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
