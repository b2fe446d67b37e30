"""A cluster in this process: nodes that can be lost, fall silent, and join late. Also an example of a pool backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup

from osmosis_ai.runtime.pool.base import Pool, PoolOptions
from osmosis_ai.runtime.pool.node import NodeBoot, NodeHost, Opened, Versions, this_version
from osmosis_ai.runtime.pool.nodes import ClusterLostError, NodeLostError, NodesPool, open_nodes
from osmosis_ai.runtime.protocol import WorkerSpec
from osmosis_ai.text import counted

__all__ = ["Hosting", "LoopbackCluster", "LoopbackNode", "hosting", "open_loopback"]

Hosting = Callable[[NodeBoot], AbstractAsyncContextManager[NodeHost]]


class LoopbackNode:
    """A node that is a task of this process."""

    def __init__(self, name: str, group: TaskGroup, hosting: Hosting, versions: Versions | None = None) -> None:
        self.name = name
        self.silent = False
        self.collected = 0
        self._group = group
        self._hosting = hosting
        self._versions = versions or this_version()
        self._host: NodeHost
        self._scope = anyio.CancelScope()
        self._lost = asyncio.Event()

    async def versions(self) -> Versions:
        return self._versions

    async def open(self, boot: bytes) -> bytes:
        given = msgspec.json.decode(boot, type=NodeBoot)

        async def host(*, task_status: anyio.abc.TaskStatus[NodeHost]) -> None:
            with self._scope:
                async with self._hosting(given) as hosted:
                    task_status.started(hosted)
                    await anyio.sleep_forever()

        self._host = await self._group.start(host)
        return msgspec.json.encode(Opened(self._host.loaded))

    async def submit(self, orders: bytes) -> None:
        self._check()
        self._host.submit(orders)

    async def collect(self) -> bytes:
        if self.silent:
            await anyio.sleep_forever()
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_loss, group.cancel_scope)
            report = await self._host.collect()
            group.cancel_scope.cancel()
        self._check()
        self.collected += 1
        return report

    def lose(self) -> None:
        """Lose the node, with everything that runs there."""
        self._lost.set()
        self._scope.cancel()

    def kill(self) -> None:
        self.lose()

    def _check(self) -> None:
        if self._lost.is_set():
            raise NodeLostError("it was unplugged")

    async def _watch_loss(self, scope: anyio.CancelScope) -> None:
        await self._lost.wait()
        scope.cancel()


class LoopbackCluster:
    """Nodes that are there, and later ones."""

    def __init__(self) -> None:
        self._nodes: asyncio.Queue[LoopbackNode | ClusterLostError] = asyncio.Queue()

    def join(self, *nodes: LoopbackNode) -> None:
        for node in nodes:
            self._nodes.put_nowait(node)

    def lose(self, why: str) -> None:
        """Lose what tells of nodes; those that there are run on."""
        self._nodes.put_nowait(ClusterLostError(why))

    async def next(self) -> LoopbackNode:
        found = await self._nodes.get()
        if isinstance(found, ClusterLostError):
            raise found
        return found


def hosting(pool: Pool) -> Hosting:
    """Host this pool, whatever the node is to load."""

    @asynccontextmanager
    async def host(boot: NodeBoot) -> AsyncIterator[NodeHost]:
        async with anyio.create_task_group() as group:
            yield NodeHost(pool, group)
            group.cancel_scope.cancel()

    return host


@asynccontextmanager
async def open_loopback(spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[NodesPool]:
    """The backend: as many nodes as asked for, all from the start, each with real workers."""
    cluster, count = LoopbackCluster(), options.nodes or 2
    async with anyio.create_task_group() as group:
        here = partial(NodeHost.open, root=Path(spec.root))
        cluster.join(*(LoopbackNode(f"node-{number}", group, here) for number in range(count)))
        async with open_nodes(cluster, spec, options) as pool:
            while pool.where != counted(count, "node"):  # noqa: ASYNC110 - it has no event for it
                await anyio.sleep(0.01)
            yield pool
        group.cancel_scope.cancel()
