"""An agent served to a trainer from worker processes, which are replaced when its code changes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from osmosis_ai.errors import OsmosisRolloutError, StartError
from osmosis_ai.records import Failure, Tool
from osmosis_ai.rollout.core.schemas import RolloutRequest, RolloutResponse
from osmosis_ai.rollout.runner import error_response
from osmosis_ai.runtime.pool.backends import open_pool
from osmosis_ai.runtime.pool.base import Pool, PoolOptions
from osmosis_ai.runtime.pool.group import JobFailedError
from osmosis_ai.runtime.protocol import Inspected, Ready, WorkerSpec
from osmosis_ai.runtime.watch.changes import Watched, from_root
from osmosis_ai.runtime.watch.follow import Follower, Save
from osmosis_ai.tasks import task_group

__all__ = ["PoolRunner"]

BUILT_IN = "mcp"

_log = logging.getLogger(__name__)


class _Workers:
    """Workers that have loaded one state of the code: those that run rollouts, and one that only says which tools
    there are, so that this is never held up by what a loop does."""

    def __init__(self) -> None:
        self.name = BUILT_IN
        self.runs: Pool
        self.asks: Pool | None = None
        self.opened = anyio.Event()
        self.closed = anyio.Event()
        self.error: StartError | None = None
        self._busy = 0
        self._released = False
        self._idle = anyio.Event()

    async def keep(self, spec: WorkerSpec, options: PoolOptions) -> None:
        """Hold them until they are released and have nothing left to do."""
        try:
            async with AsyncExitStack() as stack:
                self.runs = await stack.enter_async_context(open_pool(spec, options))
                self.name = self.runs.loaded.agent or BUILT_IN
                if spec.agent is not None:
                    asking = msgspec.structs.replace(options, workers=1, isolation="session")
                    self.asks = await stack.enter_async_context(open_pool(spec, asking))
                self.opened.set()
                await self._idle.wait()
        except StartError as error:
            self.error = error
        finally:
            self.opened.set()
            self.closed.set()

    def __enter__(self) -> _Workers:
        self._busy += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._busy -= 1
        self._let_go()

    def release(self) -> None:
        """No further job comes."""
        self._released = True
        self._let_go()

    def _let_go(self) -> None:
        if self._released and not self._busy:
            self._idle.set()


class PoolRunner:
    """Runs a served agent's rollouts in worker processes: a `rollout.runner.RolloutRunner`, while it is `running`.

    With `reload` it loads the code anew when a file of it changes. Rollouts that run then end with the old code. `said`
    takes what there is to say about that, a line at a time.
    """

    def __init__(
        self, spec: WorkerSpec, options: PoolOptions, *, reload: bool = False, said: Callable[[str], None] = _log.info
    ) -> None:
        self._spec = spec
        self._options = options
        self._reload = reload
        self._said = said
        self._workers = _Workers()
        self._all: list[_Workers] = []
        self._group: anyio.abc.TaskGroup
        self._stop = anyio.Event()

    @property
    def name(self) -> str:
        """The agent loop's name."""
        return self._workers.name

    @property
    def loaded(self) -> Ready:
        """What the workers have loaded."""
        return self._workers.runs.loaded

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the agent into workers, which end with the block; raises StartError when it can't be loaded."""
        async with task_group() as self._group:
            self._workers = await self._load()
            try:
                if self._reload:
                    self._group.start_soon(self._follow_files)
                yield
            finally:
                self._stop.set()
                for workers in self._all:
                    workers.release()
                with anyio.CancelScope(shield=True):
                    for workers in self._all:
                        await workers.closed.wait()
                self._group.cancel_scope.cancel()

    async def start(self) -> None:
        """Nothing to do: the workers are there before the server is."""

    async def aclose(self) -> None:
        """Nothing to do: the workers end after the server has."""

    async def inspect(self) -> Inspected:
        """Validate the agent loop; raises OsmosisRolloutError when that took its worker down."""
        with self._workers as workers:
            try:
                return await (workers.asks or workers.runs).inspect()
            except JobFailedError as failed:
                raise OsmosisRolloutError(_said(failed.failure)) from failed

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        """The tools of a rollout; raises OsmosisRolloutError when the loop can't say."""
        with self._workers as workers:
            if workers.asks is None:
                return workers.runs.loaded.tools
            try:
                done = await workers.asks.tools(request.model_dump(mode="json"))
            except JobFailedError as failed:
                raise OsmosisRolloutError(f"get_tools: {_said(failed.failure)}") from failed
        if done.error is not None:
            raise OsmosisRolloutError(done.error)
        return done.tools

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        """Run one rollout; what the loop does wrong, or does to its worker, is in the response."""
        with self._workers as workers:
            try:
                return RolloutResponse.model_validate(await workers.runs.serve(request.model_dump(mode="json")))
            except JobFailedError as failed:
                return error_response(request, _said(failed.failure))

    async def reload(self) -> None:
        """Load the code anew; what can't be loaded leaves the last good code in place."""
        try:
            fresh = await self._load()
        except StartError as error:
            self._said(f"not reloaded, the last good code goes on: {error}")
            return
        old, self._workers = self._workers, fresh
        old.release()
        self._said("reloaded")

    async def _load(self) -> _Workers:
        workers = _Workers()
        self._all = [known for known in self._all if not known.closed.is_set()]
        self._all.append(workers)
        self._group.start_soon(workers.keep, self._spec, self._options)
        await workers.opened.wait()
        if workers.error is not None:
            raise workers.error
        return workers

    async def _follow_files(self) -> None:
        root, agent_dir = _watched_folders(self._spec)

        def watched() -> Watched:
            return Watched("", agent_dir, frozenset(self._workers.runs.loaded.tool_sources), frozenset())

        follower = Follower(root, watched)
        follower.learn()
        send, saves = anyio.create_memory_object_stream[Save](1000)
        self._group.start_soon(follower.follow, send, self._stop)
        async for save in saves:
            if save.stale.tools:
                await self.reload()


def _watched_folders(spec: WorkerSpec) -> tuple[Path, str | None]:
    """The repository's root, and the folder of the agent's code in it, if it has one."""
    root, folder = Path(spec.root).resolve(), _agent_folder(spec)
    return root, None if folder is None else from_root(root, folder.resolve())


def _agent_folder(spec: WorkerSpec) -> Path | None:
    if spec.agent is not None:
        return None if spec.agent.folder is None else Path(spec.agent.root, spec.agent.folder)
    return (
        Path(spec.mcp.path).parent if spec.mcp is not None and spec.mcp.kind == "directory" and spec.mcp.path else None
    )


def _said(failure: Failure) -> str:
    return f"{failure.origin}: {failure.message}"
