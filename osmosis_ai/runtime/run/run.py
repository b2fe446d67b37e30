"""A run: plan → jobs → records. Slots each take the next row; a record is durable before it counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol
from uuid import uuid4

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from osmosis_ai.code_hashes import function_code
from osmosis_ai.data.dataset import Dataset
from osmosis_ai.records import FunctionRef, ModelSpec, Outcome, Record, Rollout, Row, Score
from osmosis_ai.runtime.pool.pool import Pool
from osmosis_ai.runtime.protocol import Limits, RolloutJob, ScoreJob, StoredBatch, WorkerSpec
from osmosis_ai.store import Completed, RolloutKey, RunStore, ScoringKey
from osmosis_ai.tasks import task_group

__all__ = ["BASELINE", "POLICY", "RescoreListener", "Run", "RunListener", "RunPlan", "judges_usd", "rescore"]

POLICY = "policy"
BASELINE = "baseline"
BATCH_SECONDS = 0.05
MAX_BATCH = 32
GATHER_SECONDS = 0.03
"""How long a scored batch waits for more to join it, when functions are so quick that several fit."""
STORED_BATCH_SECONDS = 0.1
MAX_STORED_BATCH = 256


class RunPlan(Record, frozen=True):
    """Everything that decides what a run does. `policies` has `policy`, and `baseline` when one is compared.

    `agent` is the repository's own agent loop as it was asked for, None for the built-in one; `agent_dir` is the folder
    of the agent's code, the tools' or the loop's, where it has one.
    """

    command: str
    root: str
    dataset: str
    total_rows: int
    policies: dict[str, ModelSpec]
    functions: list[FunctionRef]
    limits: Limits
    agent: str | None = None
    agent_dir: str | None = None
    offset: int = 0
    limit: int | None = None
    n: int = 1
    batch_size: int = 8
    pass_threshold: float = 1.0
    max_cost: float | None = None
    score_partial: bool = False

    @property
    def total_rollouts(self) -> int:
        """How many rollouts there are to run."""
        return self.total_rows * self.n * len(self.policies)


class RunListener(Protocol):
    """Hears of every record, after it is durable."""

    def rollout_done(self, rollout: Rollout) -> None:
        """A rollout is recorded."""

    def scores_done(self, rollout: Rollout, scores: list[Score]) -> None:
        """A rollout's scores are recorded; none when it could not be scored."""


class _Unscored(NamedTuple):
    """A durable rollout on its way to the scorers, and the functions that are to score it."""

    rollout: Rollout
    row: Row
    functions: list[str]


class _Scoring:
    """Takes durable rollouts to the scorers and their scores to the store."""

    def __init__(
        self,
        run_id: str,
        pool: Pool,
        store: RunStore,
        listener: RunListener,
        functions: list[FunctionRef],
        root: Path,
        *,
        partial: bool,
    ) -> None:
        self.functions = pool.loaded.functions
        self.spent_usd = 0.0
        code = function_code(functions, pool.loaded.function_sources, root)
        self._code = {name: code[name] for name in self.functions}
        self._run_id = run_id
        self._pool = pool
        self._store = store
        self._listener = listener
        self._partial = partial
        self._pace = _Pace()
        self._gathering = anyio.Lock()
        self._complete = anyio.Event()

    def waiting(self) -> Iterator[_Unscored]:
        """Stored rollouts that these functions, as their code is now, have not scored."""
        if not self.functions:
            return
        for rollout, row, missing in self._store.iter_for_scoring(self._run_id, without=self._code):
            if self.wants(rollout):
                yield _Unscored(rollout, row, missing)

    def wants(self, rollout: Rollout) -> bool:
        """Whether a rollout is to be scored: one that failed isn't, but for a partial one when that was asked for."""
        failure = rollout.failure
        return failure is None or (self._partial and failure.origin == "timeout")

    async def score(self, batch: list[_Unscored]) -> None:
        """Score rollouts with the functions that are to."""
        wanted = [unscored for unscored in batch if unscored.functions and self.wants(unscored.rollout)]
        jobs = [
            ScoreJob(rollout.id, rollout.messages, row.index, row.ground_truth, row.extra, functions)
            for rollout, row, functions in wanted
        ]
        scores = dict(zip((job.id for job in jobs), await self._pool.score_all(jobs) if jobs else [], strict=True))
        self.spent_usd += sum(judges_usd(its_scores) for its_scores in scores.values())
        if scores:
            await self._store.save_all_scores(self._run_id, scores, code=self._code)
        for rollout, _, _ in batch:
            self._listener.scores_done(rollout, scores.get(rollout.id, []))

    async def slot(self, receive: MemoryObjectReceiveStream[_Unscored]) -> None:
        """Score what comes until no more does, several at a time when that takes no longer than `BATCH_SECONDS`."""
        async with receive:
            while batch := await self._gather(receive):
                await self._timed(batch)

    async def stored_slot(self, waiting: Iterator[_Unscored]) -> None:
        """Score what an iterator shared by several slots gives, until it ends; as many at a time as in `slot`."""
        while batch := list(islice(waiting, self._fitting())):
            await self._timed(batch)

    def complete(self) -> None:
        """No more rollouts will come: what is here need not wait for any."""
        self._complete.set()

    async def _timed(self, batch: list[_Unscored]) -> None:
        started = monotonic()
        await self.score(batch)
        self._pace.measured(len(batch), monotonic() - started)

    def _fitting(self) -> int:
        return min(MAX_BATCH, self._pace.fitting(BATCH_SECONDS))

    async def _gather(self, receive: MemoryObjectReceiveStream[_Unscored]) -> list[_Unscored]:
        # One slot at a time, or all of them would wait with a rollout each.
        async with self._gathering:
            try:
                batch = [await receive.receive()]
            except anyio.EndOfStream:
                return []
            size = self._fitting()
            if size > 1 and receive.statistics().current_buffer_used < size - 1:
                with anyio.move_on_after(GATHER_SECONDS):
                    await self._complete.wait()
            with suppress(anyio.WouldBlock, anyio.EndOfStream):
                while len(batch) < size:
                    batch.append(receive.receive_nowait())
            return batch


