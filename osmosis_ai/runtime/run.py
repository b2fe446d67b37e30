"""A run: plan → jobs → records. Slots each take the next row; a record is durable before it counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol
from uuid import uuid4

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from osmosis_ai.dataset import Dataset
from osmosis_ai.records import FunctionRef, ModelSpec, Record, Rollout, Row, Score
from osmosis_ai.runtime.frames import Limits, RolloutJob, ScoreJob, StoredBatch
from osmosis_ai.runtime.pool import Pool
from osmosis_ai.runtime.sources import combined_hash
from osmosis_ai.runtime.store import Completed, RolloutKey, RunStore
from osmosis_ai.runtime.tasks import task_group

__all__ = ["BASELINE", "POLICY", "RescoreListener", "Run", "RunListener", "RunPlan", "rescore"]

POLICY = "policy"
BASELINE = "baseline"
BATCH_SECONDS = 0.05
MAX_BATCH = 32
GATHER_SECONDS = 0.03
"""How long a scored batch waits for more to join it, when functions are so quick that several fit."""
STORED_BATCH_SECONDS = 0.1
MAX_STORED_BATCH = 256


class RunPlan(Record, frozen=True):
    """Everything that decides what a run does. `policies` has `policy`, and `baseline` when one is compared."""

    command: str
    root: str
    dataset: str
    total_rows: int
    policies: dict[str, ModelSpec]
    functions: list[FunctionRef]
    limits: Limits
    mcp_dir: str | None = None
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
    """A durable rollout on its way to the scorers."""

    rollout: Rollout
    row: Row


class _Scoring:
    """Takes durable rollouts to the scorers and their scores to the store."""

    def __init__(self, run_id: str, pool: Pool, store: RunStore, listener: RunListener, *, partial: bool) -> None:
        self.functions = pool.loaded.functions
        code = combined_hash(pool.loaded.function_sources)
        self.code: dict[str, str] = dict.fromkeys(self.functions, code)
        self._run_id = run_id
        self._pool = pool
        self._store = store
        self._listener = listener
        self._partial = partial
        self._pace = _Pace()
        self._gathering = anyio.Lock()

    def waiting(self) -> Iterator[_Unscored]:
        """Stored rollouts that these functions, as their code is now, have not scored."""
        if not self.functions:
            return
        for rollout, row in self._store.iter_for_scoring(self._run_id, without=self.code):
            if self.wants(rollout):
                yield _Unscored(rollout, row)

    def wants(self, rollout: Rollout) -> bool:
        """Whether a rollout is to be scored: one that failed isn't, but for a partial one when that was asked for."""
        failure = rollout.failure
        return failure is None or (self._partial and failure.origin == "timeout")

    async def score(self, batch: list[_Unscored]) -> None:
        """Score rollouts with every function."""
        wanted = [unscored for unscored in batch if self.functions and self.wants(unscored.rollout)]
        jobs = [
            ScoreJob(rollout.id, rollout.messages, row.index, row.ground_truth, row.extra, self.functions)
            for rollout, row in wanted
        ]
        scores = dict(zip((job.id for job in jobs), await self._pool.score_all(jobs) if jobs else [], strict=True))
        if scores:
            await self._store.save_all_scores(self._run_id, scores, code=self.code)
        for rollout, _ in batch:
            self._listener.scores_done(rollout, scores.get(rollout.id, []))

    async def slot(self, receive: MemoryObjectReceiveStream[_Unscored]) -> None:
        """Score what comes until no more does, several at a time when that takes no longer than `BATCH_SECONDS`."""
        async with receive:
            while batch := await self._gather(receive):
                started = monotonic()
                await self.score(batch)
                self._pace.measured(len(batch), monotonic() - started)

    async def _gather(self, receive: MemoryObjectReceiveStream[_Unscored]) -> list[_Unscored]:
        # One slot at a time, or all of them would wait with a rollout each.
        async with self._gathering:
            try:
                batch = [await receive.receive()]
            except anyio.EndOfStream:
                return []
            size = min(MAX_BATCH, self._pace.fitting(BATCH_SECONDS))
            if size > 1 and receive.statistics().current_buffer_used < size - 1:
                await anyio.sleep(GATHER_SECONDS)
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
        self._spent_before = 0.0
        self._scoring = _Scoring(id, pool, store, listener, partial=plan.score_partial)
        self._scope = anyio.CancelScope()

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
        if plan.max_cost is not None:
            self._spent_before = sum(outcome.cost_usd or 0.0 for outcome in self._store.outcomes(self.id))
        send, receive = anyio.create_memory_object_stream[_Unscored](max(plan.batch_size * 4, MAX_BATCH * 2))
        jobs = self._jobs()
        with self._scope:
            async with task_group() as group:
                for _ in range(plan.batch_size):
                    group.start_soon(self._scoring.slot, receive.clone())
                receive.close()
                async with send, task_group() as slots:
                    slots.start_soon(self._feed_waiting, send)
                    for _ in range(min(plan.batch_size, plan.total_rollouts)):
                        slots.start_soon(self._rollout_slot, jobs, send)

    async def _feed_waiting(self, send: MemoryObjectSendStream[_Unscored]) -> None:
        if self._recorded:
            for unscored in self._scoring.waiting():
                rollout = unscored.rollout
                key = RolloutKey(rollout.policy, rollout.row_id, rollout.run_index)
                if key in self._recorded and key not in self._again:
                    await send.send(unscored)

    async def _rollout_slot(self, jobs: Iterator[RolloutJob], send: MemoryObjectSendStream[_Unscored]) -> None:
        for job in jobs:
            rollout = await self._pool.rollout(job)
            replace = RolloutKey(job.policy, job.row.id, job.run_index) in self._again
            await self._store.save_rollout(self.id, rollout, job.row, replace=replace)
            self._listener.rollout_done(rollout)
            await send.send(_Unscored(rollout, job.row))

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
        return limit is not None and self._spent_before + self._pool.spent_usd >= limit


