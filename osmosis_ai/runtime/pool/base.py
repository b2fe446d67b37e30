"""What can be asked of workers, and what is needed of one, wherever they run: no socket, no process id, no path."""

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
"""How long user code may take to load."""


class PoolOptions(Record, frozen=True):
    """How workers run. `workers` 0 means inside this process; `worker_memory` is in bytes, None a fair share.
    `load_seconds` is how long a worker may take to load the repository.

    With `isolation` `session`, rollouts share a worker and have an MCP session each; with `rollout`, each has a process
    of its own, forked from one that has loaded the repository.
    """

    workers: int = 1
    isolation: str = "session"
    worker_memory: int | None = None
    load_seconds: float = LOAD_SECONDS
    log: str | None = None
    debug: bool = False
    keys: list[str] = []
    environ: dict[str, str] = {}

    @property
    def backend(self) -> str:
        """The name of the backend that opens the pool."""
        return "local" if self.workers else "inline"


class InFlight(Record, frozen=True):
    """A rollout that runs: for how many seconds, and what it is waiting for."""

    row_index: int
    run_index: int
    seconds: float
    waiting_on: str


class Pool(Protocol):
    """Runs jobs in workers, whatever happens to a worker in between."""

    @property
    def loaded(self) -> Ready:
        """What the workers found when they loaded the repository, and what it has imported since."""
        ...

    @property
    def spent_usd(self) -> float:
        """What model calls have cost so far, those of abandoned attempts included."""
        ...

    @property
    def mixed(self) -> bool:
        """True if workers have loaded different code, because it changed while they did."""
        ...

    async def probe(self, policy: str, *, price: bool) -> None:
        """See that a policy's model answers, and that its price is known if it must be; raises ModelStartError."""

    async def rollout(self, job: RolloutJob, listen: Callable[[Progress], None] | None = None) -> Rollout:
        """Run one rollout to its record. Whatever goes wrong in it is in the record.

        If the job is stepping, it pauses at each step until `resume` is called; `listen` hears of pauses too.
        """
        ...

    def resume(self, order: Resume) -> None:
        """Let a paused rollout go on, or have it call a tool. Without effect when the rollout has ended."""

    async def score(self, job: ScoreJob) -> list[list[Score]]:
        """Score stored rollouts: the scores of each, in the order of the job's functions. Whatever goes wrong in a
        function is in its score, also the loss of a worker. Raises StoreError when a worker can't read the rollouts.
        """
        ...

    async def serve(self, request: JsonObject) -> JsonObject:
        """Run a RolloutRequest to its RolloutResponse; raises JobFailedError when it takes the worker down."""
        ...

    async def tools(self, request: JsonObject) -> ToolsDone:
        """Ask the agent loop for the tools of a request; raises JobFailedError when that takes its worker down."""
        ...

    async def inspect(self) -> Inspected:
        """Validate the agent loop; raises JobFailedError when that takes its worker down."""
        ...

    def oldest(self) -> InFlight | None:
        """The rollout that has been running longest."""
        ...

    def kill(self) -> None:
        """End every worker at once."""


class Channel(Protocol):
    """A connection to one worker."""

    @property
    def ending(self) -> str:
        """How the worker ended, in words; known when `read` has returned."""
        ...

    async def read(self, take: Callable[[Event], None]) -> None:
        """Hand over every event, in order, until the worker has ended and nothing that it started is left.

        When cancelled, it ends the worker first.
        """

    def send(self, order: Order) -> None:
        """Send the worker a job, or an order about one; lost when the worker has ended."""

    def kill(self) -> None:
        """End the worker and whatever it started, now. May be called from a signal handler."""

    def memory(self) -> int:
        """Bytes the worker holds; 0 if nobody knows."""
        ...


class Spawner(Protocol):
    """Starts workers of one kind."""

    async def spawn(self) -> Channel:
        """Start one; raises OSError when it can't."""
        ...

    def stop(self) -> None:
        """Start no more, and give up a start that doesn't come to an end."""

    async def aclose(self) -> None:
        """End what was needed for starting them."""


def default_workers(batch_size: int) -> int:
    """As many workers as CPUs may be used, but no more than rollouts run at a time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, batch_size)
