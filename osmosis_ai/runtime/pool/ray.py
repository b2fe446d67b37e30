"""The Ray backend: one actor per node of a Ray cluster, which hosts a local pool there; see `node` and `nodes`."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import anyio
import anyio.from_thread
import msgspec

from osmosis_ai.errors import StartError
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.pool.node import NodeBoot, NodeHost, Opened, Versions, this_version
from osmosis_ai.runtime.pool.nodes import NodeLostError, NodesPool, open_nodes
from osmosis_ai.runtime.protocol import NotReady, WorkerSpec

__all__ = ["open_ray"]

LOOK_SECONDS = 2.0
ACTORS_OF_A_NODE = 3
CALLS_AT_ONCE = 4
"""Of one actor: a report that is waited for, orders, and the end."""
NOT_SHIPPED = [".git", ".osmosis", ".venv", "venv", ".env", ".env.*", "node_modules", "__pycache__", "*.osmosis-run"]
"""Besides what `.gitignore` names, which Ray leaves out itself."""


@asynccontextmanager
async def open_ray(spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[NodesPool]:
    """Connect to a Ray cluster, send it the repository, and load it on the nodes; raise StartError."""
    ray = _import_ray()
    assert options.cluster is not None
    try:
        await anyio.to_thread.run_sync(_connect, ray, options, spec.root)
    except Exception as error:
        raise StartError(f"--cluster {options.cluster}: {str(error).strip() or type(error).__name__}") from error
    try:
        with redirect_stdout(_WithoutRay(sys.stdout)):
            async with open_nodes(_RayCluster(ray, options), spec, options) as pool:
                yield pool
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(ray.shutdown)


def _import_ray() -> Any:
    # Both are read when Ray is imported or started; nothing is reported to its makers.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise StartError(f"--cluster needs Ray ({error}): pip install 'osmosis-ai[ray]'") from error
    return ray


def _connect(ray: Any, options: PoolOptions, root: str) -> None:
    address, excluded = options.cluster, list(NOT_SHIPPED)
    store = None if options.log is None else Path(options.log).parents[1].resolve()
    # It may have any name.
    if store is not None and store.is_relative_to(Path(root).resolve()):
        excluded.append(store.relative_to(Path(root).resolve()).as_posix())
    started: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
    ray.init(
        **started,
        runtime_env={"working_dir": root, "excludes": excluded},
        logging_level="error",
        log_to_driver=False,
    )


class _WithoutRay:
    """Stdout without what Ray's own threads print about lost nodes, which the command reports itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread().name.startswith("ray_") else self._stream.write(text)


class _RayCluster:
    """The nodes of a Ray cluster that have a CPU."""

    def __init__(self, ray: Any, options: PoolOptions) -> None:
        self._ray = ray
        self._most = options.nodes
        self._in_use: set[str] = set()
        self._actors: Counter[str] = Counter()

    async def next(self) -> _RayNode:
        while True:
            for found in await anyio.to_thread.run_sync(self._alive):
                if self._most is not None and len(self._in_use) >= self._most:
                    break
                id = found["NodeID"]
                # A node may lose its actor, to the system's memory for example, and be as good as before.
                if id not in self._in_use and self._actors[id] < ACTORS_OF_A_NODE and found["Resources"].get("CPU"):
                    self._in_use.add(id)
                    self._actors[id] += 1
                    return _RayNode(self._ray, found, self._in_use.discard)
            await anyio.sleep(LOOK_SECONDS)

    def _alive(self) -> list[dict[str, Any]]:
        try:
            return [found for found in self._ray.nodes() if found["Alive"]]
        except self._ray.exceptions.RayError:
            # The head is away for a moment; if for good, the nodes' own calls tell.
            return []


class _RayNode:
    """The actor on one node."""

    def __init__(self, ray: Any, found: dict[str, Any], lost: Callable[[str], None]) -> None:
        self.name = f"{found['NodeManagerHostname']}-{found['NodeID'][:6]}"
        self._id = found["NodeID"]
        self._ray = ray
        self._lost = lost
        self._cpus = max(1, int(found["Resources"]["CPU"]))
        self._killed = False
        on_it = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(found["NodeID"], soft=False)
        # No CPU of its own: what its workers need is not Ray's to count. It is never restarted, nor a call repeated.
        self._actor = (
            ray.remote(RayHost)
            .options(
                num_cpus=0,
                scheduling_strategy=on_it,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=CALLS_AT_ONCE,
            )
            .remote()
        )

    async def versions(self) -> Versions:
        return msgspec.convert(await self._call(self._actor.versions), Versions)

    async def open(self, boot: bytes) -> bytes:
        return bytes(await self._call(self._actor.open, boot, self._cpus))

    async def submit(self, orders: bytes) -> None:
        await self._call(self._actor.submit, orders)

    async def collect(self) -> bytes:
        return bytes(await self._call(self._actor.collect))

    def kill(self) -> None:
        if self._killed:
            return
        self._killed = True
        self._lost(self._id)
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)

    async def _call(self, method: Any, *given: Any) -> Any:
        try:
            return await asyncio.wrap_future(method.remote(*given).future())
        except self._ray.exceptions.RayTaskError as error:
            raise NodeLostError(f"its host failed: {error.cause!r}") from error
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise NodeLostError(_in_short(str(error))) from error


def _in_short(message: str) -> str:
    """Return the error that ended an actor, if it is named, else the first line."""
    lines = message.strip().splitlines() or [""]
    named = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    return (named or lines[:1])[-1]


class RayHost:
    """The actor: a `NodeHost` on an event loop in a thread of its own, because Ray's own loop has Ray's calls."""

    def __init__(self) -> None:
        # Ray puts the repository first on the path; its modules must not hide libraries.
        self._root = Path.cwd()
        sys.path[:] = [entry for entry in sys.path if entry not in ("", str(self._root))]
        self._blocking = anyio.from_thread.start_blocking_portal()
        self._loop = self._blocking.__enter__()
        self._host: NodeHost

    def versions(self) -> dict[str, str]:
        """Return this node's versions."""
        return msgspec.to_builtins(this_version())  # type: ignore[no-any-return]

    def open(self, boot: bytes, cpus: int) -> bytes:
        """Load the repository; return an encoded Opened."""
        return self._loop.call(self._open, msgspec.json.decode(boot, type=NodeBoot), cpus)

    async def _open(self, boot: NodeBoot, cpus: int) -> bytes:
        opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()

        async def host() -> None:
            # Opened and closed in one task, as cancel scopes must be.
            try:
                async with NodeHost.open(boot, self._root, cpus) as self._host:
                    opened.set_result(Opened(self._host.loaded))
                    await anyio.sleep_forever()
            except StartError as error:
                opened.set_result(Opened(refused=NotReady(type(error).__name__, str(error))))
            except Exception as error:
                # The head waits for an answer; later on, its reports end.
                if opened.done():
                    raise
                opened.set_exception(error)

        self._task = asyncio.get_running_loop().create_task(host())
        return msgspec.json.encode(await opened)

    def submit(self, orders: bytes) -> None:
        """Take encoded Orders."""
        self._loop.call(self._host.submit, orders)

    def collect(self) -> bytes:
        """Return the next encoded Report."""
        return self._loop.call(self._host.collect)
