"""Move one finished run as one file: a store that holds nothing else."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from osmosis_ai.errors import StoreError, UsageError
from osmosis_ai.store.queries import Queries, RunInfo
from osmosis_ai.store.schema import database_errors, open_writer

__all__ = ["SUFFIX", "pull_run", "push_run", "pushed_runs"]

SUFFIX = ".osmosis-run"


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
            _copy(db, store, run.id)
            # One file, without a log beside it.
            db.execute("PRAGMA journal_mode = DELETE")
        partial.replace(file)
    return file


def pull_run(store: Path, file: Path) -> tuple[str, bool]:
    """Copy the run in a file to a store; return its id, and False if the store has it already.

    Raises:
        StoreError: The file holds no run, comes from a newer version, or can't be read.
    """
    with tempfile.TemporaryDirectory(prefix=".osmosis-", dir=store.parent) as own:
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
        run = runs[0].id
        with database_errors(store, "writing it"), closing(open_writer(store)) as db:
            known = db.execute("SELECT 1 FROM runs WHERE id = ?", (run,)).fetchone() is not None
            if not known:
                _copy(db, copied, run)
    return run, not known


def pushed_runs(place: Path) -> list[Path]:
    """Return the named file, or the files of pushed runs in a folder, latest first; ids begin with the time."""
    if place.is_file():
        return [place]
    return sorted(place.glob(f"*{SUFFIX}"), key=lambda file: file.name, reverse=True)


def _copy(db: sqlite3.Connection, source: Path, run: str) -> None:
    """Copy a run's records from another store, under keys that are free here."""
    db.execute("ATTACH DATABASE ? AS source", (str(source),))
    db.execute("BEGIN IMMEDIATE")
    try:
        (old,) = db.execute("SELECT pk FROM source.runs WHERE id = ?", (run,)).fetchone()
        _insert(db, "runs", {}, "pk = ?", old)
        (new,) = db.execute("SELECT pk FROM main.runs WHERE id = ?", (run,)).fetchone()
        (last,) = db.execute("SELECT coalesce(max(pk), 0) FROM main.rollouts").fetchone()
        _insert(db, "rows", {"run": str(new)}, "run = ?", old)
        _insert(db, "rollouts", {"pk": f"pk + {last}", "run": str(new)}, "run = ?", old)
        for table in ("trajectories", "scores"):
            of_run = "rollout IN (SELECT pk FROM source.rollouts WHERE run = ?)"
            _insert(db, table, {"rollout": f"rollout + {last}"}, of_run, old)
        # A trigger has counted the rollouts on top of the copied counts.
        db.execute(
            "UPDATE main.runs SET rollouts = s.rollouts, failed = s.failed, owner_pid = NULL "
            "FROM source.runs AS s WHERE main.runs.pk = ? AND s.pk = ?",
            (new, old),
        )
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
    db.execute("DETACH DATABASE source")


def _insert(db: sqlite3.Connection, table: str, keys: Mapping[str, str], where: str, old: int) -> None:
    """Copy a table's records from the attached store, with new keys; a run's own key is given by the table."""
    names = [name for (name,) in db.execute("SELECT name FROM pragma_table_info(?)", (table,))]
    copied = [name for name in names if name not in keys and (table, name) != ("runs", "pk")]
    into, values = ", ".join([*keys, *copied]), ", ".join([*keys.values(), *copied])
    # All of these are names of our own tables, and numbers.
    db.execute(f"INSERT INTO main.{table} ({into}) SELECT {values} FROM source.{table} WHERE {where}", (old,))  # noqa: S608
