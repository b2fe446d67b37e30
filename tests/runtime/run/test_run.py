"""A run over a pool without processes: rollouts run, records stored, and the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pytest

from osmosis_ai.config import LimitsConfig, RunConfig, ScoringConfig, WorkersConfig
from osmosis_ai.data.dataset import Dataset
from osmosis_ai.records import Failure, FunctionRef, ModelSpec, Outcome, Record, Rollout, Row, Score
from osmosis_ai.runtime.protocol import RolloutJob
from osmosis_ai.runtime.run.plan import RunPlan
from osmosis_ai.runtime.run.run import Run
from osmosis_ai.runtime.run.scoring import Scored
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.testing import FakePool

pytestmark = pytest.mark.anyio


class Heard:
    """The records that a run announces."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.scores: list[list[Score]] = []

    def rollout_started(self, job: RolloutJob) -> None:
        return None

    def rollout_done(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)

    def scores_done(self, scored: list[Scored]) -> None:
        self.scores.extend(one.scores for one in scored)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(tmp_path) as opened:
        yield opened


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    """Four rows, two at a time."""
    dataset = tmp_path / "rows.jsonl"
    rows = [{"system_prompt": "s", "user_prompt": f"{index}?", "ground_truth": str(index)} for index in range(4)]
    dataset.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return RunPlan(
        RunConfig(workers=WorkersConfig(batch_size=2), command="test"),
        str(tmp_path),
        str(tmp_path),
        str(dataset),
        {"policy": ModelSpec("offline/oracle", "offline", "offline/oracle")},
        [FunctionRef("reward", "rewards", "reward", str(tmp_path))],
        len(rows),
    )


def changed(plan: RunPlan, **groups: Record) -> RunPlan:
    return msgspec.structs.replace(plan, config=msgspec.structs.replace(plan.config, **groups))


def rows_of(plan: RunPlan) -> Iterator[Row]:
    return Dataset(Path(plan.dataset)).rows(offset=plan.config.data.offset, limit=plan.config.data.limit)


async def execute(plan: RunPlan, pool: FakePool, store: RunStore, heard: Heard, run_id: str | None = None) -> Run:
    """Run a plan, or the remainder of one."""
    completed = store.completed_keys(run_id) if run_id is not None else None
    run_id = run_id or await store.create_run(plan.config.command, identity={}, config={})
    run = Run(run_id, plan, rows_of(plan), pool, store, heard, completed=completed)
    with anyio.fail_after(30):
        await run.execute()
    return run


def outcomes(store: RunStore, run: Run) -> list[Outcome]:
    return sorted(store.outcomes(run.id), key=lambda outcome: (outcome.row_index, outcome.run_index))


async def test_every_row_is_run_stored_and_scored(plan: RunPlan, store: RunStore) -> None:
    pool, heard = FakePool(score=lambda function, row_index: row_index / 4), Heard()
    run = await execute(changed(plan, scoring=ScoringConfig(n=2)), pool, store, heard)
    stored = outcomes(store, run)
    assert [(one.row_index, one.run_index, one.reward) for one in stored] == [
        (row, number, row / 4) for row in range(4) for number in range(2)
    ]
    assert len(heard.rollouts) == len(heard.scores) == 8
    assert {rollout.messages[-1]["content"] for rollout in heard.rollouts} == set("0123")


async def test_a_rollout_that_fails_is_stored_and_not_scored(plan: RunPlan, store: RunStore) -> None:
    async def reply(job: RolloutJob) -> str | Failure:
        return Failure("model", "it is down", kind="refused") if job.row.index == 1 else "fine"

    pool, heard = FakePool(reply=reply), Heard()
    run = await execute(plan, pool, store, heard)
    failed = outcomes(store, run)[1]
    assert (failed.finish_reason, failed.scores) == ("error", {})
    assert failed.failure is not None
    assert failed.failure.message == "it is down"
    assert sorted(row for _, row in pool.scored) == [0, 2, 3]
    assert sorted(map(len, heard.scores)) == [0, 1, 1, 1]


async def test_a_function_that_fails_leaves_its_failure(plan: RunPlan, store: RunStore) -> None:
    broken = Failure("reward", "ValueError: no number", kind="exception")
    run = await execute(plan, FakePool(score=lambda function, row: broken if row == 2 else 0.5), store, Heard())
    scores = [one.scores["reward"] for one in outcomes(store, run)]
    assert [score.value for score in scores] == [0.5, 0.5, None, 0.5]
    assert scores[2].failure == broken


async def test_a_stopped_run_is_resumed_with_what_is_left(plan: RunPlan, store: RunStore) -> None:
    async def reply(job: RolloutJob) -> str | Failure:
        if job.row.index == 1:
            first.stop()
        return "done"

    pool = FakePool(reply=reply)
    run_id = await store.create_run(plan.config.command, identity={}, config={})
    first = Run(run_id, plan, rows_of(plan), pool, store, Heard())
    await first.execute()
    assert [job.row.index for job in pool.rollouts] == [0, 1]

    rest = FakePool()
    run = await execute(plan, rest, store, Heard(), run_id)
    assert [job.row.index for job in rest.rollouts] == [2, 3]
    assert [one.reward for one in outcomes(store, run)] == [1.0] * 4


async def test_a_cancelled_run_leaves_no_record_of_what_ran(plan: RunPlan, store: RunStore) -> None:
    async def reply(job: RolloutJob) -> str | Failure:
        if job.row.index < 2:
            return "done"
        oldest = pool.oldest()
        assert oldest is not None
        assert oldest.waiting_on == "the model (turn 1)"
        run.cancel()
        await anyio.sleep_forever()
        raise AssertionError

    pool = FakePool(reply=reply)
    run = Run(
        await store.create_run(plan.config.command, identity={}, config={}), plan, rows_of(plan), pool, store, Heard()
    )
    await run.execute()
    assert {one.row_index for one in outcomes(store, run)} <= {0, 1}
    assert pool.oldest() is None


async def test_no_rollout_starts_over_budget(plan: RunPlan, store: RunStore) -> None:
    pool = FakePool(cost_usd=0.4)
    capped = changed(plan, limits=LimitsConfig(max_cost=1.0), workers=WorkersConfig(batch_size=1))
    run = await execute(capped, pool, store, Heard())
    assert (len(pool.rollouts), run.out_of_budget) == (3, True)
    assert run.spent_usd == pytest.approx(1.2)
