"""The reply cache: answers a repeated request of the same attempt from `.osmosis/cache.db` instead of the model.

Any number of worker processes share the file. Each reads on its event loop, which takes microseconds because readers of
a write-ahead log never wait for writers, and writes from a thread of its own.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from osmosis_ai.errors import StartError, StoreError
from osmosis_ai.folders import private_file, private_folder
from osmosis_ai.masking import Masker
from osmosis_ai.models.base import ChatModel, Listen, streamed
from osmosis_ai.models.engines import load_engine
from osmosis_ai.records import Completion, JsonObject, Message, ModelSpec, Record, Tool
from osmosis_ai.store.schema import configure, database_path, migrate
from osmosis_ai.store.writer import Writer
from osmosis_ai.token_data import from_older_form

__all__ = [
    "CacheContents",
    "CachedModel",
    "ReplyCache",
    "cache_contents",
    "cache_path",
    "clear_cache",
    "open_cache",
    "prepare_cache",
]

LIMIT_BYTES = 1 << 30
"""Bytes in use beyond which replies are pruned, at the start of a run only: within a run the cache may grow further."""
KEPT_SHARE = 0.8
"""Share of the limit that pruning keeps, so that it isn't due again at once."""
ENTRY_OVERHEAD = 150  # bytes: its key twice (table and index), times, headers
KEY_VERSION = 1
"""Part of every key; raise it when the meaning of a stored reply changes."""

START_BUSY_SECONDS = 60.0
"""Seconds that a command waits while another process prunes or clears the cache."""
WRITE_BUSY_SECONDS = 10.0
"""Seconds that a worker's writer thread waits for the lock; the rollout waits with it."""
READ_BUSY_SECONDS = 0.5
"""Seconds that a lookup waits for the lock; it blocks the worker's event loop."""
PENDING_USES = 64
"""Keys with unwritten hits after which they are written."""

_MIGRATIONS = (
    (
        """
        CREATE TABLE replies (
            key BLOB PRIMARY KEY,           -- SHA-256 of the request: prompts are not stored
            used_at REAL NOT NULL,          -- seconds since the epoch
            hits INTEGER NOT NULL DEFAULT 0,
            data BLOB NOT NULL              -- the Completion as JSON
        )
        """,
    ),
)
# Another worker may have stored a reply to the same request meanwhile; the first one counts.
_INSERT = "INSERT OR IGNORE INTO replies (key, used_at, data) VALUES (?, ?, ?)"
# `max`, because workers write their hits late and in any order.
_USE = "UPDATE replies SET used_at = max(used_at, ?), hits = hits + ? WHERE key = ?"
# Free pages don't count: a pruned file keeps its size but fills them again.
_USED = "SELECT page_size, page_count - freelist_count FROM pragma_page_size, pragma_page_count, pragma_freelist_count"
_CONTENTS = "SELECT count(*), coalesce(sum(length(data)), 0), coalesce(sum(hits), 0) FROM replies"
_PRUNE = """
    DELETE FROM replies WHERE key IN (
        SELECT key FROM (
            SELECT key, sum(length(data) + ?) OVER (ORDER BY used_at DESC, key) AS total FROM replies
        ) WHERE total > ?
    )
"""

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_decoder = msgspec.json.Decoder(Completion)


class CacheContents(Record, frozen=True):
    """The contents of a cache: the number of replies, their size in bytes, and the requests they saved."""

    entries: int = 0
    bytes: int = 0
    hits: int = 0


def cache_path(folder: Path) -> Path:
    """Return the cache file in a folder from `store_folder`."""
    return database_path(folder).with_name("cache.db")


def prepare_cache(folder: Path, *, limit: int = LIMIT_BYTES) -> Path:
    """Check before a run that the cache in a folder from `store_folder` is usable, and return its file. Create it if
    there is none; if it exceeds `limit` bytes, drop the least recently used replies.

    Raises:
        StartError: The cache can't be used; the message says what to do.
    """
    path = cache_path(folder)
    try:
        private_folder(path.parent)
        private_file(path)
    except OSError as error:
        raise StartError(
            f"can't keep replies in {path.parent}: {error.strerror}; make {path.parent.parent} writable, "
            "or leave the cache out with --no-cache"
        ) from error
    try:
        with closing(_connect(path, START_BUSY_SECONDS)) as connection, _transaction(connection):
            # Only a write reveals that a file is read-only.
            connection.execute("DELETE FROM replies WHERE key = x''")
            if math.prod(connection.execute(_USED).fetchone()) > limit:
                connection.execute(_PRUNE, (ENTRY_OVERHEAD, int(limit * KEPT_SHARE)))
    except (sqlite3.Error, StoreError) as error:
        raise StartError(
            f"the reply cache {path} can't be used: {error}; {_advice(error, path)}, or leave it out with --no-cache"
        ) from error
    return path


