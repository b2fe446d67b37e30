"""The run store's file: its path, its tables, and the migrations of older files."""

from __future__ import annotations

import itertools
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from osmosis_ai.errors import StoreError
from osmosis_ai.folders import private_file, private_folder

__all__ = [
    "MIGRATIONS",
    "configure",
    "connect_reader",
    "database_errors",
    "database_path",
    "migrate",
    "open_reader",
    "open_writer",
    "store_error",
]

BUSY_SECONDS = 60.0
"""Seconds to wait for another process that is writing."""

_VERSION_1 = (
    """
    CREATE TABLE runs (
        pk INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        command TEXT NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('running', 'finished', 'interrupted', 'failed')),
        created_at REAL NOT NULL,       -- seconds since the epoch, like every time of day here
        finished_at REAL,
        owner_pid INTEGER,              -- the process that writes the run, while its status is 'running'
        owner_started REAL,
        identity TEXT NOT NULL,         -- JSON objects
        config TEXT NOT NULL,
        summary TEXT,
        rollouts INTEGER NOT NULL DEFAULT 0,
        failed INTEGER NOT NULL DEFAULT 0
    )
    """,
    "CREATE INDEX runs_created ON runs (created_at)",
    """
    CREATE TABLE rows (
        run INTEGER NOT NULL REFERENCES runs (pk) ON DELETE CASCADE,
        row_id TEXT NOT NULL,
        row_index INTEGER NOT NULL,
        data BLOB NOT NULL,
        UNIQUE (run, row_id)
    )
    """,
    """
    CREATE TABLE rollouts (
        pk INTEGER PRIMARY KEY,
        run INTEGER NOT NULL REFERENCES runs (pk) ON DELETE CASCADE,
        id TEXT NOT NULL,
        row_index INTEGER NOT NULL,
        row_id TEXT NOT NULL,
        run_index INTEGER NOT NULL,
        policy TEXT NOT NULL,
        finish_reason TEXT NOT NULL,
        duration_ms REAL NOT NULL,
        failure_origin TEXT,            -- NULL: no failure
        failure_kind TEXT,
        failure_message TEXT,
        failure_file TEXT,
        failure_line INTEGER,
        failure_detail TEXT,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        total_tokens INTEGER NOT NULL,
        cost_usd REAL,
        turns INTEGER NOT NULL,
        tool_calls INTEGER NOT NULL,
        requests INTEGER NOT NULL,      -- sent to the model, retries included
        attempt INTEGER NOT NULL,       -- 2 when this record replaced a first one
        started_at REAL NOT NULL,
        finished_at REAL NOT NULL,
        calls TEXT NOT NULL,            -- JSON: name, milliseconds and error of each tool call
        UNIQUE (run, row_id, run_index, policy),
        UNIQUE (run, id)
    )
    """,
    "CREATE INDEX rollouts_in_order ON rollouts (run, row_index, run_index, policy)",
    # Apart from `rollouts`, so that lists and statistics never read the pages of the trajectories.
    """
    CREATE TABLE trajectories (
        rollout INTEGER PRIMARY KEY REFERENCES rollouts (pk) ON DELETE CASCADE,
        data BLOB NOT NULL
    )
    """,
    """
    CREATE TABLE scores (
        rollout INTEGER NOT NULL REFERENCES rollouts (pk) ON DELETE CASCADE,
        function TEXT NOT NULL,
        value REAL,
        failure TEXT,                   -- JSON object
        duration_ms REAL NOT NULL,
        explanation TEXT,
        judge_calls TEXT,               -- JSON list, NULL when no judge was asked
        code_hash TEXT,
        PRIMARY KEY (rollout, function),
        CHECK ((value IS NULL) <> (failure IS NULL))
    ) WITHOUT ROWID
    """,
    # Counted here, so that a list of runs costs the same however large they are.
    """
    CREATE TRIGGER rollout_added AFTER INSERT ON rollouts BEGIN
        UPDATE runs SET rollouts = rollouts + 1, failed = failed + (NEW.failure_origin IS NOT NULL) WHERE pk = NEW.run;
    END
    """,
    """
    CREATE TRIGGER rollout_removed AFTER DELETE ON rollouts BEGIN
        UPDATE runs SET rollouts = rollouts - 1, failed = failed - (OLD.failure_origin IS NOT NULL) WHERE pk = OLD.run;
    END
    """,
)

# Runs are ordered by key and owned by a lock. A program that still goes by their times must not write here.
_VERSION_2 = ("DROP INDEX runs_created",)

