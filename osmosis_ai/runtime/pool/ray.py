"""The Ray backend: one actor per node of a Ray cluster, which hosts a local pool there; see `node` and `nodes`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import socket
import sys
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, redirect_stdout, suppress
from pathlib import Path
from time import monotonic
from typing import Any, TextIO, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.from_thread
import msgspec

from osmosis_ai.errors import StartError
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.pool.node import NodeBoot, NodeHost, Opened, Versions, this_version
from osmosis_ai.runtime.pool.nodes import ClusterLostError, NodeLostError, NodesPool, open_nodes
from osmosis_ai.runtime.protocol import NotReady, WorkerSpec

__all__ = ["open_ray"]

T = TypeVar("T")

CLIENT_PORT = 10001
REACH_SECONDS = 10.0
"""How long to wait for an address to accept a connection."""
CONNECT_SECONDS = 300.0
"""How long to wait for Ray to connect and to upload the repository."""
HEAD_SECONDS = 30.0
"""How long the cluster's head may be silent. Ray itself ends the process that calls it after 60 s."""
CLOSE_SECONDS = 10.0
LOOK_SECONDS = 2.0
AGAIN_SECONDS = 60.0
"""The longest pause before a node that lost its actor gets another; the first is LOOK_SECONDS, and each doubles."""
CALLS_AT_ONCE = 4
"""An actor's concurrent calls: one that waits for a report, some that bring orders, and the last that ends it."""
NOT_SHIPPED = [".git", ".osmosis", ".venv", "venv", ".env", ".env.*", "node_modules", "__pycache__", "*.osmosis-run"]
"""Left out of the upload, besides what `.gitignore` names, which Ray leaves out itself."""