def open_cache(path: Path, masker: Masker) -> ReplyCache | None:
    """Open a cache that `prepare_cache` has checked, in the process and thread that will use it.

    If it has become unusable since, return None and report that on stderr: the run continues without it.
    """
    try:
        return ReplyCache(path, masker)
    except (sqlite3.Error, StoreError, OSError) as error:
        _report(path, error)
        return None


class ReplyCache:
    """Stored replies by key. An error of the file never raises: it is reported on stderr once, and the cache then finds
    and stores nothing. Replies that contain a key known to the masker aren't stored either.
    """

    def __init__(self, path: Path, masker: Masker) -> None:
        self._path = path
        self._masker = masker
        self._uses: Counter[bytes] = Counter()
        self._broken = False
        # Two connections, because the writer's thread may be in a transaction while the event loop reads.
        self._reader = _connect(path, READ_BUSY_SECONDS)
        self._writer = Writer(_connect(path, WRITE_BUSY_SECONDS), path)

    async def get(self, key: bytes) -> Completion | None:
        """Return the stored reply, marked as cached and with no attempt counted, or None."""
        if self._broken:
            return None
        try:
            found = self._reader.execute("SELECT data FROM replies WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            completion = _decode(found[0])
        except (sqlite3.Error, msgspec.DecodeError) as error:
            self._give_up(error)
            return None
        # Hits are written in batches: a write for each would cost more than the lookup.
        self._uses[key] += 1
        if len(self._uses) >= PENDING_USES:
            await self._note_uses()
        return msgspec.structs.replace(completion, cached=True, attempts=0)

    async def put(self, key: bytes, completion: Completion) -> None:
        """Store a reply, unless the key has one already or the reply wouldn't survive the round trip through JSON.

        Returns once it is written, so that a paid reply survives this process.
        """
        data = None if self._broken else _stored_form(completion, self._masker)
        if data is not None:
            now = time.time()
            await self._write(lambda db: db.execute(_INSERT, (key, now, data)))

    async def aclose(self) -> None:
        """Write the pending hits and close the file."""
        await self._note_uses()
        self._writer.close()
        self._reader.close()

    async def _note_uses(self) -> None:
        uses, self._uses = self._uses, Counter()
        if uses and not self._broken:
            now = time.time()
            await self._write(lambda db: db.executemany(_USE, [(now, count, key) for key, count in uses.items()]))

    async def _write(self, operation: Callable[[sqlite3.Connection], object]) -> None:
        try:
            await self._writer.write(operation, "writing to the reply cache")
        except StoreError as error:
            # The writer's message tells what to do about a run store; here only SQLite's own reason fits.
            self._give_up(error.__cause__ or error)

    def _give_up(self, error: BaseException) -> None:
        if not self._broken:
            self._broken = True
            _report(self._path, error)


class CachedModel:
    """One rollout's model behind the cache.

    A request that the rollout makes twice (for example from a tool that samples) gets two entries, so that a run with
    the cache draws as many samples as one without. Failed requests are not stored.

    Args:
        inner: Answers requests that aren't stored.
        cache: Stores the replies.
        spec: Describes `inner`. Its API key isn't part of the cache's key.
        attempt: The rollout's attempt at its row, so that several attempts remain separate samples.
        draw: Tells a later sample of the same attempt from earlier ones.
        environ: For engines that choose the endpoint by environment variables.
    """

    def __init__(
        self,
        inner: ChatModel,
        cache: ReplyCache,
        spec: ModelSpec,
        attempt: int,
        draw: str = "",
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._inner = inner
        self._cache = cache
        self._params = spec.params
        destination = load_engine(spec).destination(spec, environ)
        # A key without a draw is that of earlier releases, so their caches stay valid.
        identity = [KEY_VERSION, spec.engine, spec.model, destination, attempt, *([draw] if draw else [])]
        self._identity = hashlib.sha256(_encode(identity))
        self._asked: Counter[bytes] = Counter()

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Return the stored reply to this request, else the model's."""
        return await self._answer(messages, tools, params, partial(self._inner.complete, messages, tools, params))

    async def stream(
        self, messages: list[Message], tools: list[Tool], params: JsonObject, listen: Listen
    ) -> Completion:
        """Return the stored reply to this request as a whole, else the model's, and pass on its parts."""
        request = partial(streamed, self._inner, messages, tools, params, listen)
        return await self._answer(messages, tools, params, request)

    async def _answer(
        self,
        messages: list[Message],
        tools: list[Tool],
        params: JsonObject,
        request: Callable[[], Awaitable[Completion]],
    ) -> Completion:
        key = self._key(messages, tools, params)
        if key is None:
            return await request()
        stored = await self._cache.get(key)
        if stored is not None:
            return stored
        completion = await request()
        await self._cache.put(key, completion)
        return completion

    async def aclose(self) -> None:
        """Close the inner model, but not the cache, which its opener closes."""
        await self._inner.aclose()

    def _key(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> bytes | None:
        """Return the request's key; None if it isn't JSON, which the model reports better."""
        sent = {name: value for name, value in {**self._params, **params}.items() if value is not None}
        request = self._identity.copy()
        try:
            request.update(_encode_sorted([sent, messages]))
            # Not sorted: the model reads a schema's properties in this order.
            request.update(_encode(tools))
        except (TypeError, ValueError):
            return None
        key = request.digest()
        # Counted even if the reply is stored: the second equal request must ask for the second entry.
        repeated = self._asked[key]
        self._asked[key] += 1
        if repeated:
            request.update(b"%d" % repeated)
        return request.digest()


def cache_contents(path: Path) -> CacheContents:
    """Return a cache's contents, all zero if there is no file.

    Raises:
        StoreError: The cache can't be read.
    """
    if not path.is_file():
        return CacheContents()
    try:
        with closing(_connect(path, START_BUSY_SECONDS)) as connection:
            return _contents(connection)
    except sqlite3.Error as error:
        raise StoreError(f"the reply cache {path} can't be read: {error}; {_advice(error, path)}") from error


def clear_cache(path: Path) -> CacheContents | None:
    """Remove every reply and free the space. Runs that use the cache go on and fill it again.

    A damaged file is removed as a whole.

    Returns:
        The contents removed; None if the file was damaged and they are unknown.

    Raises:
        StoreError: The cache can't be removed.
    """
    if not path.is_file():
        return CacheContents()
    try:
        with closing(_connect(path, START_BUSY_SECONDS)) as connection:
            with _transaction(connection):
                contents = _contents(connection)
                connection.execute("DELETE FROM replies")
            # SQLite can't VACUUM within a transaction, and in WAL mode only the checkpoint shrinks the file.
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return contents
    except (sqlite3.Error, StoreError) as error:
        if not _damaged(error):
            raise StoreError(f"the reply cache {path} can't be cleared: {error}; {_advice(error, path)}") from error
    try:
        # The log goes too, because SQLite would apply it to the next file of this name.
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path} can't be removed: {error.strerror}; make {path.parent} writable") from error
    return None


def _connect(path: Path, busy_seconds: float) -> sqlite3.Connection:
    # The writer uses its connection in another thread than the one that opens it.
    connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    try:
        configure(connection)
        # A power failure may lose the last replies but doesn't damage the file. They can be requested again, so a disk
        # sync for each isn't worth the wait.
        connection.execute("PRAGMA synchronous = NORMAL")
        migrate(connection, path, _MIGRATIONS)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _contents(connection: sqlite3.Connection) -> CacheContents:
    return CacheContents(*connection.execute(_CONTENTS).fetchone())


def _decode(data: bytes) -> Completion:
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        return from_older_form(msgspec.json.decode(data, type=JsonObject), Completion)


def _stored_form(completion: Completion, masker: Masker) -> bytes | None:
    """Return the reply as JSON; None if it contains a key, or a value that JSON changes (a NaN, a lone surrogate)."""
    try:
        data = _encode(completion)
    except (TypeError, ValueError):
        return None
    # The masker returns the same object if there was nothing to mask.
    same = masker.encoded(data) is data and _decode(data) == completion
    return data if same else None


def _damaged(error: Exception) -> bool:
    # OperationalError means the environment: a lock, a full disk, permissions. A newer schema raises StoreError.
    return isinstance(error, StoreError) or type(error) is sqlite3.DatabaseError or "no such table" in str(error)


def _advice(error: Exception, path: Path) -> str:
    if _damaged(error):
        return "remove it with `osmosis cache clear`"
    if "locked" in str(error):
        return "end the process that keeps it locked"
    return f"make {path.parent} and the files in it readable and writable, with space on their disk"


def _report(path: Path, error: BaseException) -> None:
    print(f"the reply cache {path} is no longer used by this worker: {error}", file=sys.stderr, flush=True)