class RescoreListener(Protocol):
    """Hears of stored rollouts that were scored again, after their scores are durable."""

    def scored(self, count: int) -> None:
        """So many more rollouts."""


async def rescore(run_id: str, pool: Pool, store: RunStore, listener: RescoreListener, *, slots: int = 4) -> None:
    """Score a stored run's trajectories with the pool's functions, without any model call.

    Rollouts that these functions, as their code is now, have scored already are left alone. Workers read the
    trajectories themselves.

    Args:
        run_id: The run.
        pool: Workers that have loaded the functions.
        store: Where the trajectories are and the scores go.
        listener: Hears of what is done.
        slots: How many batches are scored at a time.
    """
    functions = pool.loaded.functions
    if not functions:
        return
    code: dict[str, str] = dict.fromkeys(functions, combined_hash(pool.loaded.function_sources))
    waiting = store.scoring_keys(run_id, without=code)
    pace = _Pace()

    async def slot() -> None:
        while batch := list(islice(waiting, min(MAX_STORED_BATCH, pace.fitting(STORED_BATCH_SECONDS)))):
            started = monotonic()
            keys = [found.key for found in batch]
            rows = [found.row_index for found in batch]
            scores = await pool.score_stored(StoredBatch(uuid4().hex, str(store.path), keys, rows, functions))
            if scores is None:
                # A function that takes its worker down is found, and pays alone, when each is scored on its own.
                scores = [await pool.score(_stored_job(store, key, functions)) for key in keys]
            await store.save_stored_scores(dict(zip(keys, scores, strict=True)), code=code)
            listener.scored(len(batch))
            pace.measured(len(batch), monotonic() - started)

    async with task_group() as group:
        for _ in range(slots):
            group.start_soon(slot)


def _stored_job(store: RunStore, key: int, functions: list[str]) -> ScoreJob:
    rollout, row = store.scoring_input(key)
    return ScoreJob(rollout.id, rollout.messages, row.index, row.ground_truth, row.extra, functions)
