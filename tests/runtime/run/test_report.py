"""The report of a run, and the documented results made from it."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from osmosis_ai.config import Command, RunConfig
from osmosis_ai.records import Failure, FunctionRef, JudgeCall, ModelSpec, Outcome, Rollout, Row, Score, ToolCall, Usage
from osmosis_ai.runtime.run import results
from osmosis_ai.runtime.run.plan import BASELINE, POLICY, RunPlan
from osmosis_ai.runtime.run.report import Report, build_report
from osmosis_ai.store.run_store import RunStore

REFUSED = Failure("model", "no such model", "refused")
BROKEN = Failure("reward", "KeyError: 'x'", "exception", "reward_fn/f.py", 3)


def plan(command: Command, rows: int, n: int, *policies: str) -> RunPlan:
    specs = {policy: ModelSpec(policy, "offline", policy, params={"top_p": 0.5}) for policy in policies}
    functions = [FunctionRef("f", "f", "f", "/repo"), FunctionRef("g", "g", "g", "/repo")]
    return RunPlan(RunConfig.of(command, n=n), "/repo", "/repo", "/repo/rows.jsonl", specs, functions, rows)


def rollout(row: int, run_index: int, policy: str = POLICY, failure: Failure | None = None) -> Rollout:
    return Rollout(
        id=f"{policy}-{row}-{run_index}",
        row_index=row,
        row_id=f"row{row}",
        run_index=run_index,
        policy=policy,
        messages=[],
        finish_reason="stop" if failure is None else "error",
        duration_ms=10.0,
        failure=failure,
        usage=Usage(3, 4, 7),
        tool_calls=[ToolCall(0, "1", "add", "{}", 2.0), ToolCall(0, "2", "add", "{", 4.0, error="bad_json")],
        cost_usd=0.5,
    )


def stored(folder: Path, run: RunPlan, saved: list[tuple[Rollout, list[Score]]]) -> Report:
    """Return the report of a run with these records."""

    async def save(store: RunStore) -> str:
        run_id = await store.create_run(run.config.command, identity={}, config={})
        for record, scores in saved:
            key = await store.save_rollout(run_id, record, Row(record.row_index, record.row_id, "s", "u"))
            await store.save_scores({key: scores})
        return run_id

    with RunStore.open(folder) as store:
        run_id = asyncio.run(save(store))
        return build_report(run, ["f", "g"], store.outcomes(run_id), run_id=run_id, store=store.path, wall_ms=12.34)


def test_a_report_of_test_and_its_results(tmp_path: Path) -> None:
    judged = Score("g", 0.5, explanation="fine", judge_calls=[JudgeCall("a/b", 1.0, Usage(1, 1, 2), 0.25)] * 2)
    report = stored(
        tmp_path,
        plan("test", 4, 1, POLICY),
        [
            (rollout(0, 0), [Score("f", 1.0), judged]),
            (rollout(1, 0), [Score("f", failure=BROKEN), Score("g", 1.0)]),
            (rollout(2, 0, failure=REFUSED), []),
        ],
    )
    assert not report.whole
    assert (report.policy.passed, report.policy.failed, report.policy.missing) == (2, 1, 1)
    assert (report.usage, report.cost_usd, report.wall_ms) == (Usage(9, 12, 21), 1.5, 12.3)
    assert report.functions["f"].mean == pytest.approx(1 / 3)
    assert report.judges == results.JudgeTotals(2, 4, 0.5)
    assert report.tools == {"add": results.ToolStatistics(6, {"bad_json": 3}, 4.0, 4.0)}
    assert [(cause.origin, cause.function, cause.row_index) for cause in report.failures] == [
        ("reward", "f", 1),
        ("model", None, 2),
    ]
    assert [outcome.row_index for outcome in report.outcomes()] == [0, 1, 2]

    found = report.results()
    assert isinstance(found, results.TestResults)
    assert (found.summary.failed, found.summary.functions) == (2, report.functions)
    assert [row.reward for row in found.results] == [0.75, None, None]
    assert found.results[1].scoring_errors == {"f": "reward: KeyError: 'x'"}
    assert found.results[2].error == "model: no such model"
    assert msgspec.json.encode(found) == report.to_json()
    config = msgspec.json.decode(report.to_json())["config"]
    assert list(config) == ["model", "base_url", "stand_in", "params", "dataset", "run_id"]


def test_a_report_of_eval_and_its_results(tmp_path: Path) -> None:
    saved = [
        (rollout(row, run_index, policy), [Score("f", float(policy == POLICY)), Score("g", float(run_index))])
        for row in range(2)
        for policy in (POLICY, BASELINE)
        for run_index in range(3)
    ]
    report = stored(tmp_path, plan("eval", 2, 3, POLICY, BASELINE), saved)
    assert report.whole
    assert report.baseline is not None
    assert report.baseline.functions["f"].mean == 0.0
    assert report.baseline.comparison["f"].wins == 2
    found = report.results()
    assert isinstance(found, results.EvalResults)
    assert (found.config.n_runs, found.config.eval_fns, found.config.baseline_model) == (3, ["f", "g"], BASELINE)
    assert found.summary.eval_fns["f"].pass_at_3 == 1.0
    assert found.baseline is not None
    assert [run.scores["f"] for row in found.baseline.rows for run in row.runs] == [0.0] * 6
    assert [[run.run_index for run in row.runs] for row in found.rows] == [[0, 1, 2]] * 2
    encoded = report.to_json()
    assert msgspec.json.encode(found) == encoded
    assert list(msgspec.json.decode(encoded)) == ["config", "summary", "rows", "baseline"]


def test_the_rows_of_a_large_run_take_the_memory_of_their_text() -> None:
    rows = 20_000
    scores = {"f": Score("f", 1.0), "g": Score("g", 0.5)}

    def outcomes() -> Any:
        for row in range(rows):
            yield Outcome(f"{row}", row, f"row{row}", 0, POLICY, "stop", 1.5, None, Usage(), None, [], scores)

    run = plan("test", rows, 1, POLICY)
    report = build_report(run, ["f", "g"], outcomes(), run_id="r", store=Path("unused"), wall_ms=1.0)
    tracemalloc.start()
    size = len(report.to_json(outcomes))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The rows, the whole with the rows in it, and room for both to grow.
    assert peak < 3 * size
