"""The pool over worker groups: it takes jobs and returns records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from uuid import uuid4

import msgspec

from osmosis_ai.errors import ModelStartError, StoreError
from osmosis_ai.models.choice import reads_references
from osmosis_ai.records import Failure, FunctionRef, JsonObject, Rollout, Score
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.pool.base import InFlight
from osmosis_ai.runtime.pool.group import CodeChangedError, JobFailedError, WorkerGroup
from osmosis_ai.runtime.pool.trajectory import TrajectoryBuilder
from osmosis_ai.runtime.pool.worker import died

__all__ = ["WorkerPool", "open_groups"]


class _Rollouts:
    """The rollouts in flight, of an agent loop of the repository's own or not, and the total cost of all rollouts."""

    def __init__(self, *, own_loop: bool) -> None:
        self.spent_usd = 0.0
        self._own_loop = own_loop
        self._builders: dict[str, TrajectoryBuilder] = {}
        self._listeners: dict[str, Callable[[protocol.Progress], None]] = {}

    def add(self, event: protocol.Progress) -> None:
        """Process a worker's event about a rollout; raise ValueError if such a rollout has no such event."""
        builder = self._builders[event.job]
        if (isinstance(event, protocol.Asked) and not self._own_loop) or (
            isinstance(event, (protocol.Paused, protocol.Called, protocol.Reworded)) and not builder.job.stepping
        ):
            raise ValueError(f"{type(event).__name__} in another kind of rollout")
        builder.add(event)
        if isinstance(event, (protocol.TurnDone, protocol.SampleDone)) and not event.turn.cached:
            self.spent_usd += event.turn.cost_usd or 0.0
        if event.job in self._listeners:
            self._listeners[event.job](event)

    @contextmanager
    def start(
        self, job: protocol.RolloutJob, listen: Callable[[protocol.Progress], None] | None
    ) -> Iterator[TrajectoryBuilder]:
        builder = self._builders[job.id] = TrajectoryBuilder(job)
        if listen is not None:
            self._listeners[job.id] = listen
        try:
            yield builder
        finally:
            del self._builders[job.id]
            self._listeners.pop(job.id, None)

    def in_flight(self) -> Iterator[InFlight]:
        # Dicts keep insertion order, so the first entry is the oldest.
        for builder in self._builders.values():
            row, run_index = builder.job.row.index, builder.job.run_index
            yield InFlight(row, run_index, builder.elapsed_ms / 1000, builder.waiting_on)

    def resume(self, order: protocol.Resume) -> None:
        """Let the clock of a paused rollout run again."""
        if order.action == "next" and order.id in self._builders:
            self._builders[order.id].resume()


