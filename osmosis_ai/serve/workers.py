"""Serve an agent from worker processes, and replace them when its code changes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.abc
import msgspec

from osmosis_ai.errors import OsmosisRolloutError, StartError
from osmosis_ai.records import Tool
from osmosis_ai.rollout.core.schemas import RolloutRequest, RolloutResponse
from osmosis_ai.rollout.runner import error_response
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.pool.group import JobFailedError
from osmosis_ai.runtime.pool.kept import KeptPool
from osmosis_ai.runtime.protocol import Inspected, Ready, WorkerSpec
from osmosis_ai.runtime.watch.changes import Watched, from_root
from osmosis_ai.runtime.watch.follow import Follower, Save
from osmosis_ai.tasks import task_group
from osmosis_ai.text import failure_line

__all__ = ["PoolRunner"]

_log = logging.getLogger(__name__)


class _Loaded(NamedTuple):
    """The workers of one version of the code. `runs` runs rollouts; `asks`, for an agent loop only, lists the tools in
    a worker of its own, so that a busy loop never delays the answer."""

    runs: KeptPool
    asks: KeptPool | None

    def pools(self) -> list[KeptPool]:
        return [self.runs] if self.asks is None else [self.runs, self.asks]


class PoolRunner:
    """Runs a served agent's rollouts in worker processes: a `rollout.runner.RolloutRunner`, while it is `running`.

    With `reload` it reloads the code when a file changes; in-flight rollouts finish on the old code. `said` receives
    messages about reloads, one line at a time.
    """

    def __init__(
        self, spec: WorkerSpec, options: PoolOptions, *, reload: bool = False, said: Callable[[str], None] = _log.info
    ) -> None:
        self._spec = spec
        self._options = options
        self._reload = reload
        self._said = said
        self._workers: _Loaded
        self._group: anyio.abc.TaskGroup
        self._stop = anyio.Event()

    @property
    def name(self) -> str:
        """The agent loop's name; for the built-in loop, the name of the repository's folder."""
        return self.loaded.agent or Path(self._spec.root).name

    @property
    def loaded(self) -> Ready:
        """The tools, functions and agent that the workers have loaded."""
        return self._workers.runs.pool.loaded

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the agent into workers, which end with the block; raise StartError if it can't be loaded."""
        # The group ends with its last pool, after in-flight rollouts have finished.
        async with task_group() as self._group:
            self._workers = await self._load()
            try:
                async with task_group() as following:
                    if self._reload:
                        following.start_soon(self._follow_files, following)
                    yield
                    # The watching threads can't be cancelled; they see the event.
                    self._stop.set()
                    following.cancel_scope.cancel()
            finally:
                self._stop.set()
                for kept in self._workers.pools():
                    kept.release()

    async def start(self) -> None:
        """Do nothing: the workers start before the server."""

    async def aclose(self) -> None:
        """Do nothing: the workers end after the server."""

    async def inspect(self) -> Inspected:
        """Validate the agent loop; raise OsmosisRolloutError if that kills its worker."""
        with self._workers.asks or self._workers.runs as pool:
            try:
                return await pool.inspect()
            except JobFailedError as failed:
                raise OsmosisRolloutError(failure_line(failed.failure)) from failed

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        """List the tools of a rollout; raise OsmosisRolloutError if the loop fails to."""
        if self._workers.asks is None:
            return self.loaded.tools
        with self._workers.asks as pool:
            try:
                done = await pool.tools(request.model_dump(mode="json"))
            except JobFailedError as failed:
                raise OsmosisRolloutError(f"get_tools: {failure_line(failed.failure)}") from failed
        if done.error is not None:
            raise OsmosisRolloutError(done.error)
        return done.tools

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        """Run one rollout; the response reports a failure of the loop or of its worker."""
        with self._workers.runs as pool:
            try:
                return RolloutResponse.model_validate(await pool.serve(request.model_dump(mode="json")))
            except JobFailedError as failed:
                return error_response(request, failure_line(failed.failure))

    async def reload(self) -> None:
        """Reload the code; if it can't be loaded, keep the last good version."""
        try:
            fresh = await self._load()
        except StartError as error:
            self._said(f"not reloaded, still serving the last good code: {error}")
            return
        # Released only now, so that requests always find workers.
        old, self._workers = self._workers, fresh
        for kept in old.pools():
            kept.release()
        self._said("reloaded")

    async def _load(self) -> _Loaded:
        runs, asks = KeptPool(self._group, self._spec, self._options), None
        if self._spec.agent is not None:
            options = msgspec.structs.replace(self._options, workers=1, isolation="session")
            asks = KeptPool(self._group, self._spec, options)
        fresh = _Loaded(runs, asks)
        try:
            for kept in fresh.pools():
                await kept.opened()
        except BaseException:
            # On cancellation too; otherwise the workers would keep loading.
            for kept in fresh.pools():
                kept.abandon()
            raise
        return fresh

    async def _follow_files(self, group: anyio.abc.TaskGroup) -> None:
        root, agent_dir = _watched_folders(self._spec)

        def watched() -> Watched:
            return Watched("", agent_dir, frozenset(self.loaded.tool_sources), frozenset())

        follower = Follower(root, watched)
        # First, so that a save that changes nothing is recognised.
        follower.learn()
        send, saves = anyio.create_memory_object_stream[Save](1000)
        with send, saves:
            await group.start(follower.follow, send, self._stop)
            async for save in saves:
                # Only the agent's code is served; there are no rows or functions.
                if save.stale.tools:
                    await self.reload()


def _watched_folders(spec: WorkerSpec) -> tuple[Path, str | None]:
    """Return the repository's root, and the folder of the agent's code in it, if any."""
    root, folder = Path(spec.root).resolve(), None
    if spec.agent is not None and spec.agent.folder is not None:
        folder = Path(spec.agent.root, spec.agent.folder)
    elif spec.mcp is not None and spec.mcp.kind == "directory" and spec.mcp.path:
        folder = Path(spec.mcp.path).parent
    return root, None if folder is None else from_root(root, folder.resolve())
