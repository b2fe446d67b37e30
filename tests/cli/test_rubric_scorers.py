"""`--rubric` in test and eval: rubric functions and files score beside reward functions, by the chosen judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from osmosis_ai.testing.endpoint import Reply, Request, ScriptedEndpoint, by_turn, text, tool_call
from repos import write_repo

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


@pytest.mark.litellm
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
    # What an endpoint of one's own charges is not known.
    assert result["summary"]["judges"]["cost_usd"] is None
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


@pytest.mark.parametrize("spec", ["manners", "reward_rubric.manners:polite", "all"])
def test_a_rubric_that_was_asked_for_and_cannot_be_loaded_stops_the_run(repo: Path, osmosis, spec: str) -> None:
    (repo / "reward_rubric").mkdir()
    source = "import no_such_module\n" + RUBRIC.replace("def polite", "def manners")
    if spec != "manners":
        source = RUBRIC + "\nbroken(:\n"
    (repo / "reward_rubric" / "manners.py").write_text(source, encoding="utf-8")
    with ScriptedEndpoint(judge).run_in_thread() as endpoint:
        model = ("--model", "policy", "--base-url", endpoint.url)
        done = osmosis("test", "--rubric", spec, *model, cwd=repo)
        assert endpoint.requests == []
    assert (done.code, done.stdout) == (2, "")
    assert "reward_rubric/manners.py:" in done.stderr
    assert ("no_such_module" if spec == "manners" else "SyntaxError") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_judge_without_its_key_or_a_usable_address_stops_the_run(rubric_repo: Path, osmosis) -> None:
    run = ("test", "--model", "offline/oracle", "--rubric", "short")
    done = osmosis(*run, cwd=rubric_repo)
    assert (done.code, done.stdout) == (2, "")
    assert "rubric rubric_configs.yaml#short: there is no API key" in done.stderr
    assert "export NOBODY_HAS_THIS_KEY=" in done.stderr
    done = osmosis(*run, "--judge-base-url", "localhost:1234", cwd=rubric_repo)
    assert (done.code, done.stdout) == (2, "")
    assert "the judges' base URL is not an address like http://" in done.stderr


def costly(request: Request) -> Reply:
    """A judgement that costs $0.15 with gpt-4o-mini."""
    body = json.loads(text('{"score": 1, "explanation": "fine"}').body)
    body["usage"] = {"prompt_tokens": 1_000_000, "completion_tokens": 0, "total_tokens": 1_000_000}
    return Reply(json.dumps(body).encode())


@pytest.mark.litellm
def test_a_budget_counts_what_judges_cost(tmp_path: Path, osmosis) -> None:
    row = {"system_prompt": "Add.", "ground_truth": "3"}
    repo = write_repo(tmp_path / "repo", rows=[{**row, "user_prompt": f"1 + 2, {number}"} for number in range(6)])
    (repo / "rubric_configs.yaml").write_text(FILE, encoding="utf-8")
    run = ("test", "--json", "--model", "offline/oracle", "--batch-size", "1", "--rubric", "rubric_configs.yaml")
    with ScriptedEndpoint(costly).run_in_thread() as endpoint:
        # The provider's address, so that the provider's price counts.
        (repo / ".env").write_text(f"OPENAI_BASE_URL={endpoint.url}\nOPENAI_API_KEY=a-key-of-mine\n", encoding="utf-8")
        judged = (*run, "--judge-model", "gpt-4o-mini")
        done = osmosis(*judged, "--max-cost", "0.2", cwd=repo)
        # A row runs while the one before it is judged: the third one began when one judgement was paid for.
        assert len(endpoint.requests) == 3
        assert "the budget of $0.2 (--max-cost) is spent" in done.stderr
        assert (done.code, done.json["summary"]["missing"]) == (1, 3)
        assert done.json["summary"]["judges"]["cost_usd"] == pytest.approx(0.45)

        again = osmosis(*judged, "--max-cost", "0.3", "--resume", cwd=repo)
        assert (again.json["summary"]["missing"], len(endpoint.requests)) == (3, 3)
        rest = osmosis(*judged, "--max-cost", "5", "--resume", cwd=repo)
        assert (rest.json["summary"]["missing"], len(endpoint.requests)) == (0, 6)


@pytest.mark.litellm
def test_a_budget_needs_a_known_price_of_every_judge(rubric_repo: Path, osmosis) -> None:
    run = ("test", "--json", "--model", "offline/oracle", "--limit", "1", "--max-cost", "1")
    with ScriptedEndpoint(judge).run_in_thread() as endpoint:
        at_endpoint = ("--judge-base-url", endpoint.url)
        for rubric in ("polite", "short"):
            done = osmosis(*run, "--rubric", rubric, *at_endpoint, "--judge-model", "the-judge", cwd=rubric_repo)
            assert (done.code, done.stdout) == (2, "")
            assert "no price is known for the judge openai/the-judge" in done.stderr
        # Which judge a function asks is known only when it does.
        source = RUBRIC.replace('extra_info["model"]', '"the-judge"')
        (rubric_repo / "reward_rubric" / "manners.py").write_text(source, encoding="utf-8")
        done = osmosis(*run, "--rubric", "polite", *at_endpoint, cwd=rubric_repo)
        error = done.json["results"][0]["scoring_errors"]["reward_rubric.manners:polite"]
        assert "no price is known for it, so --max-cost can't be enforced" in error
        assert endpoint.requests == []
