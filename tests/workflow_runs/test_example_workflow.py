"""The example workspace: what it declares, and its rollouts on the rows' solutions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands import run_osmosis

WORKSPACE = Path(__file__).parents[2] / "examples" / "workflow"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", ".osmosis", "evals")
    return shutil.copytree(WORKSPACE, tmp_path / "workflow", ignore=ignored)


def test_its_configs_are_valid(workspace: Path) -> None:
    found = run_osmosis("validate", "--static", "--json", cwd=workspace).json["findings"]
    assert [one for one in found if (one["file"] or "").startswith(("configs", "rollouts", "data"))] == []


def test_validating_a_rollout_tries_a_row_of_its_config_s_dataset(workspace: Path) -> None:
    assert run_osmosis("rollout", "validate", "products-openai", "--json", cwd=workspace).json["findings"] == []
    rows = workspace / "data" / "products.jsonl"
    rows.write_text(rows.read_text(encoding="utf-8").replace('"ground_truth": "408"', '"ground_truth": "1"'), "utf-8")
    (found,) = run_osmosis("rollout", "validate", "products-openai", "--json", cwd=workspace).json["findings"]
    assert (found["code"], found["message"][:26]) == ("OSM708", "row 0 has the reward 0 wit")


def test_openai_s_client_earns_every_reward(workspace: Path) -> None:
    config = "configs/eval/products-openai.toml"
    finished = run_osmosis("eval", "run", config, "--model", "offline/oracle", "--json", "-o", "evals", cwd=workspace)
    assert [row["runs"][0]["scores"]["products-openai"] for row in finished.json["rows"]] == [1.0] * 6
    (kept,) = (workspace / "evals").glob("*/artifacts/row_3_run_0/calls.txt")
    assert kept.read_text(encoding="utf-8") == "3\n"


@pytest.mark.released
def test_the_agents_sdk_earns_every_reward_in_the_environment_that_it_declares(workspace: Path) -> None:
    config = "configs/eval/products-agents.toml"
    given = ["--model", "offline/oracle", "--json", "--timeout", "300"]
    finished = run_osmosis("eval", "run", config, *given, cwd=workspace, env={"UV_PYTHON_DOWNLOADS": "never"})
    if "can't make the environment" in finished.stderr:
        pytest.skip(finished.stderr)
    assert [row["runs"][0]["scores"]["products-agents"] for row in finished.json["rows"]] == [1.0] * 6
