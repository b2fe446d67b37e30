"""`osmosis train run`: train a model on this machine. Also shows the training runs in the repository's store."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from osmosis_ai.cli.options import Json
from osmosis_ai.cli.session import ExitCode, Store, command_session, interrupts
from osmosis_ai.errors import OsmosisError, UsageError
from osmosis_ai.text import counted

if TYPE_CHECKING:
    from osmosis_ai.cli.console import Output
    from osmosis_ai.cli.platform_session import Session
    from osmosis_ai.cli.session import CommandSession
    from osmosis_ai.records import JsonObject
    from osmosis_ai.training.config import TrainingConfig
    from osmosis_ai.training.contract import Checkpoint
    from osmosis_ai.training.dry import DryReport, Spread
    from osmosis_ai.training.record import MetricsLine, TrainingState

__all__ = ["list_local", "print_local_log", "run_training", "show_local"]


def run_training(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The training config, or a platform's order.")],
    dry: Annotated[
        bool, typer.Option("--dry", help="Train nothing; report what would be trained on, and if it can be learned.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name the run. Default: by config and time.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="NAME", help="Continue this run from its last checkpoint.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model-folder", metavar="DIR", help="Train this model instead of the config's.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset-file", metavar="FILE", help="Use this dataset instead of the config's.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer",
            metavar="COMMAND",
            help="Start the trainer with this command; the job file is its last argument. Default: the config's "
            "trainer, in an environment that uv builds.",
        ),
    ] = None,
    store: Store = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print no progress.")] = False,
) -> None:
    """Train a model on the rollouts of this repository, in the foreground.

    The rollouts run here, the trainer in its own environment. Each step is stored as a run.
    """
    with command_session(quiet=quiet or json, store_error=ExitCode.FAILED) as session:
        if name is not None and resume is not None:
            raise UsageError("--name starts a new run and --resume continues one; remove one of them")
        # Imported here to keep the start-up of every other command fast.
        import asyncio

        command = _Command(session, config, store, trainer, json=json)
        given = {"model": model, "dataset": dataset}
        code = asyncio.run(command.dry(**given) if dry else command.run(name, resume, **given))
    raise typer.Exit(code)


class _Command:
    def __init__(
        self, session: CommandSession, config: str, store: str | None, trainer: str | None, *, json: bool
    ) -> None:
        self._session = session
        self._output: Output = session.output
        self._file = config
        self._store = store
        self._trainer = trainer
        self._json = json

    async def run(self, name: str | None, resume: str | None, *, model: str | None, dataset: str | None) -> int:
        """Train, and return the exit code."""
        from osmosis_ai.training.rows import choose_rows
        from osmosis_ai.training.session import TrainingSession, find_record, new_state, resumed_state
        from osmosis_ai.training.trainer import find_trainer

        if self._file.endswith(".json"):
            from osmosis_ai.training.config import read_order

            # A platform restarts an interrupted order with the same file, so an existing record means resume.
            config, order = read_order(self._file, self._session.cwd)
            record, store = find_record(config, order.store, order.name, self._session.cwd)
            resume = order.name if record.exists else None
        else:
            config = self._config(model, dataset)
            record, store = find_record(config, self._store, resume or name or _new_name(self._file), self._session.cwd)
        if resume is not None:
            state = resumed_state(config, record)
        elif record.exists:
            raise UsageError(f"there is a training run {record.name}; --resume {record.name} continues it")
        else:
            rows = await choose_rows(config, store, self._session.environ)
            for each in rows.left_out:
                self._output.say(f"row {each.row} is left out: {each.reason}")
            state = new_state(config, record.name, rows)
        trainer = await find_trainer(config.trainer, self._trainer, self._output.say)
        record.create()
        with record.locked():
            self._introduce(config, state, resumed=resume is not None)
            training = TrainingSession(
                config, record, state, self._session.environ, store, _Heard(self._output), resumed=resume is not None
            )
            with interrupts(training.stop):
                try:
                    state = await training.run(trainer)
                except OsmosisError as error:
                    self._output.fail(str(error))
                    self._output.say(f"osmosis train run {self._file} --resume {record.name} continues it")
                    return ExitCode.FAILED
        if self._json:
            self._output.json(msgspec.json.encode(state))
        if state.status == "interrupted":
            self._output.say(f"interrupted; osmosis train run {self._file} --resume {record.name} continues it")
            return ExitCode.INTERRUPTED
        last = state.checkpoints[-1] if state.checkpoints else None
        self._output.say(
            f"{state.name} is finished: {counted(state.step, 'step')}"
            + (f"; the {'LoRA adapter' if last.kind == 'lora' else 'model'} is {last.path}" if last else "")
        )
        return ExitCode.OK

    async def dry(self, *, model: str | None, dataset: str | None) -> int:
        """Report if the config can be trained on; return 1 if little or nothing would be learned."""
        from osmosis_ai.training.dry import look_at, try_policy
        from osmosis_ai.training.rows import choose_rows
        from osmosis_ai.training.serving import served_policy
        from osmosis_ai.training.session import find_record, new_state
        from osmosis_ai.training.trainer import find_trainer

        config = self._config(model, dataset)
        record, store = find_record(config, self._store, _new_name(self._file), self._session.cwd)
        rows = await choose_rows(config, store, self._session.environ)
        state = new_state(config, record.name, rows)
        report = await look_at(config, rows, state.total_steps, store, self._session.environ)
        if not self._json:
            _print_rows(self._output, config, report)
        trainer = await find_trainer(config.trainer, self._trainer, self._output.say)
        try:
            async with served_policy(config, state, record, trainer, self._session.environ) as (url, token):
                report = await try_policy(
                    config, report, rows, url, token, record.name, store, self._session.environ, self._output.say
                )
        except OsmosisError as error:
            self._output.fail(str(error))
            return ExitCode.FAILED
        if self._json:
            self._output.json(msgspec.json.encode(report))
        else:
            _print_policy(self._output, config, report)
        for problem in report.problems:
            self._output.fail(problem)
        return ExitCode.FAILED if report.problems else ExitCode.OK

    def _config(self, model: str | None, dataset: str | None) -> TrainingConfig:
        from osmosis_ai.training.config import read_training_config

        config = read_training_config(self._file, self._session.cwd, model=model, dataset=dataset)
        self._session.use(Path(config.root))
        # Now, because a model that has been loading for minutes would be lost to a missing key.
        lacking = [name for name in config.secrets if not self._session.environ.get(name)]
        if lacking:
            raise UsageError(
                f"the config needs the secrets {', '.join(lacking)}; set them in the environment or in .env"
            )
        if config.top_p < 1:
            self._output.warn(
                f"warning: rollout_top_p is {config.top_p}: tokens are sampled from a truncated distribution, but the "
                "update treats them as samples of the full one, which biases it"
            )
        return config

    def _introduce(self, config: TrainingConfig, state: TrainingState, *, resumed: bool) -> None:
        last = state.checkpoints[-1].step if state.checkpoints else 0
        begun = f"continuing {state.name} after step {last}" if resumed else f"training run {state.name}"
        self._output.say(
            f"{begun}: {counted(len(state.rows), 'row')} of {state.dataset}, {len(state.held_out)} held out; "
            f"{counted(state.total_steps, 'step')} of {config.batch_rows} rows × {config.samples} rollouts"
        )


class _Heard:
    """Prints the events of a training run."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._rollouts: dict[str, float] = {}
        self._measured = False

    def said(self, message: str) -> None:
        self._output.say(message)

    def printed(self, line: str) -> None:
        # Loading the model takes minutes; after that, the steps' metrics say more than the trainer's own lines.
        if not self._measured:
            self._output.say(f"trainer: {line}")

    def measured(self, line: MetricsLine, state: TrainingState) -> None:
        self._measured = True
        if line.kind == "rollouts":
            self._rollouts = line.metrics
        elif line.kind == "evaluation":
            reward = line.metrics.get("reward")
            scored = "no score" if reward is None else f"reward {reward:.3f}"
            self._output.say(f"step {line.step}: {scored} on {counted(round(line.metrics['rows']), 'held-out row')}")
        else:
            self._output.line(_step_line(line, self._rollouts, state))

    def saved(self, checkpoint: Checkpoint) -> None:
        self._output.say(f"checkpoint of step {checkpoint.step}: {checkpoint.path}")


