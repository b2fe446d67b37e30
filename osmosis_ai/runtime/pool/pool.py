"""Where workers run. A pool takes jobs and gives records, whatever happens to the worker in between."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import psutil

from osmosis_ai.errors import ModelStartError, StoreError
from osmosis_ai.records import Failure, FunctionRef, Record, Rollout, Score
from osmosis_ai.runtime.pool.channel import LOAD_SECONDS
from osmosis_ai.runtime.pool.group import JobFailedError, WorkerGroup
from osmosis_ai.runtime.pool.local import ForkServerSpawner, TemplateSpawner
from osmosis_ai.runtime.pool.trajectory import TrajectoryBuilder
from osmosis_ai.runtime.protocol import (
    Acting,
    Asked,
    Boot,
    CallDone,
    Called,
    Done,
    Event,
    Imported,
    Inspected,
    InspectJob,
    Paused,
    Probed,
    ProbeJob,
    Progress,
    Ready,
    Replied,
    Resume,
    Reworded,
    RolloutDone,
    RolloutJob,
    SampleDone,
    ScoreJob,
    ScoresDone,
    ScoringStarted,
    ServeDone,
    ServeJob,
    ToolsDone,
    ToolsJob,
    TrainerReply,
    TurnDone,
    WorkerSpec,
)
from osmosis_ai.runtime.worker.worker import Worker, load_repository

__all__ = [
    "InFlight",
    "InlinePool",
    "Pool",
    "PoolOptions",
    "ProcessPool",
    "SteppingPool",
    "default_workers",
    "open_pool",
]


FREEZE_GRACE_SECONDS = 5.0


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


class InFlight(Record, frozen=True):
    """A rollout that runs: for how many seconds, and what it is waiting for."""

    row_index: int
    run_index: int
    seconds: float
    waiting_on: str


class Pool(Protocol):
    """Runs jobs."""

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
        """Whether workers have loaded different code, because it changed while they did."""
        ...

    async def probe(self, policy: str, *, price: bool) -> None:
        """See that a policy's model answers, and that its price is known if it must be; raises ModelStartError."""

    async def rollout(self, job: RolloutJob, listen: Callable[[Progress], None] | None = None) -> Rollout:
        """Run one rollout to its record, and report its turns and calls to `listen`.

        Whatever goes wrong in it is in the record. A stepping one waits for `resume` at every pause that `listen` hears
        of.
        """
        ...

    async def score(self, job: ScoreJob) -> list[list[Score]]:
        """Score stored rollouts; whatever goes wrong in a function is in its score, also the loss of a worker.

        Args:
            job: The rollouts and the functions.

        Returns:
            The scores of each rollout, in the order of the job's functions.

        Raises:
            StoreError: A worker can't read the rollouts.
        """
        ...

    def oldest(self) -> InFlight | None:
        """The rollout that has been running longest."""
        ...

    def kill(self) -> None:
        """End every worker at once."""


class SteppingPool(Pool, Protocol):
    """A pool whose rollouts a person can step through."""

    async def rollout(self, job: RolloutJob, listen: Callable[[Progress], None] | None = None) -> Rollout:
        """Run one rollout to its record. A stepping one waits for `resume` at every pause that `listen` hears of."""
        ...

    def resume(self, order: Resume) -> None:
        """Let a paused rollout go on, or have it call a tool. Without effect when the rollout has ended."""


