"""The writer thread: commits all pending operations as one transaction, then wakes their callers.

A commit counts only if the file is still where readers look for it. If it was removed or replaced, or its disk fails,
the writer moves to a copy of the database, if its owner makes one. It carries out later operations there, but fails
them all.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from osmosis_ai.errors import StoreError
from osmosis_ai.store.schema import store_error

__all__ = ["Operation", "Writer"]

Operation: TypeAlias = Callable[[sqlite3.Connection], object]
"""A write inside a shared transaction. It may run twice, if another operation of its batch fails."""

Rescue: TypeAlias = Callable[[sqlite3.Connection, str], tuple[sqlite3.Connection, Path, str] | None]
"""Takes a database and its problem. Returns a connection to a copy, the copy's path, and the message of all later
errors; None if there is no copy."""

MAX_BATCH = 256


@dataclass(eq=False)
class _Waiting:
    doing: str
    operation: Operation
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    error: StoreError | None = None


class Writer:
    """Group commit: while one transaction commits, operations for the next one queue up.

    From now on, only the writer's thread uses the connection; it also closes it. It calls `rescue` at most once.

    Attributes:
        lost: The message of all errors, once the writer has moved to a copy; empty before.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, rescue: Rescue = lambda *_: None) -> None:
        self.lost = ""
        self._connection = connection
        self._path = path
        self._rescue = rescue
        self._files = _identities(path)
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        # A daemon, so that writes nobody awaits can't keep the process alive.
        self._thread = threading.Thread(target=self._run, name="osmosis-store", daemon=True)
        self._thread.start()

    async def write(self, operation: Operation, doing: str) -> None:
        """Return once the operation is committed; raise StoreError, which names what it was `doing`, if it failed.

        Cancelling the caller doesn't undo the write.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(doing, operation, loop, loop.create_future())
        with self._lock:
            if self._closed:
                raise StoreError(f"run store {self._path}: {doing} after the store was closed")
            self._queue.put(waiting)
        await waiting.future

    def close(self) -> None:
        """Finish pending writes and close the connection. Closing again does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            batch: list[_Waiting] = []
            item = self._queue.get()
            while item is not None:
                batch.append(item)
                if len(batch) == MAX_BATCH or self._queue.empty():
                    break
                item = self._queue.get()
            closing = item is None
            if batch:
                self._commit(batch)
            if self.lost:
                for waiting in batch:
                    waiting.error = waiting.error or StoreError(self.lost)
            _wake(batch)
        self._connection.close()

    def _commit(self, batch: list[_Waiting]) -> None:
        error = self._transaction(batch)
        if error is None and not self.lost and _identities(self._path) != self._files:
            # SQLite doesn't notice; a copy includes what was just committed.
            error = sqlite3.OperationalError("the file was removed or replaced")
            if self._move(error, batch):
                return
        elif isinstance(error, sqlite3.OperationalError) and not self.lost and self._move(error, batch):
            error = self._transaction(batch)
        if error is None:
            return
        # An OperationalError (disk full, locked) would hit each operation alike.
        if len(batch) == 1 or isinstance(error, sqlite3.OperationalError):
            for waiting in batch:
                known = isinstance(error, StoreError)
                waiting.error = error if known else store_error(self._path, error, waiting.doing)  # type: ignore[assignment]
                waiting.error.__cause__ = None if known else error  # type: ignore[union-attr]
        else:
            # One operation failed, for example on a duplicate record. Run each by itself, so the others succeed.
            for waiting in batch:
                self._commit([waiting])

    def _move(self, error: sqlite3.Error, batch: list[_Waiting]) -> bool:
        """Move to a copy; return False if there is none."""
        moved = self._rescue(self._connection, f"{error} while {batch[0].doing}")
        if moved is not None:
            self._connection.close()
            self._connection, self._path, self.lost = moved
        return moved is not None

    def _transaction(self, batch: list[_Waiting]) -> Exception | None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for waiting in batch:
                waiting.operation(connection)
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - raised in the waiting callers
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            return error
        return None


def _identities(path: Path) -> list[tuple[int, int] | None]:
    """Identify the files of the database that commits go to; a file that is still open keeps its number."""
    found: list[tuple[int, int] | None] = []
    for file in (path, path.with_name(f"{path.name}-wal")):
        try:
            status = file.stat()
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return found


def _wake(batch: list[_Waiting]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Waiting]] = defaultdict(list)
    for waiting in batch:
        by_loop[waiting.loop].append(waiting)
    for loop, waiters in by_loop.items():
        # A closed loop has no waiters left.
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, waiters)


def _resolve(waiters: list[_Waiting]) -> None:
    for waiting in waiters:
        # Cancelled while it waited.
        if waiting.future.done():
            continue
        if waiting.error is None:
            waiting.future.set_result(None)
        else:
            waiting.future.set_exception(waiting.error)