def _step_line(line: MetricsLine, rollouts: dict[str, float], state: TrainingState) -> str:
    parts = [f"step {line.step} of {state.total_steps}"]
    shown = {**rollouts, **line.metrics}
    for name, label, form in (
        ("reward", "reward", ".3f"),
        ("groups_with_variance", "groups that differ", ".0%"),
        ("left_out", "left out", ".0f"),
        ("loss", "loss", ".4f"),
        ("completion_tokens", "tokens", ".0f"),
        ("rollout_seconds", "rollouts", ".1f"),
        ("step_time", "step", ".1f"),
    ):
        if name in shown:
            unit = " s" if name in ("rollout_seconds", "step_time") else ""
            parts.append(f"{label} {shown[name]:{form}}{unit}")
    return "  ".join(parts)


def _print_rows(output: Output, config: TrainingConfig, report: DryReport) -> None:
    output.line(f"rows: {report.rows} to train on, {report.held_out} held out, {len(report.left_out)} left out")
    for each in report.left_out:
        output.line(f"  row {each.row}: {each.reason}")
    output.line(
        f"steps: {report.steps} of {config.batch_rows} rows × {config.samples} rollouts, {report.rollouts:,} in all"
    )
    output.line(f"tools: {', '.join(report.tools) or 'none'}")
    output.line(f"scored with: {', '.join(report.functions) or 'the grader'}")
    if report.prompt_tokens is not None:
        output.line(f"prompt tokens: {_spread(report.prompt_tokens)} (max_prompt_length {config.max_prompt:,})")
    controls = report.controls
    output.line(
        f"reward of reference solutions {_number(controls.references)}, of an empty answer {_number(controls.empty)} "
        f"({counted(controls.rows, 'row')})"
    )