class _Pace:
    """How long a rollout takes to be scored, from the last batch of any slot."""

    def __init__(self) -> None:
        self._each = math.inf

    def measured(self, count: int, seconds: float) -> None:
        """A batch has been scored."""
        self._each = seconds / count

    def fitting(self, seconds: float) -> int:
        """How many can be scored in so many seconds; at least 1."""
        return max(1, int(seconds / self._each))


class Run:
    """Runs a plan's rollouts in a pool and stores what comes out.

    Args:
        id: The run's id in the store.
        plan: What to run.
        pool: The workers.
        store: Where records go.
        listener: Hears of every record.
        completed: What is recorded already, of a run that is resumed.
        retry_failed: Whether rollouts that failed are run again.
        spent_usd: What counts as spent already, against `plan.max_cost`; None is what the run's records have cost.
    """

    def __init__(
        self,
        id: str,
        plan: RunPlan,
        pool: Pool,
        store: RunStore,
        listener: RunListener,
        *,
        completed: Completed | None = None,
        retry_failed: bool = False,
        spent_usd: float | None = None,
    ) -> None:
        self.id = id
        self.plan = plan
        self.stopping = False
        self.out_of_budget = False
        self._pool = pool
        self._store = store
        self._listener = listener
        self._recorded: set[RolloutKey] = set() if completed is None else completed.keys
        self._again = completed.failed if completed is not None and retry_failed else set()
        self._spent_before = spent_usd
        self._pool_before = pool.spent_usd
        self._scoring = _Scoring(id, pool, store, listener, plan.functions, Path(plan.root), partial=plan.score_partial)
        self._judged = {ref.name for ref in plan.functions if ref.kind == "rubric"}
        self._scope = anyio.CancelScope()

    @property
    def spent_usd(self) -> float:
        """What rollouts and judges have cost, with what was spent before."""
        here = self._pool.spent_usd - self._pool_before + self._scoring.spent_usd
        return (self._spent_before or 0.0) + here

    def stop(self) -> None:
        """Start no further rollouts; those that run go on."""
        self.stopping = True

    def cancel(self) -> None:
        """Cancel the rollouts that are running. They leave no record, as if they had never been started."""
        self.stopping = True
        self._scope.cancel()

    async def execute(self) -> None:
        """Run and score what isn't yet; returns when every record is durable, or when the run was cancelled."""
        plan = self.plan
        room = max(plan.batch_size * 4, MAX_BATCH * 2)
        if plan.max_cost is not None:
            if self._spent_before is None:
                self._spent_before = sum(map(_cost, self._store.outcomes(self.id)))
            # A judge's cost is known only once it has scored: no further rollouts run ahead of it.
            room = 0
        send, receive = anyio.create_memory_object_stream[_Unscored](room)
        jobs = self._jobs()
        with self._scope:
            async with task_group() as group:
                for _ in range(plan.batch_size):
                    group.start_soon(self._scoring.slot, receive.clone())
                receive.close()
                waiting = self._waiting()
                for _ in range(plan.batch_size if self._recorded else 0):
                    group.start_soon(self._scoring.stored_slot, waiting)
                async with send, task_group() as slots:
                    for _ in range(min(plan.batch_size, plan.total_rollouts)):
                        slots.start_soon(self._rollout_slot, jobs, send)
                self._scoring.complete()

    def _waiting(self) -> Iterator[_Unscored]:
        """The rollouts of an earlier time that are still to be scored."""
        for unscored in self._scoring.waiting():
            if self._over_budget() and self._judged.intersection(unscored.functions):
                self.out_of_budget = True
                continue
            rollout = unscored.rollout
            key = RolloutKey(rollout.policy, rollout.row_id, rollout.run_index)
            if key in self._recorded and key not in self._again:
                yield unscored

    async def _rollout_slot(self, jobs: Iterator[RolloutJob], send: MemoryObjectSendStream[_Unscored]) -> None:
        for job in jobs:
            rollout = await self._pool.rollout(job)
            replace = RolloutKey(job.policy, job.row.id, job.run_index) in self._again
            await self._store.save_rollout(self.id, rollout, job.row, replace=replace)
            self._listener.rollout_done(rollout)
            await send.send(_Unscored(rollout, job.row, self._scoring.functions))

    def _jobs(self) -> Iterator[RolloutJob]:
        plan = self.plan
        for row in Dataset(Path(plan.dataset)).rows(offset=plan.offset, limit=plan.limit):
            for run_index in range(plan.n):
                for policy in plan.policies:
                    key = RolloutKey(policy, row.id, run_index)
                    if key in self._recorded and key not in self._again:
                        continue
                    if self._over_budget():
                        self.out_of_budget = True
                        self.stopping = True
                    if self.stopping:
                        return
                    # The row's id too: in a dataset that was edited another row may have had this index.
                    job = f"{self.id}.{policy[0]}{row.index}.{run_index}.{row.id}"
                    yield RolloutJob(job, row, run_index, policy)

    def _over_budget(self) -> bool:
        limit = self.plan.max_cost
        return limit is not None and self.spent_usd >= limit


