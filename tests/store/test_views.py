"""JSON views of stored runs are complete and match the published schemas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from osmosis_ai.records import Failure, JsonObject, Record, Rollout, Row, Score, ToolCall, Turn, Usage
from osmosis_ai.schemas import schema_of
from osmosis_ai.store.compare import compare_runs
from osmosis_ai.store.queries import RolloutFilter, RunInfo
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.store.verdicts import verdicts_on
from osmosis_ai.store.views import (
    ListedRuns,
    RescoredRun,
    ShownRow,
    ShownRun,
    encode_view,
    rollout_detail,
    rollout_summary,
    run_view,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(tmp_path) as opened:
        yield opened


def new_run(store: RunStore, value: float, **config: Any) -> RunInfo:
    """A run of two rows, of which the second one failed."""
    turn = Turn(0, "stop", Usage(1, 2, 3), 4.0)
    message = {"role": "assistant", "content": "4"}

    async def write() -> str:
        run_id = await store.create_run("eval", identity={}, config={"functions": ["f"], **config})
        for index, failure in enumerate((None, Failure("model", "dropped"))):
            rollout = Rollout(
                f"r{index}", index, f"row{index}", 0, "policy", [message], "error" if failure else "stop", 1.0, failure,
                turns=[turn], tool_calls=[ToolCall(0, "c", "add", "{}", 1.0)],
            )  # fmt: skip
            key = await store.save_rollout(run_id, rollout, Row(index, rollout.row_id, "s", "u", extra={"level": 1}))
        await store.save_scores({key - 1: [Score("f", value)]}, code={"f": "hash"})
        await store.mark(run_id, "finished", {"functions": {"f": value / 2}, "total_tokens": 6, "cost_usd": None})
        return run_id

    return store.find_run(asyncio.run(write()))


def checked(view: Record) -> JsonObject:
    """A view as JSON, which its schema describes."""
    data: JsonObject = json.loads(encode_view(view))
    schema = schema_of(type(view))
    jsonschema.validate(data, schema)
    assert list(data) == list(view.__struct_fields__)
    return data


def test_a_run_is_shown_with_every_field(store: RunStore) -> None:
    run = new_run(store, 1.0, model="m", n=1, planned=2)
    (shown,) = checked(ListedRuns([run_view(run)]))["runs"]
    times = {"created_at": shown["created_at"], "finished_at": shown["finished_at"]}
    assert shown == {
        "id": run.id,
        "name": None,
        "command": "eval",
        "status": "finished",
        **times,
        "model": "m",
        "base_url": None,
        "stand_in": False,
        "baseline_model": None,
        "dataset": None,
        "shard": None,
        "n": 1,
        "planned": 2,
        "rollouts": 2,
        "failed": 1,
        "intervals": {},
        "functions": {"f": 0.5},
        "total_tokens": 6,
        "cost_usd": None,
        "imported": None,
    }
    assert times["created_at"] <= times["finished_at"]


def test_rollouts_are_shown_without_and_with_their_trajectories(store: RunStore) -> None:
    run = new_run(store, 1.0)
    totals = store.function_totals(run.id)
    rollouts = [rollout_summary(found) for found in store.scored(run.id)]
    lists = ShownRun(run_view(run), totals, verdicts_on(store, run), rollouts, 0)
    first, second = checked(lists)["rollouts"]
    assert (first["turns"], first["tool_calls"], first["usage"]) == (
        1, 1, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    )  # fmt: skip
    assert not {"messages", "samples", "row"} & set(first)
    # Also the fields that hold their default.
    assert second["failure"] == {
        "origin": "model", "message": "dropped", "kind": "", "file": None, "line": None, "detail": None,
    }  # fmt: skip
    details = [rollout_detail(found) for found in store.scored(run.id, RolloutFilter(row=0), with_trajectory=True)]
    (shown,) = checked(ShownRow(run_view(run), totals, details, 0))["rollouts"]
    assert shown["messages"] == [{"role": "assistant", "content": "4"}]
    assert (shown["turns"][0]["usage"]["total_tokens"], shown["turns"][0]["logprobs"]) == (3, None)
    assert shown["row"] == {
        "index": 0, "id": "row0", "system_prompt": "s", "user_prompt": "u", "ground_truth": None, "extra": {"level": 1},
        "solution": None,
    }  # fmt: skip
    assert shown["scores"]["f"]["value"] == 1.0
    checked(RescoredRun(run.id, 1, {"f": 0.5}, {total.function: total for total in totals}, []))


def test_a_comparison_is_shown_by_function(store: RunStore) -> None:
    a, b = new_run(store, 0.0), new_run(store, 1.0)
    shown = checked(compare_runs(store, a, b, 1.0))
    function = shown["functions"]["f"]
    assert (function["difference"], function["wins"], function["now_pass"], function["now_fail"]) == (0.5, 1, 1, 0)
    assert function["flips"] == [{"row_index": 0, "row_id": "row0", "a": 0.0, "b": 1.0}]
    assert (shown["rows"], function["same_code"]) == ({"shared": 2, "only_a": 0, "only_b": 0}, True)
    # One attempt per row has no pass@k.
    assert not any(name.startswith("pass_") for name in function["a"])
