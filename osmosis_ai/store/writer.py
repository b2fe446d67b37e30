"""The writer thread: commits all pending operations as one transaction, then wakes their callers."""

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

    From now on, only the writer's thread uses the connection; it also closes it.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
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
            self._commit(batch)
            _wake(batch)
        self._connection.close()

    def _commit(self, batch: list[_Waiting]) -> None:
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
