"""Two stored runs, row by row: rows are joined by content, and a row's score is the mean of its attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from osmosis_ai.records import Failure, Rollout, Row, Score
from osmosis_ai.store.compare import compare_runs
from osmosis_ai.store.queries import RunInfo, SharedRows
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.store.views import FlippedRow

FAILURE = Failure("model", "dropped")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(tmp_path) as opened:
        yield opened


def save(
    store: RunStore,
    rows: dict[str, list[float | None]],
    *,
    code: str | None = None,
    status: Any = "finished",
    **more: Any,
) -> RunInfo:
    """A run whose rows have these scores by `f`; None is a rollout that failed."""

    async def run() -> str:
        run_id = await store.create_run("eval", identity=more.pop("identity", {}), config={"functions": ["f"], **more})
        for index, (row_id, values) in enumerate(rows.items()):
            for run_index, value in enumerate(values):
                failure = FAILURE if value is None else None
                finish: Any = "error" if failure else "stop"
                rollout = Rollout(f"{row_id}.{run_index}", index, row_id, run_index, "policy", [], finish, 1.0, failure)
                key = await store.save_rollout(run_id, rollout, Row(index, row_id, "s", f"prompt {row_id}"))
                if value is not None:
                    scores = [Score("f", value)]
                    await store.save_scores({key: scores}, code=None if code is None else {"f": code})
        await store.mark(run_id, status)
        return run_id

    return store.find_run(asyncio.run(run()))


def test_rows_are_joined_by_content_and_scored_by_their_mean(store: RunStore) -> None:
    a = save(store, {"x": [0.7, 0.7, 0.7], "y": [1.0, 0.0], "gone": [1.0]})
    b = save(store, {"new": [0.0], "y": [1.0, 1.0], "x": [0.0]})
    found = compare_runs(store, a, b, 0.7)
    (function,) = found.functions.values()
    # The mean of three times 0.7 is a little less than 0.7 in floating point, and passes all the same.
    assert function.flips == [FlippedRow(0, "x", pytest.approx(0.7), 0.0), FlippedRow(1, "y", 0.5, 1.0)]
    assert [flip.passes for flip in function.flips] == [False, True]
    assert function.difference == pytest.approx((0.5 - 0.7) / 2)
    assert (function.wins, function.losses, function.ties) == (1, 1, 0)
    assert found.rows == SharedRows(2, 1, 1)


def test_a_failed_rollout_counts_as_zero_and_is_said(store: RunStore) -> None:
    a, b = save(store, {"x": [1.0], "y": [1.0]}), save(store, {"x": [None], "y": [None]})
    found = compare_runs(store, a, b, 1.0)
    assert found.functions["f"].difference == -1.0
    assert found.notes == ["run B has 2 failed rollouts; their missing scores count as 0"]


def test_notes(store: RunStore) -> None:
    a = save(store, {"x": [1.0]}, identity={"tool code": "1", "model": "m", "n": 1}, n=1)
    b = save(
        store,
        {"x": [1.0]},
        status="interrupted",
        identity={"tool code": "2", "model": "other", "n": 2},
        n=2,
        planned=8,
        model="offline/oracle",
        stand_in=True,
    )
    assert compare_runs(store, a, b, 1.0).notes == [
        "run B: offline/oracle is an offline stand-in, so its scores say nothing about a model",
        "run B is incomplete: 1 of 8 rollouts are recorded",
        "attempts per row differ: 1 in A, 2 in B; the rows' means are compared",
        "the runs also differ in: tool code",
    ]


@pytest.mark.parametrize(
    ("code_a", "code_b", "same"), [("1", "1", True), ("1", "2", False), (None, "1", None), (None, None, None)]
)
def test_other_reward_code_is_noticed(
    store: RunStore, code_a: str | None, code_b: str | None, same: bool | None
) -> None:
    a, b = save(store, {"x": [1.0]}, code=code_a), save(store, {"x": [1.0]}, code=code_b)
    found = compare_runs(store, a, b, 1.0)
    assert found.functions["f"].same_code is same
    assert any("rescore" in note for note in found.notes) is (same is False)
