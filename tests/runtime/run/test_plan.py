"""A plan knows how much there is to run once its dataset is counted."""

from __future__ import annotations

import pytest

from osmosis_ai.config import RunConfig
from osmosis_ai.data.dataset import DatasetSummary
from osmosis_ai.models.choice import choose_model
from osmosis_ai.records import ModelSpec
from osmosis_ai.runtime.run.plan import BASELINE, POLICY, RunPlan


def model(name: str) -> ModelSpec:
    return choose_model(model=name, base_url=None, api_key=None, params={}, request_timeout=1.0, environ={})


def plan(*models: str, n: int = 1) -> RunPlan:
    policies = dict(zip((POLICY, BASELINE), map(model, models), strict=False))
    return RunPlan(RunConfig.of(n=n), "/repo", "/repo", "/repo/rows.jsonl", policies, [])


def test_every_row_is_run_by_each_model_as_often_as_asked() -> None:
    planned = plan("offline/empty", "offline/oracle", n=3)
    assert planned.total_rollouts == 0
    assert planned.with_dataset(DatasetSummary(4, "", ())).total_rollouts == 24


@pytest.mark.parametrize(
    ("summary", "name"),
    [
        (DatasetSummary(4, "", (), with_ground_truth=1), "offline/oracle"),
        (DatasetSummary(4, "", (), with_solution=1), "offline/oracle"),
        (DatasetSummary(4, "", ()), "offline/smoke"),
    ],
)
def test_an_oracle_stays_one_where_any_row_has_something_to_play(summary: DatasetSummary, name: str) -> None:
    assert plan("offline/oracle").with_dataset(summary).policies[POLICY].name == name