def _print_policy(output: Output, config: TrainingConfig, report: DryReport) -> None:
    policy = report.policy
    assert policy is not None
    output.line(f"model: reward {policy.reward:.3f} on {policy.rows} rows × {policy.samples} rollouts")
    output.line(f"groups that would train: {policy.groups_with_variance} of {policy.rows}")
    for reason, count in policy.left_out.items():
        output.line(f"left out: {counted(count, 'rollout')}: {reason}")
    output.line(f"response tokens: {_spread(policy.response_tokens)} (max_response_length {config.max_response:,})")
    output.line(f"sampled by the model: {policy.sampled_share:.0%} of the response tokens")
    output.line(
        f"estimate: {report.tokens or 0:,} tokens; {_duration(report.rollout_seconds or 0)} of rollouts on this "
        "machine, plus the updates"
    )
    output.line(f"to see the rollouts: osmosis runs show {policy.run}")


def _spread(spread: Spread) -> str:
    return f"{spread.least:,.0f} to {spread.most:,.0f}, median {spread.median:,.0f}"


def _number(value: float | None) -> str:
    return "not scored" if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _new_name(config: str) -> str:
    stem = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in Path(config).stem)
    # The random part tells apart runs that begin in the same second.
    return f"{stem[:48]}-{time.strftime('%Y%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def list_local(session: Session) -> None:
    """List the training runs of the repository's store."""
    from osmosis_ai.cli.tables import Column
    from osmosis_ai.training.record import list_records

    found: list[JsonObject] = [msgspec.to_builtins(state) for state in list_records(_store(session))]
    columns = [Column("name", "name"), Column("status", "label"), Column("step", "label"), Column("reward", "label")]
    session.items(
        found,
        columns,
        lambda one: [one["name"], one["status"], f"{one['step']} of {one['total_steps']}", _number(one["reward"])],
        len(found),
        empty="no training runs yet; start one with `osmosis train run CONFIG`",
    )


def show_local(session: Session, name: str) -> None:
    """Show a training run of the repository's store: its state, rewards and checkpoints."""
    from osmosis_ai.training.record import TrainingRecord

    record = TrainingRecord(_store(session), name)
    state, metrics = record.read(), record.metrics()
    lines = [
        ("Name", state.name),
        ("Status", state.status),
        ("Model", state.model),
        ("Dataset", f"{state.dataset}, {len(state.rows)} rows, {len(state.held_out)} held out"),
        ("Steps", f"{state.step} of {state.total_steps}"),
        *([("Error", state.error)] if state.error else []),
        *((f"Checkpoint {each.step}", each.path) for each in state.checkpoints),
    ]
    for kind, label in (("rollouts", "Reward"), ("evaluation", "Held-out reward")):
        values = [line.metrics["reward"] for line in metrics if line.kind == kind and "reward" in line.metrics]
        if values:
            lines.append((label, f"{values[0]:.3f} at the first step, {values[-1]:.3f} at the last"))
    session.detail({"training_run": msgspec.to_builtins(state), "metrics": msgspec.to_builtins(metrics)}, lines)


def print_local_log(session: Session, name: str, limit: int) -> None:
    """Print the last `limit` lines that a training run's trainer printed."""
    from osmosis_ai.cli.tables import Column
    from osmosis_ai.training.record import TrainingRecord

    record = TrainingRecord(_store(session), name)
    record.read()
    lines = record.log_lines(limit)
    found = [{"message": line} for line in lines]
    session.items(found, [Column("output", "text")], _message, len(lines), empty="the trainer printed nothing")


def _message(line: JsonObject) -> list[str]:
    return [str(line["message"])]


def _store(session: Session) -> Path:
    from osmosis_ai.cli.session import SharedOptions, stored_runs

    _, folder = stored_runs(session.cwd, SharedOptions(None, None))
    return folder
