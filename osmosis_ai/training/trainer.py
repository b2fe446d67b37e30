"""The trainer process: build its environment, start it, read its output, stop it."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import NamedTuple

import anyio
import msgspec

from osmosis_ai.errors import RepositoryError, UsageError
from osmosis_ai.masking import Masker, without_secrets
from osmosis_ai.output_lines import output_lines
from osmosis_ai.runtime.worker.workflows import keeper
from osmosis_ai.runtime.worker.workflows.environments import prepare_environment
from osmosis_ai.training.config import TRAINERS, TrainingConfig
from osmosis_ai.training.contract import TOKEN_VARIABLE, Mode, TrainerJob
from osmosis_ai.training.record import TrainingRecord, TrainingState

__all__ = ["Running", "Trainer", "find_trainer", "last_words", "start_trainer", "write_job"]

GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""
LAST_LINES = 12
"""Lines of its output that a failed trainer's error shows."""
MAX_LINE = 1024 * 1024
"""Bytes of an output line to buffer; see `output_lines`."""
_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "trainers", _PACKAGE.parent / "trainers")
"""Folders that hold trainer distributions: in an installed package, and in a checkout."""


class Trainer(NamedTuple):
    """The command that starts a trainer, and the folder to add to Python's path if it isn't installed."""

    command: list[str]
    source: str | None = None

    def variables(self, token: str) -> dict[str, str]:
        """Return the environment variables to add for a trainer's process."""
        return {
            TOKEN_VARIABLE: token,
            **({} if self.source is None else {"PYTHONPATH": self.source}),
            # The model comes from a local folder, so nothing should reach for the hub.
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            # stdout is a pipe: a block-buffered log would lag behind and lose the last lines of a crash.
            "PYTHONUNBUFFERED": "1",
        }


async def find_trainer(name: str, command: str | None, say: Callable[[str], None]) -> Trainer:
    """Return how to start a trainer, after building its environment if needed, which can take minutes.

    Args:
        name: The trainer's name in the config.
        command: A command that starts a trainer of the user's; None for the trainer called `name`.
        say: Called with a notice before anything slow.

    Raises:
        UsageError: The command doesn't exist.
        RepositoryError: There is no such trainer, or its environment can't be built.
    """
    if command is not None:
        words = shlex.split(command)
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"--trainer {command}: there is no such command")
        return Trainer(words)
    folder = next((place / name for place in _PLACES if (place / name / "pyproject.toml").is_file()), None)
    if folder is None:
        raise RepositoryError(
            f"the trainer {name} isn't part of this installation; name the command that starts it with --trainer"
        )
    say(f"preparing the environment of the trainer {name}; the first time, this installs several GB")
    stopped = Event()
    try:
        # A thread can't be cancelled. It is abandoned, and ends soon because the event is set.
        made = await anyio.to_thread.run_sync(
            lambda: prepare_environment(folder, stopped=stopped), abandon_on_cancel=True
        )
    finally:
        stopped.set()
    return Trainer([str(made), "-m", TRAINERS[name]], str(folder))


class Running:
    """A running trainer process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def lines(self) -> AsyncIterator[str]:
        """Yield each line the trainer prints, until it ends."""
        assert self._process.stdout is not None
        return output_lines(self._process.stdout)

    def stop(self) -> None:
        """End the trainer: SIGTERM now, SIGKILL after a grace period. Returns at once."""
        assert self._process.stdin is not None
        # The keeper process above the trainer watches this pipe, so the trainer also ends if this process is killed.
        self._process.stdin.close()

    async def wait(self) -> int:
        """Wait until the trainer ends, and return its exit status."""
        return await self._process.wait()


@asynccontextmanager
async def start_trainer(trainer: Trainer, job: Path, token: str, environ: Mapping[str, str]) -> AsyncIterator[Running]:
    """Start a trainer, and stop it at the end of the block, or when this process dies.

    Args:
        trainer: How to start it.
        job: The job file, from `write_job`.
        token: The bearer token for requests in both directions.
        environ: The environment to start from; secrets are removed.
    """
    process = await asyncio.create_subprocess_exec(
        # The keeper ends the trainer with this process, even if this process is killed. It needs no packages, so it
        # starts without looking for any.
        *(sys.executable, "-I", "-S", keeper.__file__, str(GRACE_SECONDS)),
        *(*trainer.command, str(job)),
        cwd=job.parent,
        # A trainer calls neither models nor judges, so it gets none of their keys.
        env={**without_secrets(environ), **trainer.variables(token)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        limit=MAX_LINE,
        # Ctrl-C goes to the whole process group, but only this process should handle it.
        start_new_session=True,
    )
    running = Running(process)
    try:
        yield running
    finally:
        running.stop()
        # Even if cancelled: the trainer must not outlive its run.
        with anyio.CancelScope(shield=True):
            await process.wait()


def write_job(
    config: TrainingConfig, state: TrainingState, record: TrainingRecord, url: str, mode: Mode = "train"
) -> None:
    """Write the job file that a trainer is started with; `url` is the runtime's base URL."""
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
    # Without the token, because the file stays on disk; the trainer finds it in its environment.
    record.job.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=2))


async def last_words(
    running: Running,
    record: TrainingRecord,
    token: str,
    environ: Mapping[str, str],
    heard: Callable[[str], None] = lambda _: None,
) -> str:
    """Write the trainer's output to the log with secrets masked, and return its last lines once it has ended.

    Args:
        running: The trainer.
        record: Its record, whose log is appended to.
        token: The bearer token, which is masked too.
        environ: The environment, whose secrets are masked.
        heard: Called with each masked line.
    """
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
