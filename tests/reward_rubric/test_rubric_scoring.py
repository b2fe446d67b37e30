"""Rubrics as scorers of rollouts: a function's arguments, the record of its score, and the resolution of names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from osmosis_ai.discovery.repository import find_repository
from osmosis_ai.errors import FunctionError
from osmosis_ai.records import FunctionRef, Score, ScoringInput
from osmosis_ai.reward_rubric.resolve import discovered_rubrics, resolve_rubrics
from osmosis_ai.reward_rubric.target import judge_variables
from osmosis_ai.runtime.worker.scorer import Scorer, load_scorer
from osmosis_ai.testing import ScriptedEndpoint, status, text

FUNCTIONS = """
from osmosis_ai import aevaluate_rubric, evaluate_rubric, osmosis_rubric


def judge(extra_info):
    return {name: extra_info[name] for name in ("provider", "model", "api_key_env")}


@osmosis_rubric
def clear(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
    return evaluate_rubric(
        extra_info["rubric"], solution_str, judge(extra_info), ground_truth=ground_truth,
        original_input=extra_info["original_input"], metadata=extra_info["metadata"],
        score_min=extra_info["score_min"], score_max=extra_info["score_max"],
    )


@osmosis_rubric
async def twice(solution_str: str, ground_truth: str | None, extra_info: dict) -> float:
    one = await aevaluate_rubric("one", solution_str, judge(extra_info))
    two = await aevaluate_rubric("two", solution_str, judge(extra_info))
    return (one + two) / 2
"""
FILE = """\
version: 1
rubrics:
  - id: polite
    rubric: Is it polite?
    model_info: {provider: gemini, model: g, api_key_env: NOT_SET}
    score_max: 5
    system_prompt: Be strict.
  - id: short
    rubric: Is it short?
    model_info: {provider: openai, model: m}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "mcp").mkdir()
    (tmp_path / "reward_rubric").mkdir()
    (tmp_path / "reward_rubric" / "clarity.py").write_text(FUNCTIONS, encoding="utf-8")
    (tmp_path / "rubric_configs.yaml").write_text(FILE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEndpoint]:
    for name in ("OSMOSIS_JUDGE_MODEL", "OSMOSIS_JUDGE_BASE_URL", "OSMOSIS_JUDGE_API_KEY"):
        # Set first, so that what a redirect leaves is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    replies = [text(json.dumps({"score": score, "explanation": f"{score}!"})) for score in (1, 0.5, 0.25)]
    with ScriptedEndpoint([*replies, status(400)]).run_in_thread() as endpoint:
        os.environ.update(judge_variables("judge-x", endpoint.url))
        yield endpoint


def input_of(**extra: Any) -> ScoringInput:
    messages = [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "Here."},
    ]
    return ScoringInput(messages, "there", 3, extra)


def score(scorer: Scorer, trajectory: ScoringInput) -> Score:
    return anyio.run(scorer.score, trajectory, 30.0)


def load(root: Path, name: str) -> Scorer:
    (ref,), _ = resolve_rubrics([name], find_repository(str(root / "mcp" / "main.py"), root), root)
    sys.path.insert(0, str(root))
    try:
        return load_scorer(ref)
    finally:
        sys.path.remove(str(root))
        for module in [name for name in sys.modules if name.partition(".")[0] == "reward_rubric"]:
            del sys.modules[module]


@pytest.fixture(autouse=True)
def entry_point(root: Path) -> None:
    (root / "mcp" / "main.py").write_text("", encoding="utf-8")


def extra_info_of(trajectory: ScoringInput) -> dict[str, Any]:
    """The arguments of a rubric function."""
    seen: list[dict[str, Any]] = []

    def rubric(solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]) -> float:
        seen.append(extra_info)
        return 1.0

    assert score(Scorer(FunctionRef("m:f", "m", "f", "/", kind="rubric"), rubric), trajectory).value == 1.0
    return seen[0]


