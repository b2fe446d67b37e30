"""`--rubric` in test and eval: rubric functions and files score beside reward functions, by the judge asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from osmosis_ai.testing.endpoint import Reply, Request, ScriptedEndpoint, by_turn, text, tool_call

RUBRIC = """
from osmosis_ai import evaluate_rubric, osmosis_rubric


@osmosis_rubric
def polite(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
    model_info = {"provider": extra_info["provider"], "model": extra_info["model"]}
    return evaluate_rubric(rubric="Is it polite?", solution_str=solution_str, model_info=model_info)


@osmosis_rubric
def misbehaves(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
    raise RuntimeError("no opinion")
"""

FILE = """
version: 1
rubrics:
  - id: short
    rubric: Is it short?
    model_info: {provider: anthropic, model: some-judge, api_key_env: NOBODY_HAS_THIS_KEY}
    score_max: 10.0
"""


def judge(request: Request) -> Reply:
    """A policy that calls the tool and answers, and a judge, on one endpoint."""
    if request.model == "the-judge":
        return text('{"score": 0.75, "explanation": "fine by me"}')
    return by_turn(tool_call("add", a=1, b=2), text("3"))(request)  # type: ignore[operator]


@pytest.fixture
def rubric_repo(repo: Path) -> Path:
    (repo / "reward_rubric").mkdir()
    (repo / "reward_rubric" / "manners.py").write_text(RUBRIC, encoding="utf-8")
    (repo / "rubric_configs.yaml").write_text(FILE, encoding="utf-8")
    return repo


def test_rubrics_score_beside_rewards_through_one_judge(rubric_repo: Path, osmosis) -> None:
    with ScriptedEndpoint(judge).run_in_thread() as endpoint:
        done = osmosis(
            "eval", "--json", "--limit", "1", "--model", "policy", "--base-url", endpoint.url,
            "--rubric", "all", "--judge-model", "the-judge", "--judge-base-url", endpoint.url,
            cwd=rubric_repo,
        )  # fmt: skip
        asked = [request for request in endpoint.requests if request.model == "the-judge"]
    result = done.json
    run = result["rows"][0]["runs"][0]
    assert run["scores"] == {
        "reward_fn.rewards:exact": 1.0,
        "reward_rubric.manners:polite": 0.75,
        "reward_rubric.manners:misbehaves": None,
        "rubric_configs.yaml#short": 0.75,
    }
    assert run["explanations"]["rubric_configs.yaml#short"] == "fine by me"
    assert "RuntimeError: no opinion" in run["scoring_errors"]["reward_rubric.manners:misbehaves"]
    assert run["scoring_errors"]["reward_rubric.manners:misbehaves"].startswith("rubric: ")
    assert len(asked) == 2
    assert result["summary"]["judges"]["calls"] == 2
    assert result["summary"]["scoring_errors"] == 1
    assert done.code == 1
    shown = osmosis("runs", "show", "latest", "--row", "0", cwd=rubric_repo)
    assert "fine by me" in shown.stdout


def test_rubrics_run_only_when_asked_for(rubric_repo: Path, osmosis) -> None:
    done = osmosis("test", "--json", "--limit", "1", "--model", "offline/oracle", cwd=rubric_repo)
    assert list(done.json["results"][0]["scores"]) == ["reward_fn.rewards:exact"]


def test_an_unknown_rubric_is_refused_with_those_there_are(rubric_repo: Path, osmosis) -> None:
    done = osmosis("eval", "--rubric", "kind", "--model", "offline/oracle", cwd=rubric_repo)
    assert done.code == 2
    assert "kind" in done.stderr
    assert "reward_rubric.manners:polite" in done.stderr
    assert "rubric_configs.yaml#short" in done.stderr
    assert "Traceback" not in done.stderr
