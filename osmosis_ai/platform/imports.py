"""Import evaluations that ran elsewhere: clients upload their files one by one; once complete, they become a run.

The id of the local run identifies an import, so a client can safely repeat it or continue an interrupted one.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Literal

import anyio.to_thread
import msgspec

from osmosis_ai.platform.accounts import Holder, Workspace
from osmosis_ai.platform.database import Database, Row
from osmosis_ai.platform.errors import ApiError, conflict, invalid, not_found
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.names import new_name
from osmosis_ai.platform.paging import now
from osmosis_ai.platform.results import Graded, run_results
from osmosis_ai.platform.uploads import UploadError, receive_file
from osmosis_ai.records import JsonObject, Record

__all__ = ["ImportedEval", "Imports"]

MAX_FILES = 50_000
MAX_BYTES = 2 << 30
"""Bounds of one import: its files, and their bytes."""
INDEX, PROGRESS = "index.jsonl", "progress.json"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SHA256 = re.compile(r"[0-9a-f]{64}")
LOCAL_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
TRIALS = "rollout_trials"
"""The folder in which released clients upload a folder for each rollout."""


class File(Record, frozen=True):
    """A file to upload."""

    path: str
    size: int
    sha256: str


class RolloutCode(Record, frozen=True):
    """The rollout that ran."""

    name: str
    branch: str | None = None
    commit_sha: str | None = None


class NamedDataset(Record, frozen=True):
    """The dataset that was evaluated."""

    name: str
    sha256: str


class Experiment(Record, frozen=True):
    """What was evaluated."""

    rollout: RolloutCode
    entrypoint: str
    model_path: str
    dataset: NamedDataset


class Evaluation(Record, frozen=True):
    """How it was evaluated."""

    n: int
    pass_threshold: float


class LocalRun(Record, frozen=True):
    """The local run."""

    name: str
    started_at: str
    completed_at: str
    experiment_config: Experiment
    evaluation_config: Evaluation


class ImportedEval(Record, frozen=True):
    """An evaluation to import, and its files. `reimport` replaces what was imported from the same local run."""

    schema_version: Literal[1]
    local_run_id: str
    manifest_digest: str
    run: LocalRun
    files: list[File]
    schema_versions: JsonObject = {}
    provenance: JsonObject = {}
    reimport: bool = False


class Line(Record, frozen=True):
    """A line of the index."""

    row_index: int
    run_index: int
    rollout_id: str
    status: Literal["success", "failed", "skipped"]
    reward: float | None = None
    tokens: int | None = None
    trajectory_filename: str | None = None


class Progress(Record, frozen=True):
    """The number of rows that the run sampled, of those in the dataset."""

    sampled_rows: int
    total_dataset_rows: int


class Imports:
    """The imports of all workspaces."""

    def __init__(self, database: Database, home: Home) -> None:
        self._database = database
        self._home = home

    def start(self, holder: Holder, workspace: Workspace, asked: ImportedEval) -> Row:
        """Start or continue the import of a local run, and return its row; raise ApiError."""
        _check(asked)
        # Without the flag, so that repeating a replacement finds the same import.
        content = msgspec.json.encode(msgspec.structs.replace(asked, reimport=False)).decode()
        known = self._database.one(
            "SELECT * FROM imports WHERE workspace = ? AND local_run_id = ?", workspace.id, asked.local_run_id
        )
        # A client that continues: files that are there needn't be sent again.
        if known is not None and known["content"] == content:
            return known
        if known is not None and known["run"] is not None and not asked.reimport:
            raise conflict(f"the local run {asked.run.name} was uploaded with other results; --replace replaces them")
        session = str(uuid.uuid4())
        with self._database.write("beginning an import") as db:
            db.execute(
                "INSERT INTO imports (id, workspace, local_run_id, creator, content, created_at) "
                "VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (workspace, local_run_id) DO UPDATE SET "
                "id = ?1, content = ?5, finalized = 0, created_at = ?6",
                (session, workspace.id, asked.local_run_id, holder.user_id, content, now()),
            )
        if known is not None:
            shutil.rmtree(self._folder(known), ignore_errors=True)
        return self.find(workspace, session)

    def find(self, workspace: Workspace, session: str) -> Row:
        """Return an import; raise ApiError."""
        row = self._database.one("SELECT * FROM imports WHERE id = ? AND workspace = ?", session, workspace.id)
        if row is None:
            raise not_found("there is no such import; start it again")
        return row

    def state(self, row: Row) -> JsonObject:
        """Return an import in the API's format."""
        content = _content(row)
        done = [bool(row["finalized"]) or self._file(row, number).is_file() for number in range(len(content.files))]
        files = [
            {**msgspec.structs.asdict(file), "state": "uploaded" if is_there else "pending"}
            for file, is_there in zip(content.files, done, strict=True)
        ]
        return {
            "session_id": row["id"],
            "status": "finalized" if row["finalized"] else "uploading",
            "expected_files": len(files),
            "uploaded_files": sum(done),
            "files": files,
        }

    def missing(self, row: Row, paths: Sequence[str]) -> list[tuple[int, File]]:
        """Return those of these files that are still to be uploaded, with their numbers; raise ApiError."""
        known = {file.path: (number, file) for number, file in enumerate(_content(row).files)}
        strangers = [path for path in paths if path not in known]
        if strangers:
            raise invalid(f"the import has no file {strangers[0][:200]!r}", "paths")
        return [known[path] for path in paths if not self._file(row, known[path][0]).is_file()]

    async def receive(self, session: str, number: int, stream: AsyncIterator[bytes]) -> str:
        """Write a file to disk, and return its hash; raise ApiError."""
        row = await anyio.to_thread.run_sync(self._database.one, "SELECT * FROM imports WHERE id = ?", session)
        files = [] if row is None else _content(row).files
        if row is None or number >= len(files) or row["finalized"]:
            raise conflict("the import doesn't expect this file")
        target = self._file(row, number)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            return await receive_file(target, stream, files[number].size, files[number].sha256)
        except UploadError as error:
            raise invalid(f"{files[number].path}: {error}") from None
        except OSError as error:
            raise ApiError(507, f"the upload can't be stored: {error.strerror}", "STORAGE_FULL") from error

    def finalize(self, workspace: Workspace, row: Row) -> str:
        """Turn a complete import into a run, and return the run's id; raise ApiError if files are missing."""
        if row["finalized"]:
            return str(row["run"])
        content = _content(row)
        left = self.missing(row, [file.path for file in content.files])
        if left:
            raise conflict(f"{len(left)} files aren't uploaded yet, such as {left[0][1].path}")
        numbers = {file.path: number for number, file in enumerate(content.files)}
        lines = self._lines(row, numbers)
        results = self._results(row, numbers, content.run.evaluation_config, lines)
        # A replaced import keeps its run, whose id users may have shared.
        run_id = row["run"] or str(uuid.uuid4())
        arranged = self._home.run(run_id) / "files" / f".{row['id']}"
        self._arrange(row, content.files, lines, arranged)
        with self._database.write("finishing an import") as db:
            name = self._put(db, workspace, row, content, run_id, results)
            db.execute("UPDATE imports SET run = ?, finalized = 1 WHERE id = ?", (run_id, row["id"]))
            # Inside the transaction, so that there is never a run without its files.
            shutil.rmtree(arranged.with_name(name), ignore_errors=True)
            arranged.rename(arranged.with_name(name))
        shutil.rmtree(self._folder(row), ignore_errors=True)
        return str(run_id)

    def _lines(self, row: Row, numbers: Mapping[str, int]) -> list[Line]:
        text = self._file(row, numbers[INDEX]).read_bytes()
        try:
            lines = [msgspec.json.decode(line, type=Line) for line in text.split(b"\n") if line.strip()]
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{INDEX}: {error}") from None
        # An item that counts twice would change the results.
        if len({(line.row_index, line.run_index) for line in lines}) < len(lines):
            raise invalid(f"{INDEX} has an item twice")
        return lines

    def _results(
        self, row: Row, numbers: Mapping[str, int], evaluation: Evaluation, lines: Sequence[Line]
    ) -> JsonObject:
        try:
            progress = msgspec.json.decode(self._file(row, numbers[PROGRESS]).read_bytes(), type=Progress)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{PROGRESS}: {error}") from None
        items = (
            Graded(
                row=str(line.row_index),
                reward=line.reward if line.status == "success" else None,
                failed=line.status == "failed",
                tokens=line.tokens or 0,
                cost=None,
            )
            for line in lines
        )
        return run_results(
            items,
            n=evaluation.n,
            threshold=evaluation.pass_threshold,
            rows=progress.sampled_rows,
            dataset_rows=progress.total_dataset_rows,
            resumed=0,
        )

    def _put(
        self,
        db: sqlite3.Connection,
        workspace: Workspace,
        row: Row,
        content: ImportedEval,
        run_id: str,
        results: JsonObject,
    ) -> str:
        """Write the run, and return its name."""
        run, experiment = content.run, content.run.experiment_config
        encoded = msgspec.json.encode(results).decode()
        if row["run"] is not None:
            db.execute("UPDATE runs SET results = ? WHERE id = ?", (encoded, run_id))
            (known,) = db.execute("SELECT name FROM runs WHERE id = ?", (run_id,)).fetchone()
            return str(known)
        name = run.name
        same = "SELECT 1 FROM runs WHERE workspace = ? AND kind = 'eval' AND name = ?"
        # Local runs are named on each user's machine, so two may have the same name.
        while db.execute(same, (workspace.id, name)).fetchone() is not None:
            name = new_name()
        document = {
            "experiment": {
                "rollout": experiment.rollout.name,
                "entrypoint": experiment.entrypoint,
                "model_path": experiment.model_path,
                "dataset": experiment.dataset.name,
            },
            "evaluation": msgspec.structs.asdict(run.evaluation_config),
            "secrets": {"required": []},
        }
        values = {
            "id": run_id,
            "workspace": workspace.id,
            "kind": "eval",
            "name": name,
            "status": "finished",
            "creator": row["creator"],
            "model": experiment.model_path,
            "rollout": experiment.rollout.name,
            # It may never have been uploaded here; its name and hash say what it was.
            "dataset": "",
            "dataset_name": experiment.dataset.name,
            "dataset_sha256": experiment.dataset.sha256,
            "document": msgspec.json.encode(document).decode(),
            "sources": "[]",
            "seed": 0,
            "branch": experiment.rollout.branch,
            "commit_sha": experiment.rollout.commit_sha,
            "results": encoded,
            "imported": 1,
            "created_at": now(),
            "started_at": _seconds(run.started_at, "started_at"),
            "completed_at": _seconds(run.completed_at, "completed_at"),
        }
        marks = ", ".join("?" * len(values))
        db.execute(f"INSERT INTO runs ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))  # noqa: S608
        db.execute(
            "INSERT INTO logs (subject, at, level, step, message) VALUES (?, ?, 'INFO', 'submit', ?)",
            (run_id, now(), f"{name} is the local run {content.local_run_id}, which was uploaded"),
        )
        return name

    def _arrange(self, row: Row, files: Sequence[File], lines: Sequence[Line], target: Path) -> None:
        """Link the files to where other runs have theirs; raise ApiError if two would collide."""
        shutil.rmtree(target, ignore_errors=True)
        trials = {line.rollout_id: line for line in lines}
        for number, file in enumerate(files):
            place = target / _place(file.path, trials)
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                # A link costs no space, and the uploads stay in place until the run is recorded.
                place.hardlink_to(self._file(row, number))
            except (FileExistsError, NotADirectoryError):
                raise invalid(f"{file.path} would overwrite another file", "files") from None

    def _folder(self, row: Row) -> Path:
        return self._home.folder / "imports" / str(row["id"])

    def _file(self, row: Row, number: int) -> Path:
        return self._folder(row) / str(number)


def _content(row: Row) -> ImportedEval:
    return msgspec.json.decode(row["content"], type=ImportedEval)


def _check(asked: ImportedEval) -> None:
    if not LOCAL_ID.fullmatch(asked.local_run_id):
        raise invalid("local_run_id has letters, digits, dots and dashes, up to 64", "local_run_id")
    if not RUN_NAME.fullmatch(asked.run.name):
        raise invalid(f"{asked.run.name[:100]!r} can't be a run's name", "run.name")
    evaluation = asked.run.evaluation_config
    if not 0 < evaluation.n <= 10_000:
        raise invalid("n must be from 1 to 10,000", "run.evaluation_config.n")
    names = [file.path for file in asked.files]
    if not 0 < len(names) <= MAX_FILES or len(set(names)) < len(names):
        raise invalid(f"an import has from 1 to {MAX_FILES:,} files, each once", "files")
    for name in (INDEX, PROGRESS):
        if name not in names:
            raise invalid(f"an import needs {name}", "files")
    for file in asked.files:
        path = PurePosixPath(file.path)
        # `as_posix` normalizes: another spelling of the same path would count as a second file.
        unsafe = path.is_absolute() or ".." in path.parts or path.as_posix() != file.path
        if unsafe or len(file.path) > 1024 or any(ord(letter) < 32 or letter in "\\\x7f" for letter in file.path):
            raise invalid(f"{file.path[:200]!r} can't be a file's path", "files")
        if file.size < 0 or not SHA256.fullmatch(file.sha256):
            raise invalid(f"{file.path}: size or sha256 is wrong", "files")
    if sum(file.size for file in asked.files) > MAX_BYTES:
        raise ApiError(413, f"an import has at most {MAX_BYTES >> 30} GiB", "TOO_LARGE")
    _seconds(asked.run.started_at, "started_at")
    _seconds(asked.run.completed_at, "completed_at")


def _place(path: str, trials: Mapping[str, Line]) -> str:
    """Return a file's destination: released clients send a folder per rollout, others the names of downloads."""
    first, _, rest = path.partition("/")
    rollout, _, name = rest.partition("/")
    line = trials.get(rollout)
    if first != TRIALS or line is None:
        return path
    item = f"row_{line.row_index}_run_{line.run_index}"
    if name == line.trajectory_filename:
        return f"trajectories/{item}.json"
    return f"artifacts/{item}/{name.removeprefix('artifacts/')}"


def _seconds(text: str, field: str) -> float:
    try:
        # Python 3.10 can't read a Z.
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        raise invalid(f"{text[:40]!r} isn't a time", f"run.{field}") from None