# Both belong to what was seen: a rollout that is run again loses its verdict, a new score the old one's prompts.
_VERSION_3 = (
    """
    CREATE TABLE verdicts (
        rollout INTEGER PRIMARY KEY REFERENCES rollouts (pk) ON DELETE CASCADE,
        value INTEGER NOT NULL CHECK (value IN (0, 1)),
        note TEXT
    )
    """,
    """
    CREATE TABLE judge_prompts (
        rollout INTEGER NOT NULL,
        function TEXT NOT NULL,
        data BLOB NOT NULL,
        UNIQUE (rollout, function),
        FOREIGN KEY (rollout, function) REFERENCES scores (rollout, function) ON DELETE CASCADE
    )
    """,
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1, _VERSION_2, _VERSION_3)
"""Statements that migrate each schema version to the next. Never edit a released one; add a new one."""


def database_path(folder: Path) -> Path:
    """Return the path of the database in a folder from `store_folder`."""
    return folder.resolve() / "runs.db"


def open_writer(path: Path) -> sqlite3.Connection:
    """Open a connection for writing; create the file or migrate it to the current schema version.

    Raises StoreError if the file or its folder can't be used, or a newer version of the package wrote it.
    """
    try:
        private_folder(path.parent)
        # SQLite gives its other files the mode of this one.
        private_file(path)
    except OSError as error:
        raise StoreError(
            f"can't keep runs in {path.parent}: {error.strerror}; "
            f"make {path.parent.parent} writable, or name another folder with --store DIR"
        ) from error
    with database_errors(path, "opening it"):
        # This thread opens the file, so that errors are raised here; the writer's thread uses it.
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            configure(connection)
            migrate(connection, path, MIGRATIONS)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def open_reader(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection for one query, and translate the errors of the block."""
    with database_errors(path, "reading it"):
        connection = connect_reader(path)
        try:
            yield connection
        finally:
            connection.close()


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection, which the caller closes; raise sqlite3.Error."""
    # A streaming query is a generator, which may be advanced or closed in another thread than it was made in.
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        version = _version(connection)
        # Reading doesn't migrate. To a reader, the tables that an older file lacks are empty.
        for statement in itertools.chain(*MIGRATIONS[version:]) if version else ():
            if "CREATE TABLE" in statement:
                connection.execute(statement.replace("CREATE TABLE", "CREATE TEMP TABLE"))
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[Sequence[str]]) -> None:
    """Migrate a file to the latest version (from version 0 to 1, from 1 to 2, …), each step in its own transaction;
    raise StoreError if the file is newer.
    """
    while (version := _version(connection)) < len(migrations):
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have done this step while this one waited for the lock.
            if _version(connection) == version:
                for statement in migrations[version]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    if version > len(migrations):
        raise StoreError(
            f"{path} was written by a newer version of osmosis-ai (schema {version}, this version supports "
            f"{len(migrations)}); upgrade with: pip install -U osmosis-ai"
        )


@contextmanager
def database_errors(path: Path, doing: str) -> Iterator[None]:
    """Translate SQLite's errors in the block into a StoreError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(path, error, doing) from error
    except (zlib.error, msgspec.DecodeError) as error:
        raise StoreError(f"run store {path}: a record is damaged: {error}") from error


def store_error(path: Path, error: Exception, doing: str) -> StoreError:
    """Make a StoreError from SQLite's error; `doing` completes the sentence "… while"."""
    text = str(error)
    if "unable to open" in text and _is_missing(path):
        return StoreError(f"there are no runs: {path} doesn't exist; `osmosis test` and `osmosis eval` create it")
    # Matched by text, because Python 3.10 doesn't give the error's code.
    for words, advice in _ADVICE.items():
        if words in text:
            return StoreError(f"run store {path}: {text} while {doing}; {advice.format(path=path, folder=path.parent)}")
    return StoreError(f"run store {path}: {text} while {doing}")


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


_ADVICE = {
    "not a database": "move {path} away and run again, which creates a new one",
    "malformed": "the file is damaged: move {path} away and run again, which creates a new one",
    "readonly": "make {folder} and the files in it writable",
    "unable to open": "make {folder} and the files in it readable and writable",
    "disk is full": "free some space; all work reported as done is stored, and --resume continues the run",
    "disk I/O error": "check the disk's space, quota and health; all work reported as done is stored",
    "removed or replaced": "put it back, or run again",
    "locked": "another process has been writing for a long time; end it or try again",
}


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def configure(connection: sqlite3.Connection) -> None:
    """Set up a connection for writing: write-ahead log, durable commits, foreign keys."""
    if _version(connection) == 0:
        # Both affect only a new file. A typical trajectory wastes less of an 8 KiB page than of the default 4 KiB.
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            # SQLite's own timeout doesn't apply here when another process makes the same change.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    # A killed process loses no commit under NORMAL either; with FULL, commits also survive a power failure.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    # Otherwise the write-ahead log keeps its largest size on disk.
    connection.execute("PRAGMA journal_size_limit = 67108864")
