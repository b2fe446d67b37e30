"""The run store, opened for writing."""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import astuple

from osmosis_ai.errors import StoreError
from osmosis_ai.folders import store_folder
from osmosis_ai.masking import Masker
from osmosis_ai.records import Rollout, Row, Score, Verdict
from osmosis_ai.store import owners, tables
from osmosis_ai.store.codec import Encoder, decode_object
from osmosis_ai.store.live import LiveFile
from osmosis_ai.store.queries import Queries, RunInfo
from osmosis_ai.store.rescue import rescue
from osmosis_ai.store.schema import database_path, open_writer
from osmosis_ai.store.transfer import copy_runs
from osmosis_ai.store.writer import Writer
from osmosis_ai.text import counted

__all__ = ["AddedRun", "Finished", "RunStore", "new_run_id"]

_INSERT_RUN = tables.insert(tables.RunColumns, conflict="ON CONFLICT DO NOTHING")
_INSERT_ROW = tables.insert(tables.RowColumns, conflict="ON CONFLICT DO NOTHING")
_INSERT_ROLLOUT = tables.insert(tables.RolloutColumns)
_INSERT_TRAJECTORY = tables.insert(tables.TrajectoryColumns)
_INSERT_SCORE = tables.insert(tables.ScoreColumns, "INSERT OR REPLACE")
_INSERT_PROMPTS = tables.insert(tables.JudgePromptColumns)
_INSERT_VERDICT = tables.insert(tables.VerdictColumns, "INSERT OR REPLACE")
_FIND_ROLLOUT = "SELECT pk, attempt FROM rollouts WHERE run = ? AND row_id = ? AND run_index = ? AND policy = ?"


class Finished(NamedTuple):
    """A rollout that ran elsewhere. `finished_at` is in seconds since the epoch, None if unknown."""

    rollout: Rollout
    row: Row
    scores: Sequence[Score]
    finished_at: float | None


class AddedRun(NamedTuple):
    """The description of a run that ran elsewhere. Times are in seconds since the epoch, None if unknown."""

    status: tables.RunStatus
    created_at: float | None
    finished_at: float | None
    config: Mapping[str, Any]
    summary: Mapping[str, Any]


