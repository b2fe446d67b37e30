"""Pools that are replaced while their owner goes on, because code has changed."""

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
    """A pool that lives in a task of its own until its owner releases it and no `with` block uses it any more."""

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
        """Wait until it has loaded the repository; raises StartError when it can't."""
        await self._opened.wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> WorkerPool:
        self._users += 1
        return self.pool

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """It is no longer needed; its workers close in the background."""
        self._users -= 1
        if not self._users:
            self._unused.set()

    def abandon(self) -> None:
        """It isn't needed at all: stop loading."""
        self._scope.cancel()

    async def _keep(self, options: PoolOptions) -> None:
        with self._scope:
            try:
                async with open_pool(self.spec, options) as self.pool:
                    self._opened.set()
                    await self._unused.wait()
            except StartError as error:
                self._error = error
                self._opened.set()
