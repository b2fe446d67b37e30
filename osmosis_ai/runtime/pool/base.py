"""The interfaces of pools and workers, independent of where workers run: no socket, no process id, no path."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from osmosis_ai.records import JsonObject, Record, Rollout, Score
from osmosis_ai.runtime.protocol import (
    Event,
    Inspected,
    Order,
    Progress,
    Ready,
    Resume,
    RolloutJob,
    ScoreJob,
    ToolsDone,
)

__all__ = ["LOAD_SECONDS", "Channel", "InFlight", "Pool", "PoolOptions", "Spawner", "default_workers"]

LOAD_SECONDS = 120.0
"""Seconds that user code may take to load."""


class PoolOptions(Record, frozen=True):
    """Options of a pool. `workers` is 0 to run in this process; `worker_memory` is in bytes, None for a fair share. A
    worker may take `load_seconds` to load the repository.

    With the `isolation` `session`, rollouts share workers, each with its own MCP session; with `rollout`, each rollout
    has its own process, forked from one that has loaded the repository.

    With a `cluster`, workers run on at most `nodes` of its nodes (None for all), with `workers_per_node` on each (None
    for one per CPU).
    """

    workers: int = 1
    isolation: str = "session"
    worker_memory: int | None = None
    cluster: str | None = None
    nodes: int | None = None
    workers_per_node: int | None = None
    load_seconds: float = LOAD_SECONDS
    log: str | None = None
    debug: bool = False
    keys: list[str] = []
    environ: dict[str, str] = {}

    @property
    def backend(self) -> str:
        """Name of the backend that opens the pool; an address starts with the name of its engine."""
        if self.cluster in ("auto", "local"):
            return "ray"
        if self.cluster is not None:
            engine, _, address = self.cluster.partition("://")
            return engine if address else ""
        return "local" if self.workers else "inline"


class InFlight(Record, frozen=True):
    """A running rollout, its duration so far in seconds, what it is waiting for, and the node, if not this machine."""

    row_index: int
    run_index: int
    seconds: float
    waiting_on: str
    node: str = ""


class Pool(Protocol):
    """Runs jobs in workers, and survives the loss of a worker."""

    @property
    def loaded(self) -> Ready:
        """The tools, functions and sources that the workers loaded, with later imports."""
        ...

    @property
    def ahead(self) -> int:
        """Number of rollouts to request beyond those that may run, so that workers needn't wait for the next ones."""
        ...

    @property
    def where(self) -> str:
        """The nodes of a cluster that the pool uses, in words; empty for this machine."""
        ...

    def news(self) -> list[str]:
        """Return notices for the user about what happened since the last call."""
        ...

    @property
    def shortage(self) -> str | None:
        """The system resource that was missing when a worker should have started; the worker starts later."""
        ...

    @property
    def spent_usd(self) -> float:
        """Cost of all model calls so far, in USD, including abandoned attempts."""
        ...

    @property
    def changed(self) -> list[str]:
        """The files that now differ from what the workers loaded; workers that start later load them as they were."""
        ...

    @property
    def mixed(self) -> bool:
        """True if jobs have imported different versions of a file, because it changed in the meantime."""
        ...

    async def probe(self, policy: str, *, price: bool) -> None:
        """Check that a policy's model answers, and, with `price`, that its price is known; raise ModelStartError."""

    async def rollout(self, job: RolloutJob, listen: Callable[[Progress], None] | None = None) -> Rollout:
        """Run one rollout and return its record, which includes any failure; raise CodeChangedError if its worker can't
        be replaced.

        If stepping, it pauses at each step until `resume` is called; `listen` is called at pauses too.
        """
        ...

    def resume(self, order: Resume) -> None:
        """Continue a paused rollout, or have it call a tool. Has no effect after the rollout's end."""

    async def score(self, job: ScoreJob) -> list[list[Score]]:
        """Score stored rollouts; return each one's scores in the order of the job's functions. A function's score
        includes any failure, even the loss of a worker. Raises StoreError if a worker can't read the rollouts, and
        CodeChangedError if a lost worker can't be replaced.
        """
        ...

    async def serve(self, request: JsonObject) -> JsonObject:
        """Run a RolloutRequest and return its RolloutResponse; raise JobFailedError if it kills its worker."""
        ...

    async def tools(self, request: JsonObject) -> ToolsDone:
        """Ask the agent loop for the tools of a request; raise JobFailedError if that kills its worker."""
        ...

    async def inspect(self) -> Inspected:
        """Validate the agent loop; raise JobFailedError if that kills its worker."""
        ...

    def in_flight(self) -> list[InFlight]:
        """Return the running rollouts, the oldest first."""
        ...

    def oldest(self) -> InFlight | None:
        """Return the rollout that has been running longest, if any."""
        ...

    def kill(self) -> None:
        """Kill every worker now."""


class Channel(Protocol):
    """A connection to one worker."""

    @property
    def ending(self) -> str:
        """How the worker ended, in words; known once `read` has returned."""
        ...

    def last_words(self) -> list[str]:
        """Return the worker's last lines of output, and which file of the repository hides a library, if one does."""
        ...

    async def read(self, take: Callable[[Event], None]) -> None:
        """Pass every event to `take`, in order, until the worker and everything it started has ended.

        If cancelled, it ends the worker first.
        """

    def send(self, order: Order) -> None:
        """Send the worker a job, or an order about one; dropped if the worker has ended."""

    def kill(self) -> None:
        """Kill the worker and everything it started, now. May be called from a signal handler."""

    def memory(self) -> int:
        """Return the worker's memory in bytes; 0 if unknown."""
        ...

    def stopped(self) -> bool:
        """Return True if user code has stopped the worker (SIGSTOP)."""
        ...


class Spawner(Protocol):
    """Starts workers of one kind."""

    async def spawn(self) -> Channel:
        """Start a worker; raise OSError if that fails."""
        ...

    def wake(self) -> None:
        """Continue the processes that start workers, if user code has stopped them (SIGSTOP)."""

    def stop(self) -> None:
        """Start no more workers, and give up a start that hangs."""

    async def aclose(self) -> None:
        """End the processes that were needed to start workers."""


def default_workers(batch_size: int) -> int:
    """Return the number of usable CPUs, but at most the number of concurrent rollouts."""
    # The affinity mask respects `taskset` and cpusets; `cpu_count` doesn't.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, batch_size)