def new_run_id() -> str:
    """Return an id for a run: the local time, as in lists of runs, and a few random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class RunStore(Queries):
    """A repository's runs. One thread writes; queries read at the same time.

    A write is durable once its coroutine returns: it survives a kill of this process and a power failure. Several
    processes may write to one store at once.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, masker: Masker) -> None:
        super().__init__(path)
        self._writer = Writer(connection, path, self._rescue)
        self._encoder = Encoder(masker)
        self._owned: dict[str, owners.Ownership] = {}

    @classmethod
    def open(
        cls, root: Path, *, folder: Path | None = None, masker: Masker | None = None, create: bool = True
    ) -> RunStore:
        """Open the store of the repository at `root`, in `folder` if given; see `store_folder`.

        Raises StoreError if it can't be used, or doesn't exist and `create` is False.
        """
        path = database_path(folder or store_folder(root))
        if not create and not path.exists():
            raise StoreError(f"there are no runs: {path} doesn't exist; `osmosis test` and `osmosis eval` create it")
        return cls(path, open_writer(path), masker or Masker())

    @property
    def path(self) -> Path:
        """The database."""
        return self._path

    @property
    def lost(self) -> bool:
        """True once the file can no longer be written; every write's error then names a copy of the store."""
        return bool(self._writer.lost)

    def close(self) -> None:
        """Finish pending writes, close the file, and give up the runs that this process owns."""
        self._writer.close()
        for run_id in list(self._owned):
            self._disown(run_id)

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def create_run(
        self, command: str, *, identity: Mapping[str, Any], config: Mapping[str, Any], run_id: str | None = None
    ) -> str:
        """Create a run that this process writes, and return its unique id: `run_id`, if no other run has it.

        A run can be resumed only with the same `identity`; `config` holds everything else worth recording. Both are
        JSON-able.
        """
        run = self._encoder.run(command, identity, config)

        def write(db: sqlite3.Connection) -> None:
            run.created_at = time.time()
            run.id = run_id or new_run_id()
            # Two processes may draw the same id within a second; the insert then adds nothing.
            while not db.execute(_INSERT_RUN, astuple(run)).rowcount:
                run.id = new_run_id()
            self._own(db, run.id)

        await self._writer.write(write, "creating a run")
        return run.id

    async def join_runs(
        self, sources: Sequence[tuple[Path, RunInfo]], *, config: Mapping[str, Any], summary: Mapping[str, Any]
    ) -> str:
        """Create a run with the records of the shards of a run, all or nothing, and return its id.

        `sources` are databases of the current version, each with one of the shards. The run is finished if all of them
        are; `config` and `summary` are its own.
        """
        infos = [info for _, info in sources]
        identity = {name: value for name, value in infos[0].identity.items() if name != "shard"}
        finished = all(info.status == "finished" for info in infos)
        run = self._encoder.run(infos[0].command, identity, config)
        run.status = "finished" if finished else "interrupted"
        run.created_at = min(info.created_at for info in infos)
        run.finished_at = max((info.finished_at for info in infos if info.finished_at is not None), default=None)
        run.summary = self._encoder.json(summary)

        def write(db: sqlite3.Connection) -> None:
            run.id = new_run_id()
            while db.execute("SELECT 1 FROM runs WHERE id = ?", (run.id,)).fetchone():
                run.id = new_run_id()
            copy_runs(db, run, [(path, info.id) for path, info in sources])

        await self._writer.write(write, f"merging {counted(len(sources), 'run')}")
        return run.id

    async def add_run(self, read: Callable[[], Iterator[Finished]], close: Callable[[], AddedRun]) -> str:
        """Create a run of rollouts that ran elsewhere, all or nothing, and return its id.

        `read` starts from the beginning whenever it is called, and `close` is called once all of it was read.
        """
        encoder = self._encoder
        made = ""

        def write(db: sqlite3.Connection) -> None:
            nonlocal made
            run = encoder.run("import", {}, {})
            run.created_at = time.time()
            run.id = new_run_id()
            while not db.execute(_INSERT_RUN, astuple(run)).rowcount:
                run.id = new_run_id()
            pk = self._pk(db, run.id)
            for rollout, row, scores, finished_at in read():
                columns, row_columns = encoder.rollout(rollout), encoder.row(row)
                columns.run = row_columns.run = pk
                if finished_at is not None:
                    columns.finished_at = finished_at
                    columns.started_at = finished_at - rollout.duration_ms / 1000
                db.execute(_INSERT_ROW, astuple(row_columns))
                key = db.execute(_INSERT_ROLLOUT, astuple(columns)).lastrowid or 0
                db.execute(_INSERT_TRAJECTORY, (key, encoder.trajectory(rollout)))
                db.executemany(_INSERT_SCORE, [astuple(encoder.score(score, rollout=key)) for score in scores])
            about = close()
            db.execute(
                "UPDATE runs SET status = ?, created_at = ?, finished_at = ?, config = ?, summary = ? WHERE pk = ?",
                (
                    about.status,
                    about.created_at or run.created_at,
                    about.finished_at or about.created_at or run.created_at,
                    encoder.json(about.config),
                    encoder.json(about.summary),
                    pk,
                ),
            )
            made = run.id

        await self._writer.write(write, "importing a run")
        return made

    async def resume_run(self, run_id: str) -> None:
        """Take over an unfinished run, and set it to `running` again.

        Raises StoreError if it doesn't exist, or another process is working on it.
        """

        def write(db: sqlite3.Connection) -> None:
            self._own(db, run_id)
            db.execute(
                "UPDATE runs SET status = 'running', finished_at = NULL, owner_pid = ? WHERE id = ?",
                (os.getpid(), run_id),
            )

        await self._writer.write(write, f"resuming run {run_id}")

    async def save_rollout(self, run_id: str, rollout: Rollout, row: Row, *, replace: bool = False) -> int:
        """Record a rollout, the reward from its agent loop, and, the first time, its row.

        With `replace` it replaces an earlier record of the same policy, row and run index, and deletes that record's
        scores; otherwise an earlier record stays, and the write fails. Returns the rollout's key in this file, by which
        scorers find it. Raises StoreError if the rollout was not recorded.
        """
        encoder = self._encoder
        columns, trajectory, row_columns = encoder.rollout(rollout), encoder.trajectory(rollout), encoder.row(row)
        own = encoder.score(rollout.agent.score) if rollout.agent is not None and rollout.agent.score else None
        saved = 0

        def write(db: sqlite3.Connection) -> None:
            nonlocal saved
            columns.run = row_columns.run = self._pk(db, run_id)
            if replace:
                key = (columns.run, columns.row_id, columns.run_index, columns.policy)
                # The new record keeps the old one's key.
                columns.pk, before = db.execute(_FIND_ROLLOUT, key).fetchone() or (0, 0)
                columns.attempt = before + 1
                db.execute("DELETE FROM rollouts WHERE pk = ?", (columns.pk,))
            db.execute(_INSERT_ROW, astuple(row_columns))
            saved = db.execute(_INSERT_ROLLOUT, astuple(columns)).lastrowid or 0
            db.execute(_INSERT_TRAJECTORY, (saved, trajectory))
            if own is not None:
                own.rollout = saved
                db.execute(_INSERT_SCORE, astuple(own))

        await self._writer.write(write, f"saving rollout {rollout.id}")
        return saved

    async def save_report(self, run_id: str, rollout: Rollout) -> None:
        """Replace a recorded rollout's end, its report by the repository's own agent code, and the score in the report.

        Raises StoreError if the change was not recorded.
        """
        report = rollout.agent
        assert report is not None
        trajectory = self._encoder.trajectory(rollout)
        own = None if report.score is None else self._encoder.score(report.score)

        def write(db: sqlite3.Connection) -> None:
            key = (self._pk(db, run_id), rollout.row_id, rollout.run_index, rollout.policy)
            pk, _ = db.execute(_FIND_ROLLOUT, key).fetchone()
            db.execute("UPDATE rollouts SET finish_reason = ? WHERE pk = ?", (rollout.finish_reason, pk))
            db.execute("UPDATE trajectories SET data = ? WHERE rollout = ?", (trajectory, pk))
            db.execute("DELETE FROM scores WHERE rollout = ? AND function = ?", (pk, report.name))
            if own is not None:
                own.rollout = pk
                db.execute(_INSERT_SCORE, astuple(own))

        await self._writer.write(write, f"saving the grading of rollout {rollout.id}")

    async def save_scores(
        self, scores: Mapping[int, Sequence[Score]], *, code: Mapping[str, str] | None = None
    ) -> None:
        """Record scores of recorded rollouts, all or none; they replace earlier scores by the same functions.

        `scores` maps rollout keys, from `save_rollout` or `unscored`, to scores. `code` maps functions to the hash of
        their code, by which `unscored` finds stale scores. Raises StoreError if the scores were not recorded, for
        example because a rollout was removed.
        """
        code = code or {}
        values = [
            astuple(self._encoder.score(score, code.get(score.function), key))
            for key, its_scores in scores.items()
            for score in its_scores
        ]

        prompts = [
            astuple(self._encoder.judge_prompts(score, key))
            for key, its_scores in scores.items()
            for score in its_scores
            if score.judge_calls
        ]

        def write(db: sqlite3.Connection) -> None:
            # What replaces a score removes its prompts.
            db.executemany(_INSERT_SCORE, values)
            db.executemany(_INSERT_PROMPTS, prompts)

        await self._writer.write(write, f"saving the scores of {counted(len(scores), 'rollout')}")

    async def save_verdict(self, run_id: str, rollout_id: str, verdict: Verdict | None) -> None:
        """Record a user's verdict on a recorded rollout, replacing an earlier one; None removes it.

        Another process may be writing the run. Raises StoreError if the rollout no longer exists, for example because
        it was run again, or if the verdict was not recorded.
        """
        columns = None if verdict is None else self._encoder.verdict(verdict)

        def write(db: sqlite3.Connection) -> None:
            key = (self._pk(db, run_id), rollout_id)
            found = db.execute("SELECT pk FROM rollouts WHERE run = ? AND id = ?", key).fetchone()
            if found is None:
                raise StoreError(f"this rollout of run {run_id} was run again or removed; look at what is there now")
            if columns is None:
                db.execute("DELETE FROM verdicts WHERE rollout = ?", found)
            else:
                (columns.rollout,) = found
                db.execute(_INSERT_VERDICT, astuple(columns))

        await self._writer.write(write, "saving a verdict")

    async def mark(self, run_id: str, status: tables.RunStatus, summary: Mapping[str, Any] | None = None) -> None:
        """Set a run's status, and its summary if given. The recorded time changes only with the status."""
        text = None if summary is None else self._encoder.json(summary)

        def write(db: sqlite3.Connection) -> None:
            finished_at = None if status == "running" else time.time()
            db.execute(
                "UPDATE runs SET finished_at = CASE WHEN status = ?1 THEN finished_at ELSE ?2 END, "
                "status = ?1, summary = coalesce(?3, summary) WHERE pk = ?4",
                (status, finished_at, text, self._pk(db, run_id)),
            )

        await self._writer.write(write, f"marking run {run_id} as {status}")
        if status != "running":
            self._disown(run_id)

    def live_file(self, run_id: str) -> LiveFile:
        """Return the file that holds a running run's current progress."""
        return LiveFile(self._path, run_id, self._encoder.json)

    async def check(self) -> None:
        """Raise StoreError if the file can't be written; unlike a read, a write notices a deleted file."""
        await self._writer.write(lambda _: None, "checking the file")

    async def delete_run(self, run_id: str) -> None:
        """Delete a run with all its records, and return the space to the disk.

        Raises StoreError if it doesn't exist, or another process is working on it.
        """

        def write(db: sqlite3.Connection) -> None:
            self._own(db, run_id)
            db.execute("DELETE FROM runs WHERE id = ?", (run_id,))
            (free_pages,) = db.execute("PRAGMA freelist_count").fetchone()
            for _ in range(free_pages):
                # Python takes a single step of this statement, and a step frees a single page.
                db.execute("PRAGMA incremental_vacuum")

        await self._writer.write(write, f"deleting run {run_id}")
        self._disown(run_id)

    def differences(self, run: RunInfo, identity: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Map the names, sorted, whose values differ between a run's identity and another one, to both values."""
        # Masked and encoded like the stored identity, or masked values would seem to differ.
        other = decode_object(self._encoder.json(identity))
        return {
            name: (run.identity.get(name), other.get(name))
            for name in sorted(run.identity.keys() | other.keys())
            if name not in run.identity or name not in other or run.identity[name] != other[name]
        }

    def _rescue(self, db: sqlite3.Connection, problem: str) -> tuple[sqlite3.Connection, Path, str] | None:
        """Copy the store, if this process has records of a run to lose."""
        run_id = next(iter(self._owned), None)
        moved = None if run_id is None else rescue(db, self._path, run_id)
        if moved is None:
            return None
        copy, path = moved
        message = (
            f"run store {self._path}: {problem}; every record, also the last ones, is in {path.parent}: "
            f"`osmosis runs --store {path.parent}` shows them, and --resume --store {path.parent} continues the run"
        )
        return copy, path, message

    def _own(self, db: sqlite3.Connection, run_id: str) -> None:
        """Become the owner of a run; raise StoreError if it doesn't exist, or another process owns it."""
        (pid,) = db.execute("SELECT owner_pid FROM runs WHERE pk = ?", (self._pk(db, run_id),)).fetchone()
        if run_id in self._owned:
            return
        owned = owners.own(self._path, run_id)
        if owned is None:
            raise StoreError(f"run {run_id} is being written by process {pid}; end that first, or wait for it")
        self._owned[run_id] = owned

    def _disown(self, run_id: str) -> None:
        owned = self._owned.pop(run_id, None)
        if owned is not None:
            owned.release()
