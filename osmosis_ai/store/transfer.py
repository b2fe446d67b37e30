"""Copy runs between stores, and move one as a file: a store that holds nothing else."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import astuple

from osmosis_ai.errors import StoreError, UsageError
from osmosis_ai.store import tables
from osmosis_ai.store.queries import Queries, RunInfo
from osmosis_ai.store.schema import connect_reader, database_errors, open_writer

__all__ = ["SUFFIX", "copy_runs", "pull_run", "push_run", "pushed_runs", "unpacked"]

SUFFIX = ".osmosis-run"
_OF_RUN = "run = (SELECT pk FROM runs WHERE id = ?)"
_OF_ITS_ROLLOUTS = f"rollout IN (SELECT pk FROM rollouts WHERE {_OF_RUN})"  # noqa: S608 - a constant


def push_run(store: Path, run: RunInfo, folder: Path) -> Path:
    """Copy a run to a file of its own in a folder, and return the file; raise UsageError, OSError or StoreError."""
    if run.status != "finished":
        raise UsageError(f"run {run.id} is {run.status}; only a finished run can be pushed")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{run.id}{SUFFIX}"
    # In a folder of its own, because a store makes its folder private.
    with tempfile.TemporaryDirectory(prefix=".osmosis-", dir=folder) as own:
        partial = Path(own, file.name)
        with database_errors(partial, "writing it"), closing(open_writer(partial)) as db:
            _copy_run(db, store, run.id)
            # One file, without a log beside it.
            db.execute("PRAGMA journal_mode = DELETE")
        partial.replace(file)
    return file


def pull_run(store: Path, file: Path) -> tuple[str, bool]:
    """Copy the run in a file to a store; return its id, and False if the store has it already.

    Raises:
        StoreError: The file holds no run, comes from a newer version, or can't be read.
    """
    writing = database_errors(store, "writing it")
    with unpacked(file, store.parent) as (copied, run), writing, closing(open_writer(store)) as db:
        known = db.execute("SELECT 1 FROM runs WHERE id = ?", (run.id,)).fetchone() is not None
        if not known:
            _copy_run(db, copied, run.id)
    return run.id, not known


@contextmanager
def unpacked(file: Path, folder: Path) -> Iterator[tuple[Path, RunInfo]]:
    """Copy a pushed file to a store of the current version, in `folder` for the block; raises as `pull_run` does."""
    with tempfile.TemporaryDirectory(prefix=".osmosis-", dir=folder) as own:
        copied = Path(own, "run.db")
        shutil.copyfile(file, copied)
        try:
            # A file of an older version gets the current tables.
            open_writer(copied).close()
            runs = Queries(copied).list_runs(2)
        except StoreError as error:
            cause = error.__cause__ or error
            raise StoreError(f"{file} is not a pushed run, or a newer version wrote it: {cause}") from error
        if len(runs) != 1:
            raise StoreError(f"{file} is not a pushed run: it holds {len(runs)} runs")
        yield copied, runs[0]


def pushed_runs(place: Path) -> list[Path]:
    """Return the named file, or the files of pushed runs in a folder, latest first; ids begin with the time."""
    if place.is_file():
        return [place]
    return sorted(place.glob(f"*{SUFFIX}"), key=lambda file: file.name, reverse=True)


def _copy_run(db: sqlite3.Connection, store: Path, run_id: str) -> None:
    """Copy a run from another store."""
    with closing(connect_reader(store)) as source:
        query = f"SELECT {tables.select(tables.RunColumns)} FROM runs WHERE id = ?"  # noqa: S608 - our own names
        run = tables.RunColumns(*source.execute(query, (run_id,)).fetchone())
    db.execute("BEGIN IMMEDIATE")
    try:
        copy_runs(db, run, [(store, run_id)])
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def copy_runs(db: sqlite3.Connection, run: tables.RunColumns, sources: Sequence[tuple[Path, str]]) -> None:
    """Add a run with the records of runs in other stores, under keys that are free here, in the caller's transaction.

    `sources` are stores of the current version, each with the id of a run. No row is in two of the runs.
    """
    # Each record that is added is counted.
    added = msgspec.structs.replace(run, pk=0, rollouts=0, failed=0, owner_pid=None)
    pk = db.execute(tables.insert(tables.RunColumns), astuple(added)).lastrowid
    for path, run_id in sources:
        (last,) = db.execute("SELECT coalesce(max(pk), 0) FROM rollouts").fetchone()
        with closing(connect_reader(path)) as source:
            # One transaction, to read one state of all tables.
            source.execute("BEGIN")
            for kind, where, keys in (
                (tables.RowColumns, _OF_RUN, {"run": f"{pk}"}),
                (tables.RolloutColumns, _OF_RUN, {"run": f"{pk}", "pk": f"pk + {last}"}),
                (tables.TrajectoryColumns, _OF_ITS_ROLLOUTS, {"rollout": f"rollout + {last}"}),
                (tables.ScoreColumns, _OF_ITS_ROLLOUTS, {"rollout": f"rollout + {last}"}),
                (tables.JudgePromptColumns, _OF_ITS_ROLLOUTS, {"rollout": f"rollout + {last}"}),
                (tables.VerdictColumns, _OF_ITS_ROLLOUTS, {"rollout": f"rollout + {last}"}),
            ):
                # Our own names, and numbers.
                query = f"SELECT {tables.select(kind, **keys)} FROM {kind.table} WHERE {where}"  # noqa: S608
                db.executemany(tables.insert(kind), source.execute(query, (run_id,)))