def test_a_rubric_finds_everything_in_extra_info(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OSMOSIS_JUDGE_MODEL", "OSMOSIS_JUDGE_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    info = extra_info_of(input_of(level="hard"))
    assert info.pop("rubric").startswith("Judge how well")
    columns = {"level": "hard", "row_index": 3, "ground_truth": "there"}
    assert info == {
        **columns,
        "provider": "openai",
        "model": "gpt-5-mini",
        "api_key_env": "OPENAI_API_KEY",
        "score_min": 0.0,
        "score_max": 1.0,
        "system_prompt": None,
        "original_input": "Where is it?",
        "metadata": columns,
    }


def test_a_rows_own_columns_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OSMOSIS_JUDGE_MODEL", "OSMOSIS_JUDGE_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    own = {
        "provider": "anthropic",
        "model": "claude",
        "rubric": "mine",
        "score_max": 5,
        "metadata": {"a": 1},
        "original_input": "asked",
    }
    info = extra_info_of(input_of(**own))
    assert {name: info[name] for name in own} == own
    assert info["api_key_env"] == "ANTHROPIC_API_KEY"
    assert extra_info_of(input_of(model="Golf GTI", score_min="low"))["model"] == "gpt-5-mini"
    assert extra_info_of(ScoringInput([{"role": "assistant", "content": "x"}], None, 0, {}))["original_input"] is None


def test_judge_calls_and_their_explanations_stay_on_the_score(root: Path, endpoint: ScriptedEndpoint) -> None:
    result = score(load(root, "clear"), input_of())
    assert (result.value, result.explanation) == (1.0, "1!")
    (call,) = result.judge_calls
    assert (call.model, call.score, call.usage.total_tokens) == ("openai/judge-x", 1.0, 15)
    user = endpoint.requests[0].messages[1]["content"]
    assert "Where is it?" in user
    assert "\nHere.\n" in user
    assert endpoint.requests[0].model == "judge-x"
    result = score(load(root, "twice"), input_of())
    assert (result.value, result.explanation) == (0.375, "0.5!\n0.25!")
    assert [call.score for call in result.judge_calls] == [0.5, 0.25]


def test_a_judge_that_fails_is_the_rubrics_failure(root: Path, endpoint: ScriptedEndpoint) -> None:
    for _ in range(3):
        score(load(root, "clear"), input_of())
    result = score(load(root, "clear"), input_of())
    assert result.value is None
    assert result.failure is not None
    assert (result.failure.origin, result.failure.file) == ("rubric", "reward_rubric/clarity.py")
    assert result.failure.message.startswith("ProviderRequestError: openai/judge-x: the judge failed: scripted 400")
    assert "scripted 400" in (result.judge_calls[0].error or "")


def test_a_missing_key_is_the_rubrics_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSMOSIS_JUDGE_BASE_URL", raising=False)
    monkeypatch.delenv("OSMOSIS_JUDGE_MODEL", raising=False)
    result = score(load(root, "polite"), input_of())
    assert result.failure is not None
    assert (result.failure.origin, result.failure.file) == ("rubric", "rubric_configs.yaml")
    assert "the environment variable NOT_SET is not set" in result.failure.message


def test_an_entry_of_a_file_scores(root: Path, endpoint: ScriptedEndpoint) -> None:
    result = score(load(root, "polite"), input_of())
    assert (result.function, result.value, result.explanation) == ("rubric_configs.yaml#polite", 1.0, "1!")
    system, user = (message["content"] for message in endpoint.requests[0].messages)
    assert system.startswith("Be strict.")
    assert "from 0 to 5" in system
    for part in ("Is it polite?", "Where is it?", "\nthere\n", "\nHere.\n"):
        assert part in user


def test_the_names_of_rubrics(root: Path) -> None:
    repository = find_repository(str(root / "mcp" / "main.py"), root)

    def names(*specs: str, cwd: Path = root) -> list[str]:
        refs, _ = resolve_rubrics(list(specs), repository, cwd)
        assert all(ref.kind == "rubric" for ref in refs)
        return [ref.name for ref in refs]

    functions = ["reward_rubric.clarity:clear", "reward_rubric.clarity:twice"]
    entries = ["rubric_configs.yaml#polite", "rubric_configs.yaml#short"]
    assert names("all") == functions + entries
    assert names("clear", "reward_rubric.clarity:clear") == functions[:1]
    assert names("short") == names("rubric_configs.yaml#short") == entries[1:]
    assert names("rubric_configs.yaml", cwd=root / "mcp") == entries
    elsewhere = root.parent / "elsewhere.yml"
    elsewhere.write_text(FILE, encoding="utf-8")
    assert names(f"{elsewhere}#short") == [f"{elsewhere.as_posix()}#short"]
    (ref,), _ = resolve_rubrics(["short"], repository, root)
    assert (ref.module, ref.attribute, ref.file, ref.line) == ("", "short", "rubric_configs.yaml", 8)
    assert [ref.name for ref in discovered_rubrics(repository)[0]] == functions


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cleer", "there is no such rubric; did you mean clear. There are: reward_rubric.clarity:clear, .*#short"),
        ("", "--rubric '': there is no such rubric"),
        ("reward_rubric.clarity:cler", "did you mean clear"),
        ("rubric_configs.yaml#shrt", "has no rubric 'shrt'; did you mean short. It has: polite, short"),
        ("missing.yaml#a", "there is no file missing.yaml; write FILE#ID"),
        ("broken.yaml#a", "broken.yaml: `version` is missing"),
    ],
)
def test_a_rubric_that_is_not_there_is_an_error_that_lists_what_is(root: Path, spec: str, message: str) -> None:
    (root / "broken.yaml").write_text("rubrics: []", encoding="utf-8")
    with pytest.raises(FunctionError, match=message):
        resolve_rubrics([spec], find_repository(str(root / "mcp" / "main.py"), root), root)


def test_a_repository_without_rubrics_says_so(tmp_path: Path) -> None:
    # Git's folder ends the search for a repository above.
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    with pytest.raises(FunctionError, match=r"there are no rubrics\. Write an @osmosis_rubric function"):
        resolve_rubrics(["all"], find_repository(None, tmp_path / "empty"), tmp_path / "empty")


def test_an_entry_that_is_gone_is_a_function_error(root: Path) -> None:
    with pytest.raises(FunctionError, match="has no rubric 'politely'; did you mean polite"):
        load_scorer(FunctionRef("f", "", "politely", str(root), kind="rubric", file="rubric_configs.yaml"))