@asynccontextmanager
async def open_ray(spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[NodesPool]:
    """Connect to a Ray cluster, send it the repository, and load it on the nodes; raise StartError."""
    ray = _import_ray()
    assert options.cluster is not None
    connected: concurrent.futures.Future[None] = concurrent.futures.Future()
    end = threading.Event()
    try:
        try:
            await _aside(_reach, options.cluster)
            ended = _begin(_connection, ray, options, spec.root, connected, end)
            with anyio.fail_after(CONNECT_SECONDS):
                await _result(connected)
        except TimeoutError:
            raise StartError(
                f"--cluster {options.cluster}: no answer from Ray for {CONNECT_SECONDS:.0f} s; if a cluster of this "
                "machine has crashed, `ray stop` forgets it"
            ) from None
        except Exception as error:
            raise StartError(f"--cluster {options.cluster}: {_why_not(error)}") from error
        cluster = _RayCluster(ray, options)
        try:
            with redirect_stdout(_WithoutRay(sys.stdout)):
                async with open_nodes(cluster, spec, options) as pool:
                    yield pool
        finally:
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                await cluster.closed()
                end.set()
                await _result(ended)
    finally:
        end.set()


def _connection(
    ray: Any, options: PoolOptions, root: str, connected: concurrent.futures.Future[None], end: threading.Event
) -> None:
    """Hold the connection until `end` is set, in one thread: a `local` cluster's processes end with their thread."""
    try:
        _connect(ray, options, root)
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        connected.set_exception(error)
        return
    connected.set_result(None)
    end.wait()
    ray.shutdown()


async def _aside(call: Callable[..., T], *given: object) -> T:
    """Call a function of Ray's in a thread, which a cancelled caller leaves behind, as the call may hang for ever."""
    return await _result(_begin(call, *given))


async def _result(future: concurrent.futures.Future[T]) -> T:
    """Wait for a future without ever cancelling it: Ray's threads fail when they complete a cancelled one."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        # The loop may have ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()
    return future.result()


def _begin(call: Callable[..., T], *given: object) -> concurrent.futures.Future[T]:
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call(*given))
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)

    threading.Thread(target=run, name="ray_call", daemon=True).start()
    return future


def _import_ray() -> Any:
    # Ray reads both when it is imported or started. The first keeps it from reporting usage to its makers.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise StartError(f"--cluster needs Ray ({error}): pip install 'osmosis-ai[ray]'") from error
    return ray


def _reach(cluster: str) -> None:
    """Raise OSError or ValueError if nothing listens at a named address; Ray would try for minutes, or for ever."""
    named = os.environ.get("RAY_ADDRESS", "") if cluster == "auto" else cluster
    parts = urlsplit(named if "://" in named else f"//{named}")
    port = parts.port or (CLIENT_PORT if parts.scheme == "ray" else None)
    if not parts.hostname or not port:
        return
    try:
        socket.create_connection((parts.hostname, port), REACH_SECONDS).close()
    except OSError as error:
        said = f"RAY_ADDRESS is {named}, and " if cluster == "auto" else ""
        raise OSError(f"{said}{parts.hostname}:{port} can't be reached ({error.strerror or error})") from error


def _connect(ray: Any, options: PoolOptions, root: str) -> None:
    address, excluded = options.cluster, list(NOT_SHIPPED)
    store = None if options.log is None else Path(options.log).parents[1].resolve()
    # `--store` may have named the store anything, so NOT_SHIPPED can't list it.
    if store is not None and store.is_relative_to(Path(root).resolve()):
        excluded.append(store.relative_to(Path(root).resolve()).as_posix())
    started: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    # `_why_not` turns the error into a message that says the same.
    warnings.filterwarnings("ignore", "Ray Client connection timed out")
    ray.init(
        address=address,
        **started,
        runtime_env={"working_dir": root, "excludes": excluded},
        logging_level="error",
        log_to_driver=False,
    )


def _why_not(error: Exception) -> str:
    said = str(error).strip() or type(error).__name__
    if "client connection timeout" in said:
        said = (
            "something listens there, but no Ray client server lets this command in; its port is that of `ray start "
            "--ray-client-server-port`, and a cluster with tokens wants RAY_AUTH_MODE=token and the token"
        )
    elif "Starting Ray client server failed" in said:
        said = (
            "Ray's client server didn't start a process for this command; try again, and if it happens often start the "
            "cluster with GRPC_ENABLE_FORK_SUPPORT=0"
        )
    return said


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
        self._not_before: dict[str, float] = {}
        self._ends: list[concurrent.futures.Future[None]] = []

    async def next(self) -> _RayNode:
        while True:
            alive = [found for found in await self._ask(self._ray.nodes) if found["Alive"]]
            for found in alive:
                if self._most is not None and len(self._in_use) >= self._most:
                    break
                id = found["NodeID"]
                # A node may lose its actor, such as to a lack of memory, and be usable again later.
                due = id not in self._in_use and monotonic() >= self._not_before.get(id, 0.0)
                if due and found["Resources"].get("CPU"):
                    self._in_use.add(id)
                    self._actors[id] += 1
                    actor = await self._ask(_start_actor, self._ray, id)
                    return _RayNode(self._ray, found, actor, self._ended)
            await anyio.sleep(LOOK_SECONDS)

    async def closed(self) -> None:
        """Wait until every actor has been told to end."""
        for end in self._ends:
            await _result(end)

    async def _ask(self, call: Callable[..., T], *given: object) -> T:
        """Ask the cluster's head; raise ClusterLostError once it has been silent for too long."""
        why = ""
        with anyio.move_on_after(HEAD_SECONDS):
            while True:
                try:
                    return await _aside(call, *given)
                except (self._ray.exceptions.RayError, ConnectionError) as error:
                    # The head may be restarting.
                    why = f": {_in_short(str(error))}"
                await anyio.sleep(LOOK_SECONDS)
        raise ClusterLostError(f"its head hasn't answered for {HEAD_SECONDS:.0f} s{why}")

    def _ended(self, node: _RayNode) -> None:
        self._in_use.discard(node.id)
        # A bounded exponent, because a run may lose more actors than a float has powers of two.
        pause = LOOK_SECONDS * 2 ** min(self._actors[node.id] - 1, 10)
        self._not_before[node.id] = monotonic() + min(pause, AGAIN_SECONDS)
        self._ends.append(_begin(node.end))


class _RayNode:
    """The actor on one node."""

    def __init__(self, ray: Any, found: dict[str, Any], actor: Any, killed: Callable[[_RayNode], None]) -> None:
        self.name = f"{found['NodeManagerHostname']}-{found['NodeID'][:6]}"
        self.id = found["NodeID"]
        self._ray = ray
        self._actor = actor
        self._tell_killed = killed
        self._cpus = max(1, int(found["Resources"]["CPU"]))
        self._killed = False

    async def versions(self) -> Versions:
        return msgspec.convert(await self._call("versions"), Versions)

    async def open(self, boot: bytes) -> bytes:
        return bytes(await self._call("open", boot, self._cpus))

    async def submit(self, orders: bytes) -> None:
        await self._call("submit", orders)

    async def collect(self) -> bytes:
        return bytes(await self._call("collect"))

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._tell_killed(self)

    def end(self) -> None:
        """End the actor. Blocks until the cluster's head has answered."""
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)

    async def _call(self, method: str, *given: Any) -> Any:
        def call() -> Any:
            return getattr(self._actor, method).remote(*given).future()

        try:
            # Through a client server, even submitting a call waits for an answer, so it runs in a thread.
            return await _result(await _aside(call))
        except self._ray.exceptions.RayTaskError as error:
            raise NodeLostError(f"its host failed: {error.cause!r}") from error
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise NodeLostError(_in_short(str(error))) from error


def _start_actor(ray: Any, node: str) -> Any:
    on_it = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    # The actor reserves no CPU, because Ray doesn't schedule its workers. It is never restarted and no call is
    # repeated: the pool itself runs a lost node's jobs again.
    given = {
        "num_cpus": 0,
        "scheduling_strategy": on_it,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": CALLS_AT_ONCE,
    }
    return ray.remote(RayHost).options(**given).remote()


def _in_short(message: str) -> str:
    """Return the last line that names an exception, which is what ended the actor, else the first line."""
    lines = message.strip().splitlines() or [""]
    named = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    return (named or lines[:1])[-1]


class RayHost:
    """The actor: a `NodeHost` on an event loop in its own thread, apart from the loop on which Ray makes its calls."""

    def __init__(self) -> None:
        # Ray puts the repository first on the path, where its modules would hide libraries.
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
            # One task opens and closes the host, because a cancel scope must end in the task that entered it.
            try:
                async with NodeHost.open(boot, self._root, cpus) as self._host:
                    opened.set_result(Opened(self._host.loaded))
                    await anyio.sleep_forever()
            except StartError as error:
                opened.set_result(Opened(refused=NotReady(type(error).__name__, str(error))))
            except Exception as error:
                # Until it has opened, the head waits for an answer; afterwards `collect` fails instead.
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