@asynccontextmanager
async def open_pool(spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[SteppingPool]:
    """Load the repository into workers, or into this process.

    Args:
        spec: What to load.
        options: How many workers, and what they may use.

    Raises:
        StartError: Something can't be loaded; the message names the user's file and line.
    """
    if options.workers == 0:
        async with InlinePool.open(spec, options) as inline:
            yield inline
    else:
        async with ProcessPool.open(spec, options) as processes:
            yield processes


class _Rollouts:
    """The rollouts in flight, and what they have cost."""

    def __init__(self) -> None:
        self.spent_usd = 0.0
        self._builders: dict[str, TrajectoryBuilder] = {}
        self._listeners: dict[str, Callable[[Progress], None]] = {}

    def add(self, event: Progress) -> None:
        """Take in what a worker reports of a rollout."""
        self._builders[event.job].add(event)
        if isinstance(event, (TurnDone, SampleDone)) and not event.turn.cached:
            self.spent_usd += event.turn.cost_usd or 0.0
        if event.job in self._listeners:
            self._listeners[event.job](event)

    @contextmanager
    def start(self, job: RolloutJob, listen: Callable[[Progress], None] | None) -> Iterator[TrajectoryBuilder]:
        builder = self._builders[job.id] = TrajectoryBuilder(job)
        if listen is not None:
            self._listeners[job.id] = listen
        try:
            yield builder
        finally:
            del self._builders[job.id]
            self._listeners.pop(job.id, None)

    def oldest(self) -> InFlight | None:
        # Dicts keep the order of insertion, so the first one is the oldest.
        builder = next(iter(self._builders.values()), None)
        if builder is None:
            return None
        return InFlight(builder.job.row.index, builder.job.run_index, builder.elapsed_ms / 1000, builder.waiting_on)

    def resume(self, order: Resume) -> None:
        """A person's order goes to a paused rollout."""
        if order.action == "next" and order.id in self._builders:
            self._builders[order.id].resume()


class InlinePool:
    """One worker in this process, for debugging: `breakpoint()` works in a tool. Made by `InlinePool.open`."""

    mixed = False

    def __init__(self) -> None:
        self.loaded = Ready()
        self._rollouts = _Rollouts()
        self._done: dict[str, Done] = {}
        self._worker: Worker

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[InlinePool]:
        """Load the repository into this process. What user code prints goes to stderr meanwhile.

        Raises:
            StartError: Something can't be loaded.
        """
        pool = cls()
        os.environ.update(options.environ)
        with _output_to_stderr():
            async with Worker.open(load_repository(spec), pool._take) as worker:
                pool._worker = worker
                yield pool

    @property
    def spent_usd(self) -> float:
        return self._rollouts.spent_usd

    async def probe(self, policy: str, *, price: bool) -> None:
        job = ProbeJob(uuid4().hex, policy, price)
        await self._worker.run(job)
        _check(self._done.pop(job.id))

    async def rollout(self, job: RolloutJob, listen: Callable[[Progress], None] | None = None) -> Rollout:
        with self._rollouts.start(job, listen) as builder:
            await self._worker.run(job)
        done = self._done.pop(job.id)
        assert isinstance(done, RolloutDone)
        return builder.finish(done)

    def resume(self, order: Resume) -> None:
        self._rollouts.resume(order)
        self._worker.resume(order)

    async def score(self, job: ScoreJob) -> list[list[Score]]:
        await self._worker.run(job)
        done = self._done.pop(job.id)
        assert isinstance(done, ScoresDone)
        return _scores(done)

    def oldest(self) -> InFlight | None:
        return self._rollouts.oldest()

    def kill(self) -> None:
        """There is nothing but this process itself, and its caller ends that."""

    def _take(self, event: Event) -> None:
        if isinstance(event, Ready):
            self.loaded = event
        elif isinstance(event, Imported):
            sides = {"tool_sources": event.sources, "function_sources": event.sources}
            self.loaded = msgspec.structs.replace(self.loaded, **sides)
        elif isinstance(event, (TurnDone, CallDone, SampleDone, Paused, Called, Reworded, Acting, Asked)):
            self._rollouts.add(event)
        elif isinstance(event, (RolloutDone, ScoresDone, Probed)):
            self._done[event.job] = event


class ProcessPool:
    """Worker processes: some hold the repository's tools, others its functions. Made by `ProcessPool.open`."""

    def __init__(self, spec: WorkerSpec, agents: WorkerGroup | None, scorers: WorkerGroup | None) -> None:
        self._loaded = Ready()
        self._agents = agents
        self._scorers = scorers
        self._refs = {ref.name: ref for ref in spec.functions}
        self._rollouts = _Rollouts()

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: WorkerSpec, options: PoolOptions) -> AsyncIterator[ProcessPool]:
        """Start the worker processes and wait until they have loaded the repository.

        Raises:
            StartError: Something can't be loaded.
        """
        alone = spec.batch_size if options.isolation == "rollout" else 0
        # As many for the tools, as many for the functions.
        memory = options.worker_memory or _fair_share(alone + 2 * options.workers)

        def boot(part: WorkerSpec) -> Boot:
            return Boot(part, log=options.log, debug=options.debug, keys=options.keys, environ=options.environ)

        share = math.ceil(spec.batch_size / options.workers)
        tools = msgspec.structs.replace(spec, functions=[], store=None, batch_size=share)
        functions = msgspec.structs.replace(spec, mcp=None, agent=None, policies={})
        # Of an agent loop's code all that is bounded is the whole rollout.
        longest_call = spec.limits.timeout if spec.agent else min(spec.limits.tool_timeout, spec.limits.timeout)
        longest_call += FREEZE_GRACE_SECONDS
        longest_score = spec.limits.reward_timeout + FREEZE_GRACE_SECONDS
        load = options.load_seconds
        agents = scorers = None
        has_agent = spec.mcp is not None or spec.agent is not None
        if has_agent and options.isolation == "rollout":
            spawner = TemplateSpawner(boot(tools))
            agents = WorkerGroup(spawner, options.workers, memory, longest_call, 1, alone=alone, load_limit=load)
        elif has_agent:
            workers = ForkServerSpawner(boot(tools))
            agents = WorkerGroup(workers, options.workers, memory, longest_call, share, load_limit=load)
        if spec.functions:
            workers = ForkServerSpawner(boot(functions))
            scorers = WorkerGroup(workers, options.workers, memory, longest_score, share, load_limit=load)
        pool = cls(spec, agents, scorers)
        async with AsyncExitStack() as stack:
            for part in (agents, scorers):
                if part is not None:
                    await stack.enter_async_context(part.working())
            agent = await agents.ready() if agents else Ready()
            scorer = await scorers.ready() if scorers else Ready()
            pool._loaded = Ready(
                agent.tools,
                scorer.functions,
                scorer.problems,
                agent.tool_sources,
                scorer.function_sources,
                agent.agent,
            )
            yield pool

    @property
    def loaded(self) -> Ready:
        agents = self._agents.sources if self._agents else {}
        scorers = self._scorers.sources if self._scorers else {}
        return msgspec.structs.replace(
            self._loaded,
            tool_sources=self._loaded.tool_sources | agents,
            function_sources=self._loaded.function_sources | scorers,
        )

    @property
    def mixed(self) -> bool:
        return any(group.mixed for group in (self._agents, self._scorers) if group is not None)

    @property
    def spent_usd(self) -> float:
        return self._rollouts.spent_usd

    async def probe(self, policy: str, *, price: bool) -> None:
        assert self._agents is not None
        job = ProbeJob(uuid4().hex, policy, price)
        try:
            _check(await self._agents.run(job, Probed, _ignore, _nothing))
        except JobFailedError as failed:
            raise ModelStartError(f"the model could not be asked: {failed}") from failed

    async def rollout(self, job: RolloutJob, listen: Callable[[Progress], None] | None = None) -> Rollout:
        assert self._agents is not None
        with self._rollouts.start(job, listen) as builder:
            try:
                done = await self._agents.run(job, RolloutDone, self._rollouts.add, builder.restart)
            except JobFailedError as failed:
                return builder.abandon(_while_running(failed.failure, builder.open_tools))
            return builder.finish(done)

    def resume(self, order: Resume) -> None:
        assert self._agents is not None
        self._rollouts.resume(order)
        self._agents.resume(order)

    async def score(self, job: ScoreJob) -> list[list[Score]]:
        assert self._scorers is not None
        if len(job.keys) == 1:
            return [await self._score_one(job)]
        try:
            return _scores(await self._scorers.run(job, ScoresDone, _ignore, _nothing))
        except JobFailedError:
            # The function that has taken the worker down is found, and pays alone, when each is scored on its own.
            parts = zip(job.keys, job.rows, strict=True)
            return [
                await self._score_one(ScoreJob(f"{job.id}.{number}", [key], [row], job.functions))
                for number, (key, row) in enumerate(parts)
            ]

    async def _score_one(self, job: ScoreJob) -> list[Score]:
        """Score a single rollout, again without each function that takes a worker down."""
        assert self._scorers is not None
        scores: dict[str, Score] = {}
        while waiting := [name for name in job.functions if name not in scores]:
            started = _LastStarted()
            rest = msgspec.structs.replace(job, functions=waiting)
            try:
                done = await self._scorers.run(rest, ScoresDone, started.listen, _nothing)
            except JobFailedError as failed:
                name = started.function or waiting[0]
                scores[name] = Score(name, failure=_blame_function(self._refs[name], failed.failure))
            else:
                scores.update((score.function, score) for score in _scores(done)[0])
        return [scores[name] for name in job.functions]

    async def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a trainer's rollout.

        Args:
            request: The RolloutRequest, JSON-able.

        Returns:
            The RolloutResponse.

        Raises:
            JobFailedError: The rollout took its worker down.
        """
        assert self._agents is not None
        replies: list[TrainerReply] = []

        def listen(event: Progress) -> None:
            # The job has this very list: in another worker it goes on from there.
            if isinstance(event, Replied):
                replies.append(event.reply)

        job = ServeJob(uuid4().hex, request, replies)
        return (await self._agents.run(job, ServeDone, listen, _nothing)).response

    async def tools(self, request: dict[str, Any]) -> ToolsDone:
        """Ask the agent loop for the tools of a request; raises JobFailedError when that takes its worker down."""
        assert self._agents is not None
        return await self._agents.run(ToolsJob(uuid4().hex, request), ToolsDone, _ignore, _nothing)

    async def inspect(self) -> Inspected:
        """Validate the agent loop; raises JobFailedError when that took its worker down."""
        assert self._agents is not None
        return await self._agents.run(InspectJob(uuid4().hex), Inspected, _ignore, _nothing)

    def oldest(self) -> InFlight | None:
        return self._rollouts.oldest()

    def kill(self) -> None:
        for group in (self._agents, self._scorers):
            if group is not None:
                group.kill()


class _LastStarted:
    """Remembers which function a scoring job came to."""

    function: str | None = None

    def listen(self, event: Progress) -> None:
        if isinstance(event, ScoringStarted):
            self.function = event.function


def _check(done: object) -> None:
    if isinstance(done, Probed) and done.error is not None:
        raise ModelStartError(done.error)


def _scores(done: ScoresDone) -> list[list[Score]]:
    if done.error is not None:
        raise StoreError(done.error)
    return done.scores


def _while_running(failure: Failure, tools: list[str]) -> Failure:
    if not tools:
        return failure
    names = ", ".join(sorted(set(tools)))
    return msgspec.structs.replace(failure, message=f"{failure.message} (while running {names})")


def _blame_function(ref: FunctionRef, failure: Failure) -> Failure:
    """A function that takes its worker down has failed itself, whatever the worker's end looks like."""
    return Failure(ref.kind, failure.message, kind=failure.kind, file=ref.file, line=ref.line)


def default_workers(batch_size: int) -> int:
    """As many workers as CPUs may be used, but no more than rollouts run at a time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, batch_size)


def _fair_share(workers: int) -> int:
    """Bytes for each worker when all of them together may take four fifths of the memory that is free now."""
    return int(psutil.virtual_memory().available * 0.8 / workers)


def _ignore(event: Progress) -> None:
    """Nobody listens to this job's events."""


def _nothing() -> None:
    """Nothing has to be forgotten when this job begins anew."""


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """User code's output must not mix with results on stdout, neither from Python nor from below."""
    sys.stdout.flush()
    stdout, saved = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout
        os.dup2(saved, 1)
        os.close(saved)
