"""Host a pool on a node of a cluster: run the jobs that arrive, and report their records in batches.

The head sends jobs in `Orders`, and requests the next `Report` only once it has processed the last one, so a node never
holds more records than it was given jobs.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import platform
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup

import osmosis_ai
from osmosis_ai.errors import StartError, StoreError
from osmosis_ai.records import Record, Rollout, Score
from osmosis_ai.runtime.pool.base import InFlight, Pool, PoolOptions, default_workers
from osmosis_ai.runtime.pool.group import HaltError
from osmosis_ai.runtime.pool.local import open_local
from osmosis_ai.runtime.protocol import Cancel, NotReady, Places, ProbeJob, Ready, RolloutJob, ScoreJob, WorkerSpec
from osmosis_ai.runtime.protocol import attach as attached
from osmosis_ai.tasks import task_group

__all__ = ["NodeBoot", "NodeHost", "Opened", "Orders", "Report", "Versions", "portable", "this_version"]

BATCH = 50
BATCH_SECONDS = 0.2
"""A report waits for this many records, or this many seconds after the first one."""
GATHER_SECONDS = 0.02
"""How long a report waits on a node without waiting rollouts. A report costs as much as several records."""
BEAT_SECONDS = 1.0
"""Seconds after which a report is sent without records, to show that the node is alive."""
SHOWN = 50
"""Maximum number of in-flight rollouts in a report, oldest first."""
LOG_BYTES = 1 << 18

_OF_A_MACHINE = {
    "HOME",
    "HOSTNAME",
    "LOGNAME",
    "OLDPWD",
    "PATH",
    "PWD",
    "SHELL",
    "SHLVL",
    "TERM",
    "TMPDIR",
    "USER",
    "_",
}
_OF_MACHINES = ("CONDA", "CUDA_", "DBUS_", "KUBERNETES_", "LC_", "LD_", "OSMOSIS_STORE", "PYTHON", "RAY_", "SLURM_",
                "SSH_", "VIRTUAL_ENV", "XDG_")  # fmt: skip
"""Environment variables that describe one machine, and prefixes of such names."""


class Versions(Record, frozen=True):
    """The versions that must be equal on all machines. `source` is the hash of this package's files."""

    osmosis: str
    python: str
    source: str


class NodeBoot(Record, frozen=True):
    """The first message to a node: what to load. `spec` holds no paths of the head; see `protocol.detach`."""

    spec: WorkerSpec
    options: PoolOptions


class Opened(Record, frozen=True):
    """A node's answer: what it has loaded, or why that failed."""

    ready: Ready | None = None
    refused: NotReady | None = None


class Orders(Record, frozen=True):
    """Jobs for a node, and the number of rollouts it may run concurrently; further ones wait on the node.

    The node returns up to `give_back` waiting jobs, for another node to run.
    """

    share: int
    jobs: list[RolloutJob | ScoreJob | ProbeJob] = []
    cancel: list[Cancel] = []
    give_back: int = 0


class Ended(Record, frozen=True):
    """The end of a job: a rollout, scores, or neither after a probe. `error` says why it failed, `kind` as what; a job
    of the kind `returned` has not started.
    """

    job: str
    rollout: Rollout | None = None
    scores: list[list[Score]] = []
    error: str | None = None
    kind: str = ""


class Report(Record, frozen=True):
    """The events on a node since its last report; `log` is new output of user code."""

    ended: list[Ended] = []
    in_flight: list[InFlight] = []
    spent_usd: float = 0.0
    loaded: Ready | None = None
    mixed: bool = False
    shortage: str | None = None
    log: bytes = b""


_decode_orders = msgspec.json.Decoder(Orders).decode
_encode = msgspec.json.Encoder().encode


@functools.cache
def this_version() -> Versions:
    """Return the versions on this machine."""
    package = Path(osmosis_ai.__file__ or "").parent
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes())
    return Versions(osmosis_ai.__version__, ".".join(platform.python_version_tuple()[:2]), digest.hexdigest())


def portable(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that are valid on another machine."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_A_MACHINE and not name.startswith(_OF_MACHINES)
    }