def judges_usd(scores: Iterable[Score]) -> float:
    """What the judge calls of scores have cost, as far as it is known."""
    return sum(call.cost_usd or 0.0 for score in scores for call in score.judge_calls)


def _cost(outcome: Outcome) -> float:
    return (outcome.cost_usd or 0.0) + judges_usd(outcome.scores.values())


class RescoreListener(Protocol):
    """Hears of stored rollouts that were scored again, after their scores are durable."""

    def scored(self, count: int) -> None:
        """So many more rollouts."""


async def rescore(
    run_id: str, pool: Pool, store: RunStore, listener: RescoreListener, spec: WorkerSpec, *, slots: int = 4
) -> None:
    """Score a stored run's trajectories with the pool's functions, without any model call.

    Rollouts that these functions, as their code is now, have scored already are left alone. Workers read the
    trajectories themselves.

    Args:
        run_id: The run.
        pool: Workers that have loaded the functions.
        store: Where the trajectories are and the scores go.
        listener: Hears of what is done.
        spec: What the workers have loaded.
        slots: How many batches are scored at a time.
    """
    functions = pool.loaded.functions
    if not functions:
        return
    hashes = function_code(spec.functions, pool.loaded.function_sources, Path(spec.root))
    code = {name: hashes[name] for name in functions}
    waiting = store.scoring_keys(run_id, without=code)
    pace = _Pace()

    async def slot() -> None:
        while batch := list(islice(waiting, min(MAX_STORED_BATCH, pace.fitting(STORED_BATCH_SECONDS)))):
            started = monotonic()
            # Most often all of them lack the same.
            for missing, alike in groupby(batch, key=lambda found: found.missing):
                await score(list(alike), missing)
            listener.scored(len(batch))
            pace.measured(len(batch), monotonic() - started)

    async def score(batch: list[ScoringKey], missing: list[str]) -> None:
        keys = [found.key for found in batch]
        rows = [found.row_index for found in batch]
        scores = await pool.score_stored(StoredBatch(uuid4().hex, str(store.path), keys, rows, missing))
        if scores is None:
            # A function that takes its worker down is found, and pays alone, when each is scored on its own.
            scores = [await pool.score(_stored_job(store, key, missing)) for key in keys]
        await store.save_stored_scores(dict(zip(keys, scores, strict=True)), code=code)

    async with task_group() as group:
        for _ in range(slots):
            group.start_soon(slot)


def _stored_job(store: RunStore, key: int, functions: list[str]) -> ScoreJob:
    rollout, row, _ = store.scoring_input(key)
    return ScoreJob(rollout.id, rollout.messages, row.index, row.ground_truth, row.extra, functions)
