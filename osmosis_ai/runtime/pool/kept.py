"""Pools that their owner can replace while it runs, because code has changed."""

from __future__ import annotations

import anyio
from anyio.abc import TaskGroup

from osmosis_ai.errors import StartError
from osmosis_ai.runtime.pool.backends import open_pool
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.pool.pool import WorkerPool
from osmosis_ai.runtime.protocol import WorkerSpec

__all__ = ["KeptPool"]


class KeptPool:
    """A pool that lives in its own task until its owner has released it and the last `with` block has ended."""

    def __init__(self, group: TaskGroup, spec: WorkerSpec, options: PoolOptions) -> None:
        self.pool: WorkerPool
        self.spec = spec
        self._users = 1
        self._unused = anyio.Event()
        self._opened = anyio.Event()
        self._scope = anyio.CancelScope()
        self._error: StartError | None = None
        group.start_soon(self._keep, options)

    async def opened(self) -> None:
        """Wait until the pool has loaded the repository; raise StartError if it can't."""
        await self._opened.wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> WorkerPool:
        self._users += 1
        return self.pool

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Give up the owner's hold; without other users, the workers close in the background."""
        self._users -= 1
        if not self._users:
            self._unused.set()

    def abandon(self) -> None:
        """Stop loading a pool that isn't needed any more."""
        self._scope.cancel()

    async def _keep(self, options: PoolOptions) -> None:
        with self._scope:
            try:
                async with open_pool(self.spec, options) as pool:
                    # Its owner asks about single workers, and so keeps them on this machine.
                    assert isinstance(pool, WorkerPool)
                    self.pool = pool
                    self._opened.set()
                    await self._unused.wait()
            except StartError as error:
                self._error = error
                self._opened.set()