class WorkerPool:
    """Two worker groups, which may be the same: for the repository's tools or agent loop, and for its functions."""

    ahead = 0
    where = ""

    def __init__(self, spec: protocol.WorkerSpec, agents: WorkerGroup | None, scorers: WorkerGroup | None) -> None:
        self.agents = agents
        self.scorers = scorers
        self._spec = spec
        self._refs = {ref.name: ref for ref in spec.functions}
        self._rollouts = _Rollouts(own_loop=spec.own_agent)

    @property
    def loaded(self) -> protocol.Ready:
        agent = (self.agents and self.agents.loaded) or protocol.Ready()
        scorer = (self.scorers and self.scorers.loaded) or protocol.Ready()
        return msgspec.structs.replace(scorer, tools=agent.tools, tool_sources=agent.tool_sources, agent=agent.agent)

    @property
    def changed(self) -> list[str]:
        found = (group.changed for group in (self.agents, self.scorers) if group is not None)
        return sorted(set().union(*found))

    @property
    def shortage(self) -> str | None:
        found = (group.shortage for group in (self.agents, self.scorers) if group is not None)
        return next((shortage for shortage in found if shortage is not None), None)

    @property
    def mixed(self) -> bool:
        return any(group.mixed for group in (self.agents, self.scorers) if group is not None)

    @property
    def spent_usd(self) -> float:
        return self._rollouts.spent_usd

    async def probe(self, policy: str, *, price: bool) -> None:
        assert self.agents is not None
        job = protocol.ProbeJob(uuid4().hex, policy, price)
        try:
            done = await self.agents.run(job, protocol.Probed)
        except JobFailedError as failed:
            raise ModelStartError(f"the model could not be checked: {failed}") from failed
        if done.error is not None:
            raise ModelStartError(done.error)

    async def rollout(
        self, job: protocol.RolloutJob, listen: Callable[[protocol.Progress], None] | None = None
    ) -> Rollout:
        assert self.agents is not None
        job = self._without_references(job)
        with self._rollouts.start(job, listen) as builder:
            try:
                done = await self.agents.run(job, protocol.RolloutDone, self._rollouts.add, builder.restart)
            except CodeChangedError:
                raise
            except JobFailedError as failed:
                return builder.abandon(_while_running(failed.failure, builder.open_tools))
            return builder.abandon(died(_FORGED)) if self._is_forged(done) else builder.finish(done)

    def _without_references(self, job: protocol.RolloutJob) -> protocol.RolloutJob:
        """Leave out what the row's tools must not know, unless its model plays it. An agent loop scores itself."""
        if reads_references(self._spec.policies[job.policy]):
            return job
        truth = job.row.ground_truth if self._spec.own_agent else None
        row = msgspec.structs.replace(job.row, ground_truth=truth, solution=None)
        return msgspec.structs.replace(job, row=row)

    def _is_forged(self, done: protocol.RolloutDone) -> bool:
        """Return True if the end of a rollout has a part that only another kind's may have, or another's score."""
        if done.finish_reason == "removed" and self._spec.workflow is None:
            return True
        if not self._spec.own_agent:
            return done.agent is not None or done.messages is not None
        score = None if done.agent is None else done.agent.score
        return score is not None and (score.function != self.loaded.agent or score.function in self._refs)

    def resume(self, order: protocol.Resume) -> None:
        assert self.agents is not None
        self._rollouts.resume(order)
        self.agents.resume(order)

    async def score(self, job: protocol.ScoreJob) -> list[list[Score]]:
        assert self.scorers is not None
        if len(job.inputs) == 1:
            return [await self._score_one(job)]
        try:
            return _scores(await self.scorers.run(job, protocol.ScoresDone))
        except CodeChangedError:
            raise
        except JobFailedError:
            # Scored one by one, only the function and the rollout that kill a worker lose their score.
            return [
                await self._score_one(protocol.ScoreJob(f"{job.id}.{number}", [one], job.functions))
                for number, one in enumerate(job.inputs)
            ]

    async def _score_one(self, job: protocol.ScoreJob) -> list[Score]:
        """Score a single rollout, and repeat without each function that kills its worker."""
        assert self.scorers is not None
        scores: dict[str, Score] = {}
        started: str | None = None

        def listen(event: protocol.Progress) -> None:
            nonlocal started
            if isinstance(event, protocol.ScoringStarted):
                started = event.function

        while waiting := [name for name in job.functions if name not in scores]:
            started = None
            rest = msgspec.structs.replace(job, functions=waiting)
            try:
                done = await self.scorers.run(rest, protocol.ScoresDone, listen)
            except CodeChangedError:
                raise
            except JobFailedError as failed:
                # The worker may have died before it reported its first function.
                name = started or waiting[0]
                scores[name] = Score(name, failure=_blame_function(self._refs[name], failed.failure))
            else:
                scores.update((score.function, score) for score in _scores(done)[0])
        return [scores[name] for name in job.functions]

    async def serve(self, request: JsonObject) -> JsonObject:
        assert self.agents is not None
        replies: list[protocol.TrainerReply] = []

        def listen(event: protocol.Progress) -> None:
            # The job holds this same list, so a second attempt replays these replies.
            if isinstance(event, protocol.Replied):
                replies.append(event.reply)

        job = protocol.ServeJob(uuid4().hex, request, replies)
        return (await self.agents.run(job, protocol.ServeDone, listen)).response

    async def tools(self, request: JsonObject) -> protocol.ToolsDone:
        assert self.agents is not None
        return await self.agents.run(protocol.ToolsJob(uuid4().hex, request), protocol.ToolsDone)

    async def inspect(self) -> protocol.Inspected:
        assert self.agents is not None
        return await self.agents.run(protocol.InspectJob(uuid4().hex), protocol.Inspected)

    def oldest(self) -> InFlight | None:
        return next(self._rollouts.in_flight(), None)

    def in_flight(self) -> list[InFlight]:
        return list(self._rollouts.in_flight())

    def news(self) -> list[str]:
        return []

    def kill(self) -> None:
        for group in (self.agents, self.scorers):
            if group is not None:
                group.kill()


@asynccontextmanager
async def open_groups(
    spec: protocol.WorkerSpec, agents: WorkerGroup | None, scorers: WorkerGroup | None
) -> AsyncIterator[WorkerPool]:
    """Start worker groups, wait until they have loaded the repository, and yield them as a pool.

    The two groups may be the same. Raises StartError if something can't be loaded.
    """
    # A dict instead of a set keeps the order and drops a duplicate.
    groups = dict.fromkeys(group for group in (agents, scorers) if group is not None)
    async with AsyncExitStack() as stack:
        for group in groups:
            await stack.enter_async_context(group.working())
        for group in groups:
            await group.ready()
        yield WorkerPool(spec, agents, scorers)


_FORGED = "it sent the end of another kind of rollout, or a score under another name than its agent loop's"


def _scores(done: protocol.ScoresDone) -> list[list[Score]]:
    if done.error is not None:
        raise StoreError(done.error)
    return done.scores


def _while_running(failure: Failure, tools: list[str]) -> Failure:
    if not tools:
        return failure
    names = ", ".join(sorted(set(tools)))
    return msgspec.structs.replace(failure, message=f"{failure.message} (while running {names})")


def _blame_function(ref: FunctionRef, failure: Failure) -> Failure:
    """Turn a worker's failure into that of the function that caused it, unless it could not be started."""
    if failure.kind == "start":
        return failure
    return Failure(ref.kind, failure.message, kind=failure.kind, file=ref.file, line=ref.line)
