"""A temporary store for conversations scored outside a run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from osmosis_ai.errors import StoreError
from osmosis_ai.masking import Masker
from osmosis_ai.records import Message, Rollout, Row
from osmosis_ai.store.run_store import RunStore

__all__ = ["ScratchStore"]


class ScratchStore:
    """A run store in a temporary folder, for scorers to read from. Made by `ScratchStore.open`."""

    def __init__(self, store: RunStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._numbers = count()

    @classmethod
    @asynccontextmanager
    async def open(cls, masker: Masker) -> AsyncIterator[ScratchStore]:
        """Create a store that is removed after the block; raise StoreError if that fails."""
        try:
            folder = tempfile.TemporaryDirectory(prefix="osmosis-", ignore_cleanup_errors=True)
        except OSError as error:
            raise StoreError(f"can't create a temporary folder: {error.strerror or error}; set TMPDIR") from error
        with folder, RunStore.open(Path(folder.name), masker=masker) as store:
            yield cls(store, await store.create_run("scratch", identity={}, config={}))

    @property
    def path(self) -> Path:
        """The database."""
        return self._store.path

    async def save(self, conversations: Sequence[tuple[Row, list[Message]]]) -> list[int]:
        """Store conversations, and return their keys, by which scorers find them. Equal ids name the same row."""
        return await asyncio.gather(*(self._save(row, messages) for row, messages in conversations))

    async def _save(self, row: Row, messages: list[Message]) -> int:
        number = next(self._numbers)
        rollout = Rollout(str(number), row.index, row.id, number, "scratch", messages, "stop", 0.0)
        return await self._store.save_rollout(self._run_id, rollout, row)