class NodeHost:
    """A pool on a node, its jobs, and the next report. Created by `open`."""

    def __init__(self, pool: Pool, group: TaskGroup, log: Path | None = None) -> None:
        self._pool = pool
        self._group = group
        self._log = log
        self._read = 0
        self._share = 1
        self._running = 0
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._waiting: dict[str, RolloutJob] = {}
        self._ended: list[Ended] = []
        self._known: Ready | None = None
        self._first, self._due = asyncio.Event(), asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, boot: NodeBoot, root: Path, cpus: int | None = None) -> AsyncIterator[NodeHost]:
        """Load the repository at `root` into workers of this machine, by default one per CPU; raise StartError."""
        batch_size = boot.spec.batch_size
        workers = boot.options.workers_per_node or min(cpus or default_workers(batch_size), batch_size)
        with tempfile.TemporaryDirectory(prefix="osmosis-node-") as own:
            log = Path(own, "run.log")
            options = msgspec.structs.replace(boot.options, workers=workers, cluster=None, log=str(log))
            async with open_local(attached(boot.spec, Places(str(root))), options) as pool, task_group() as group:
                yield cls(pool, group, log)
                group.cancel_scope.cancel()

    @property
    def loaded(self) -> Ready:
        """The tools, functions and sources that the workers have loaded."""
        return self._pool.loaded

    def submit(self, orders: bytes) -> None:
        """Accept encoded `Orders`."""
        given = _decode_orders(orders)
        self._share = given.share
        for cancel in given.cancel:
            if self._waiting.pop(cancel.id, None) is None and cancel.id in self._scopes:
                self._scopes[cancel.id].cancel()
        for job in given.jobs:
            if isinstance(job, RolloutJob):
                self._waiting[job.id] = job
            else:
                self._start(job)
        self._start_waiting()
        for _ in range(min(given.give_back, len(self._waiting))):
            # The last one, which would wait longest.
            id, _job = self._waiting.popitem()
            self._note(Ended(id, kind="returned"))

    async def collect(self) -> bytes:
        """Wait for records, then a moment for more of them, and return an encoded `Report`."""
        with anyio.move_on_after(BEAT_SECONDS):
            await self._first.wait()
        if self._ended:
            with anyio.move_on_after(BATCH_SECONDS):
                await anyio.sleep(GATHER_SECONDS)
                await self._due.wait()
        ended, self._ended = self._ended, []
        self._first.clear()
        self._due.clear()
        loaded = self._pool.loaded
        new, self._known = (None if loaded == self._known else loaded), loaded
        return _encode(
            Report(
                ended,
                self._pool.in_flight()[:SHOWN],
                self._pool.spent_usd,
                new,
                self._pool.mixed,
                self._pool.shortage,
                self._new_output(),
            )
        )

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self._share:
            self._running += 1
            self._start(self._waiting.pop(next(iter(self._waiting))))

    def _start(self, job: RolloutJob | ScoreJob | ProbeJob) -> None:
        # Before the task runs, because it may be cancelled before that.
        self._scopes[job.id] = anyio.CancelScope()
        self._group.start_soon(self._run, job)

    async def _run(self, job: RolloutJob | ScoreJob | ProbeJob) -> None:
        with self._scopes[job.id]:
            try:
                self._note(await self._ended_job(job))
            except HaltError as error:
                self._note(Ended(job.id, error=error.notice, kind="halt"))
            except StoreError as error:
                self._note(Ended(job.id, error=str(error), kind="store"))
            except StartError as error:
                self._note(Ended(job.id, error=str(error), kind=type(error).__name__))
        del self._scopes[job.id]
        if isinstance(job, RolloutJob):
            self._running -= 1
            self._start_waiting()

    async def _ended_job(self, job: RolloutJob | ScoreJob | ProbeJob) -> Ended:
        if isinstance(job, RolloutJob):
            return Ended(job.id, await self._pool.rollout(job))
        if isinstance(job, ScoreJob):
            return Ended(job.id, scores=await self._pool.score(job))
        await self._pool.probe(job.policy, price=job.price)
        return Ended(job.id)

    def _note(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._first.set()
        if len(self._ended) >= BATCH or not self._waiting:
            self._due.set()

    def _new_output(self) -> bytes:
        if self._log is None:
            return b""
        with suppress(OSError), self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read(LOG_BYTES)
            # Whole lines only, unless one fills the buffer.
            data = data[: data.rfind(b"\n") + 1] or (data if len(data) == LOG_BYTES else b"")
            self._read += len(data)
            return data
        return b""
