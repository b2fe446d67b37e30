"""A training run on disk, beside the store's runs: its state, metrics, checkpoints and the trainer's log."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from osmosis_ai.errors import StoreError, UsageError
from osmosis_ai.folders import private_folder, replaced_file
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.training.contract import Checkpoint

__all__ = [
    "LeftOutRow",
    "MetricsLine",
    "SavedCheckpoint",
    "State",
    "TrainingRecord",
    "TrainingState",
    "evaluation_run",
    "find_records",
    "list_records",
    "now",
    "run_beginnings",
    "step_run",
]

State = Literal["running", "finished", "failed", "interrupted"]
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds since the epoch, bounded (year 5138) so that every value can be shown as a date."""
FOLDER = "training"
MAX_TAIL_BYTES = 1024 * 1024
"""Bytes at the end of a log in which its last lines are looked for."""
LOOK_SECONDS = 0.2
"""How long to retry the lock, in seconds: `is_locked` in another process takes it for a moment."""


class LeftOutRow(Record, frozen=True):
    """A row that is left out of training, and why."""

    row: int
    reason: str


class SavedCheckpoint(Record, frozen=True, omit_defaults=False):
    """A checkpoint on disk. `created_at` is in seconds since the epoch."""

    step: int
    path: str
    kind: Literal["lora", "full"]
    created_at: Moment


class TrainingState(Record, frozen=True, omit_defaults=False):
    """The state of a training run. Times are in seconds since the epoch."""

    name: str
    config: str
    model: str
    dataset: str
    trainer: str
    status: State
    created_at: Moment
    policy_port: int
    total_steps: int
    rows: list[int]
    held_out: list[int]
    left_out: list[LeftOutRow]
    options: JsonObject
    """The settings that must be unchanged when the run is resumed."""
    rollouts_per_step: int = 0
    step: int = 0
    reward: float | None = None
    finished_at: Moment | None = None
    error: str | None = None
    checkpoints: list[SavedCheckpoint] = []


class MetricsLine(Record, frozen=True):
    """Metrics of one step: from its rollouts, from the trainer, or from an evaluation on held-out rows."""

    step: int
    kind: Literal["rollouts", "trainer", "evaluation"]
    metrics: dict[str, float]
    time: Moment


class TrainingRecord:
    """A training run's folder inside the store's folder. Methods raise StoreError if they can't read or write it."""

    def __init__(self, store: Path, name: str) -> None:
        self.folder = store / FOLDER / name
        self.name = name

    @property
    def exists(self) -> bool:
        """True if the training run has been recorded."""
        return self._file.is_file()

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        """The file with everything the trainer printed."""
        return self.folder / "trainer.log"

    @property
    def job(self) -> Path:
        """The job file that the trainer is started with."""
        return self.folder / "job.json"

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return True if the checkpoint lies inside the checkpoints folder."""
        return Path(checkpoint.path).resolve().is_relative_to(self.checkpoints.resolve())

    def create(self) -> None:
        """Make the folders."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            private_folder(self.folder)
        except OSError as error:
            raise StoreError(f"{self.folder} can't be made: {error.strerror}") from error

    def read(self) -> TrainingState:
        """Return the state; a run is "interrupted" if its process died without recording an end.

        Raises:
            UsageError: The training run doesn't exist.
            StoreError: Its file can't be read.
        """
        try:
            state = msgspec.json.decode(self._file.read_bytes(), type=TrainingState)
        except FileNotFoundError:
            raise UsageError(f"there is no training run {self.name} in {self.folder.parent}") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(f"{self._file} can't be read: {error}") from error
        # The kernel drops the lock of a killed process, which leaves no other trace.
        if state.status == "running" and not self.is_locked:
            return msgspec.structs.replace(state, status="interrupted")
        return state

    def write(self, state: TrainingState) -> None:
        """Replace the state."""
        try:
            with replaced_file(self._file, private=True) as file:
                file.write(msgspec.json.format(msgspec.json.encode(state), indent=2))
        except OSError as error:
            raise StoreError(f"{self._file} can't be written: {error.strerror}") from error

    def add(self, line: MetricsLine) -> None:
        """Append metrics."""
        try:
            with self._metrics.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise StoreError(f"{self._metrics} can't be written: {error.strerror}") from error

    def metrics(self) -> list[MetricsLine]:
        """Return all metrics; a step that was repeated after a resume counts once, with its latest values."""
        if not self._metrics.is_file():
            return []
        decode = msgspec.json.Decoder(MetricsLine).decode
        found: dict[tuple[int, str], MetricsLine] = {}
        try:
            for text in self._metrics.read_bytes().splitlines(keepends=True):
                # A killed process may have left a partial line.
                if text.endswith(b"\n"):
                    line = decode(text)
                    found[line.step, line.kind] = line
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(f"{self._metrics} can't be read: {error}") from error
        return sorted(found.values(), key=lambda line: (line.step, line.kind))

    def log_lines(self, count: int) -> list[str]:
        """Return the last `count` lines that the trainer printed."""
        if not self.log.is_file():
            return []
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - MAX_TAIL_BYTES))
            # The end may begin within a character.
            return file.read().decode("utf-8", "replace").splitlines()[-count:]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock during the block; raise UsageError if another process holds it."""
        with self._lock.open("a", encoding="utf-8") as file:
            deadline = time.monotonic() + LOOK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise UsageError(f"the training run {self.name} is running in another process") from None
                time.sleep(0.01)
            yield

    @property
    def is_locked(self) -> bool:
        """True if a process is running this training run."""
        try:
            with self._lock.open("rb") as file:
                # A shared lock, so that several processes that only look don't take each other for a training run.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def version(self) -> tuple[int, bool]:
        """Return a value that changes with every write, and when the writing process ends."""
        written = 0
        for file in (self._file, self._metrics):
            # The size too, because two lines may be written within one tick of the file system's clock.
            with suppress(OSError):
                status = file.stat()
                written += status.st_mtime_ns + status.st_size
        return written, self.is_locked

    @property
    def _file(self) -> Path:
        return self.folder / "run.json"

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def _lock(self) -> Path:
        return self.folder / "lock"


def list_records(store: Path) -> list[TrainingState]:
    """Return the state of each training run in a store, newest first; raise StoreError if one can't be read."""
    return sorted((each.read() for each in find_records(store)), key=lambda state: state.created_at, reverse=True)


def find_records(store: Path) -> list[TrainingRecord]:
    """Return the training runs in a store's folder, unordered; raise StoreError if it can't be read.

    Symbolic links are ignored: they could show a folder outside the store.
    """
    folder = store / FOLDER
    try:
        found = [TrainingRecord(store, each.name) for each in folder.iterdir() if not each.is_symlink()]
        return [each for each in found if each.exists]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"{folder} can't be read: {error.strerror}") from error


def step_run(name: str, step: int) -> str:
    """Return the name of the run that holds the rollouts of one training step."""
    return f"{name}.step-{step:05d}"


def evaluation_run(name: str, step: int) -> str:
    """Return the name of the run that evaluates the policy after one training step."""
    return f"{name}.eval-{step:05d}"


def run_beginnings(name: str) -> tuple[str, str]:
    """Return the prefixes of the names of a training run's runs."""
    return f"{name}.step-", f"{name}.eval-"


def now() -> float:
    """Return the current time in seconds since the epoch."""
    return time.time()
