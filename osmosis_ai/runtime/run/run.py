"""Execute a run: plan → jobs → records. Each slot takes the next job; a record counts only once it is durable."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio

from osmosis_ai.records import Outcome, Rollout, Row
from osmosis_ai.runtime.pool.base import Pool
from osmosis_ai.runtime.pool.group import HaltError
from osmosis_ai.runtime.protocol import Progress, RolloutJob
from osmosis_ai.runtime.run.plan import RunPlan
from osmosis_ai.runtime.run.scoring import MAX_BATCH, Scoring, ScoringListener, judges_usd
from osmosis_ai.store.live import RunningRollout
from osmosis_ai.store.queries import Completed, RolloutKey, Unscored
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.tasks import task_group

__all__ = ["Run", "RunListener"]

TELL_SECONDS = 0.5


class RunListener(ScoringListener, Protocol):
    """Notified of every rollout's start, and of every record once it is durable."""

    def rollout_started(self, job: RolloutJob) -> Callable[[Progress], None] | None:
        """Called before a rollout starts; returns the listener for its turns, if any."""

    def rollout_done(self, rollout: Rollout) -> None:
        """Called once a rollout is recorded."""


class Run:
    """Runs a plan's rollouts in a pool, and stores and scores them.

    `completed` holds the existing records of a resumed run. `spent_usd` is the cost that already counts towards
    `--max-cost`; None stands for the cost of the run's records. `draws` holds the draws of rollouts that the user asked
    to sample again. `halted` is set if the run stopped because lost workers could not be replaced.
    """

    def __init__(
        self,
        id: str,
        plan: RunPlan,
        rows: Iterable[Row],
        pool: Pool,
        store: RunStore,
        listener: RunListener,
        *,
        completed: Completed | None = None,
        retry_failed: bool = False,
        spent_usd: float | None = None,
        draws: Mapping[RolloutKey, str] | None = None,
    ) -> None:
        self.id = id
        self.plan = plan
        self._rows = rows
        self.stopping = False
        self.halted: HaltError | None = None
        self.out_of_budget = False
        self._pool = pool
        self.store = store
        self.listener = listener
        self._recorded: set[RolloutKey] = set() if completed is None else completed.keys
        self._again = completed.failed if completed is not None and retry_failed else set()
        self._spent_before = spent_usd
        self._draws = draws or {}
        # In watch mode a pool outlives the run, so it may already have cost something.
        self._pool_before = pool.spent_usd
        self._scoring = Scoring(
            id,
            pool,
            store,
            listener,
            plan.functions,
            Path(plan.root),
            self._halt,
            partial=plan.config.scoring.score_partial,
            # A judge's cost is known only once it has scored, so with a budget rollouts must not run ahead of scoring.
            room=0 if plan.config.limits.max_cost is not None else max(plan.config.workers.batch_size * 4, MAX_BATCH),
        )
        self._judged = {ref.name for ref in plan.functions if ref.kind == "rubric"}
        self._scope = anyio.CancelScope()

    @property
    def spent_usd(self) -> float:
        """Cost of rollouts and judges in USD, including the cost before this run."""
        here = self._pool.spent_usd - self._pool_before + self._scoring.spent_usd
        return (self._spent_before or 0.0) + here

    def stop(self) -> None:
        """Start no more rollouts; let running ones finish."""
        self.stopping = True

    def cancel(self) -> None:
        """Cancel the running rollouts, which leave no record, as if they had never started."""
        self.stopping = True
        self._scope.cancel()

    async def execute(self) -> None:
        """Run and score the missing rollouts; return once every record is durable, or after a cancellation."""
        plan = self.plan
        if plan.config.limits.max_cost is not None and self._spent_before is None:
            self._spent_before = sum(map(_cost, self.store.outcomes(self.id)))
        stored = self._waiting() if self._recorded else iter(())
        # One generator for all slots, so that rollouts start in the order of the rows.
        jobs = self.jobs()
        with self._scope:
            async with task_group() as group:
                group.start_soon(self._scoring.run, stored, plan.config.workers.batch_size)
                try:
                    async with self._telling(), task_group() as slots:
                        # With a budget, none may run ahead: its cost is known only at its end.
                        ahead = 0 if plan.config.limits.max_cost is not None else self._pool.ahead
                        for _ in range(min(plan.config.workers.batch_size + ahead, plan.total_rollouts)):
                            slots.start_soon(self._rollout_slot, jobs)
                finally:
                    # Otherwise scoring would wait for more rollouts forever.
                    self._scoring.complete()

    @asynccontextmanager
    async def _telling(self) -> AsyncIterator[None]:
        """Keep the file for viewers that says which rollouts are in flight, and what each waits for."""
        file = self.store.live_file(self.id)

        async def tell() -> None:
            while True:
                now = time.time()
                file.show(
                    [
                        RunningRollout(each.row_index, each.run_index, now - each.seconds, each.waiting_on, each.node)
                        for each in self._pool.in_flight()
                    ]
                )
                await anyio.sleep(TELL_SECONDS)

        async with task_group() as group:
            group.start_soon(tell)
            try:
                yield
            finally:
                group.cancel_scope.cancel()
                file.remove()

    def _waiting(self) -> Iterator[Unscored]:
        """Yield existing rollouts that lack scores."""
        for unscored in self._scoring.stored():
            if self._over_budget() and self._judged.intersection(unscored.functions):
                self.out_of_budget = True
            elif unscored.rollout in self._recorded and unscored.rollout not in self._again:
                yield unscored

    async def _rollout_slot(self, jobs: Iterator[RolloutJob]) -> None:
        for job in jobs:
            try:
                rollout = await self._pool.rollout(job, self.listener.rollout_started(job))
            except HaltError as error:
                self._halt(error)
                return
            await self.record(job, rollout)

    async def record(self, job: RolloutJob, rollout: Rollout) -> None:
        """Store a rollout that has ended, and queue it for scoring."""
        replace = RolloutKey(job.policy, job.row.id, job.run_index) in self._again
        key = await self.store.save_rollout(self.id, rollout, job.row, replace=replace)
        self.listener.rollout_done(rollout)
        await self._scoring.add(key, rollout)

    def _halt(self, error: HaltError) -> None:
        """Start no more rollouts, because a lost worker can't be replaced."""
        self.halted = error
        self.stop()

    def jobs(self) -> Iterator[RolloutJob]:
        """Yield the rollouts to run."""
        plan = self.plan
        for row in self._rows:
            for run_index in range(plan.config.scoring.n):
                for policy in plan.policies:
                    key = RolloutKey(policy, row.id, run_index)
                    if key in self._recorded and key not in self._again:
                        continue
                    if self._over_budget():
                        self.out_of_budget = True
                        self.stopping = True
                    if self.stopping:
                        return
                    # Includes the row's id, because in an edited dataset another row may have had this index.
                    job = f"{self.id}.{policy[0]}{row.index}.{run_index}.{row.id}"
                    yield RolloutJob(job, row, run_index, policy, draw=self._draws.get(key, ""))

    def _over_budget(self) -> bool:
        limit = self.plan.config.limits.max_cost
        return limit is not None and self.spent_usd >= limit


def _cost(outcome: Outcome) -> float:
    return (outcome.cost_usd or 0.0) + judges_usd(outcome.scores.values())
