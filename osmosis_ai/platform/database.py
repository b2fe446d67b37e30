"""The platform's database. A write that a request has acknowledged survives a kill and a power failure."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from osmosis_ai.errors import StoreError
from osmosis_ai.folders import private_file
from osmosis_ai.store.schema import configure, database_errors, migrate

__all__ = ["Database"]

BUSY_SECONDS = 60.0
"""How long to wait for another process, such as `osmosis platform token`, that is writing."""

_VERSION_1 = (
    """
    CREATE TABLE users (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        email TEXT NOT NULL,
        created_at REAL NOT NULL        -- seconds since the epoch, like every time here
    )
    """,
    """
    CREATE TABLE tokens (
        id TEXT PRIMARY KEY,
        user TEXT NOT NULL REFERENCES users (id),
        label TEXT NOT NULL,
        hash BLOB NOT NULL UNIQUE,      -- of the token, which is stored nowhere
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL
    )
    """,
    """
    CREATE TABLE devices (
        code BLOB PRIMARY KEY,          -- the hash of what the device holds
        user_code TEXT NOT NULL UNIQUE, -- what its user reads out
        name TEXT NOT NULL,
        user TEXT,                      -- whose token it gets, once that is approved
        expires_at REAL NOT NULL
    )
    """,
    """
    CREATE TABLE workspaces (
        id TEXT PRIMARY KEY,
        identity TEXT NOT NULL UNIQUE,  -- owner/repo, or local/folder-hash
        remote TEXT,                    -- the URL of its origin
        path TEXT,                      -- its folder on this machine
        created_at REAL NOT NULL
    )
    """,
    """
    CREATE TABLE secrets (
        id TEXT PRIMARY KEY,
        workspace TEXT NOT NULL REFERENCES workspaces (id),
        owner TEXT NOT NULL,            -- a user; '' for those of the workspace
        name TEXT NOT NULL,
        value BLOB NOT NULL,            -- encrypted
        creator TEXT NOT NULL REFERENCES users (id),
        updater TEXT NOT NULL REFERENCES users (id),
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        UNIQUE (workspace, owner, name)
    )
    """,
    """
    CREATE TABLE datasets (
        pk INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        workspace TEXT NOT NULL REFERENCES workspaces (id),
        name TEXT NOT NULL,
        format TEXT NOT NULL,
        size INTEGER NOT NULL,
        status TEXT NOT NULL,
        replaces TEXT,                  -- the dataset that this upload takes the place of
        error TEXT,
        sha256 TEXT,                    -- names the file
        row_count INTEGER,
        preview TEXT,                   -- JSON: the first rows
        statistics TEXT,                -- JSON: of each column
        creator TEXT NOT NULL REFERENCES users (id),
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL
    )
    """,
    "CREATE UNIQUE INDEX datasets_named ON datasets (workspace, name) WHERE status = 'uploaded'",
    "CREATE INDEX datasets_of_a_file ON datasets (sha256)",
    """
    CREATE TABLE runs (
        pk INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        workspace TEXT NOT NULL REFERENCES workspaces (id),
        kind TEXT NOT NULL CHECK (kind IN ('eval', 'training')),
        name TEXT NOT NULL,
        status TEXT NOT NULL,
        creator TEXT NOT NULL REFERENCES users (id),
        model TEXT NOT NULL,
        rollout TEXT NOT NULL,
        dataset TEXT NOT NULL,          -- its id; the name is kept, because it can get another file
        dataset_name TEXT NOT NULL,
        dataset_sha256 TEXT NOT NULL,
        document TEXT NOT NULL,         -- JSON: the run config as it was submitted
        sources TEXT NOT NULL,          -- JSON: where its code may be fetched from
        provided BLOB,                  -- secrets for this run only, encrypted; gone when it ends
        seed INTEGER NOT NULL,          -- of the sample of rows
        row_numbers TEXT,               -- the rows of the sample
        commit_sha TEXT,
        branch TEXT,
        scopes TEXT,                    -- JSON: where each secret came from
        results TEXT,                   -- JSON
        stopping INTEGER NOT NULL DEFAULT 0,
        retrying INTEGER NOT NULL DEFAULT 0,    -- run failed rollouts again
        losses INTEGER NOT NULL DEFAULT 0,
        imported INTEGER NOT NULL DEFAULT 0,    -- it ran elsewhere
        created_at REAL NOT NULL,
        started_at REAL,
        completed_at REAL,
        UNIQUE (workspace, kind, name)
    )
    """,
    "CREATE INDEX runs_listed ON runs (workspace, kind, pk)",
    "CREATE INDEX runs_to_do ON runs (status) WHERE status IN ('pending', 'queued', 'running')",
    """
    CREATE TABLE submissions (
        user TEXT NOT NULL REFERENCES users (id),
        key TEXT NOT NULL,              -- the header Idempotency-Key
        digest BLOB NOT NULL,
        run TEXT NOT NULL REFERENCES runs (id),
        PRIMARY KEY (user, key)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE imports (
        id TEXT PRIMARY KEY,
        workspace TEXT NOT NULL REFERENCES workspaces (id),
        local_run_id TEXT NOT NULL,
        creator TEXT NOT NULL REFERENCES users (id),
        content TEXT NOT NULL,          -- JSON: the run and its files, as announced
        run TEXT REFERENCES runs (id),
        finalized INTEGER NOT NULL DEFAULT 0,
        created_at REAL NOT NULL,
        UNIQUE (workspace, local_run_id)
    )
    """,
    """
    CREATE TABLE logs (
        pk INTEGER PRIMARY KEY,
        subject TEXT NOT NULL,          -- the id of a run or dataset
        at REAL NOT NULL,
        level TEXT NOT NULL,
        step TEXT NOT NULL,
        message TEXT NOT NULL,
        details TEXT                    -- JSON object
    )
    """,
    "CREATE INDEX logs_in_order ON logs (subject, pk)",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1,)
"""Statements that migrate each schema version to the next. Never edit a released one; add a new one."""

Row = sqlite3.Row


class Database:
    """Connections to the database: one for writing, behind a lock, and one per thread for reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._local = threading.local()
        private_file(path)
        with database_errors(path, "opening it"):
            self._writer = self._connect(path.as_posix(), uri=False)
            configure(self._writer)
            migrate(self._writer, path, MIGRATIONS)

    def close(self) -> None:
        """Close the writing connection; the reading ones end with their threads."""
        with self._lock:
            self._writer.close()

    @contextmanager
    def write(self, doing: str) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction, which is durable once the block ends; raise StoreError.

        `doing` names the operation in error messages, such as "creating a token".
        """
        with self._lock, database_errors(self._path, doing):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # SQLite rolls back by itself after some errors, such as a full disk.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def all(self, query: str, *values: Any) -> list[Row]:
        """Return the rows of a query; raise StoreError."""
        with database_errors(self._path, "reading it"):
            rows: list[Row] = self._reader().execute(query, values).fetchall()
            return rows

    def one(self, query: str, *values: Any) -> Row | None:
        """Return the first row of a query, None if there is none; raise StoreError."""
        return next(iter(self.all(query, *values)), None)

    def count(self, query: str, *values: Any) -> int:
        """Return the single number that a query selects; raise StoreError."""
        row = self.one(query, *values)
        assert row is not None
        return int(row[0])

    def backup(self, target: Path) -> None:
        """Write a consistent copy of the database to a file; raise StoreError."""
        private_file(target)
        with database_errors(target, "writing the backup"):
            copy = sqlite3.connect(target)
            try:
                self._reader().backup(copy)
            finally:
                copy.close()

    def _reader(self) -> sqlite3.Connection:
        reader: sqlite3.Connection | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = self._connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)
        return reader

    def _connect(self, name: str, *, uri: bool) -> sqlite3.Connection:
        try:
            # Without an isolation level, Python begins no transaction of its own. `_lock` lets any thread write.
            connection = sqlite3.connect(
                name, uri=uri, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error
        connection.row_factory = sqlite3.Row
        return connection
