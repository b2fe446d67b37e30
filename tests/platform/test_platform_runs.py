"""A submitted run, from its acceptance to its results: every stage, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from platforms import Platform, make_workspace, rows, serving, submission


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, workspace: Path) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        assert platform.upload("sums", rows(30)).status == 200
        # The workspace is registered at first sight.
        platform.ask("GET", "/api/cli/eval-runs", headers={"X-Osmosis-Path": str(workspace)})
        yield platform


def submit(platform: Platform, body: dict, **headers: str) -> dict:
    reply = platform.ask("POST", "/api/cli/eval-runs", body, headers=headers)
    assert reply.status in (200, 201), reply
    return reply.body


def test_a_submitted_run_goes_through_all_stages_to_its_results(platform: Platform) -> None:
    run = submit(platform, submission())
    assert run["status"] == "pending"
    shown = platform.wait(run["name"])
    steps = list(dict.fromkeys(line.partition(":")[0] for line in platform.log(run["name"])))
    assert shown["eval_run"]["status"] == "finished", platform.log(run["name"])
    assert steps == ["submit", "clone", "secrets", "select", "environment", "preflight", "rollout", "finish"]
    results = shown["results"]
    assert (results["graded"], results["passed"], results["sampled_rows"], results["total_dataset_rows"]) == (
        2,
        2,
        2,
        30,
    )
    assert results["reward_stats"]["pass_at_k"] == {"1": 1.0}
    assert len(shown["commit_sha"]) == 40
