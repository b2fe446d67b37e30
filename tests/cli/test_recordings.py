"""`--record` and `--replay`: a replay calls nothing, gives the same, and fails where the request is another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Finished, Osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, status, text, tool_call
from repos import write_repo

KEY = "sk-a-key-that-nobody-may-see"
RUBRIC = """
version: 1
rubrics:
  - id: short
    rubric: Is it short?
    model_info: {provider: anthropic, model: some-judge, api_key_env: NOBODY_HAS_THIS_KEY}
"""


class Samples:
    """A policy that adds with the tool and tells its samples apart, a second policy that fails, and a judge."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, request: Request) -> Reply:
        self.count += 1
        if request.model == "failing":
            return status(400, body={"error": {"message": f"no, {KEY} may not"}})
        if request.model == "judge":
            return text(f'{{"score": 0.{self.count % 10}, "explanation": "sample {self.count}"}}')
        if request.turn:
            logprobs = {"content": [{"token": "3", "logprob": -0.25, "bytes": [51]}]}
            choice = {"logprobs": logprobs, "token_ids": [3]}
            return text(f"{request.messages[-1]['content']} (sample {self.count})", choice=choice)
        a, b = request.messages[1]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
        return tool_call("add", a=int(a), b=int(b))


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(Samples()).run_in_thread() as endpoint:
        yield endpoint


def record(osmosis: Osmosis, endpoint: ScriptedEndpoint, repo: Path, *more: str, command: str = "eval") -> Finished:
    options = ("--base-url", endpoint.url, "--model", "scripted", "--api-key", KEY, "--json", "--record", "cassettes")
    return osmosis(command, *options, *more, cwd=repo)


def replay(osmosis: Osmosis, repo: Path, *more: str, command: str = "eval") -> Finished:
    return osmosis(command, "--replay", "cassettes", "--json", *more, cwd=repo)


def trajectories(osmosis: Osmosis, repo: Path) -> list[dict[str, Any]]:
    done = osmosis("runs", "export", "latest", "--format", "jsonl", cwd=repo)
    rollouts = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(rollouts, key=lambda rollout: (rollout["row_index"], rollout["run_index"]))


def test_a_replay_gives_every_attempt_its_own_sample_without_a_model(
    osmosis: Osmosis, repo: Path, endpoint: ScriptedEndpoint
) -> None:
    first = record(osmosis, endpoint, repo, "--n", "3", "--workers", "2")
    assert first.code == 0, first.stderr
    recorded = trajectories(osmosis, repo)
    asked = len(endpoint.requests)

    # No address, no key, no name: the recordings have one model.
    second = replay(osmosis, repo, "--n", "3", "--workers", "2")
    assert second.code == 0, second.stderr
    assert "replies are replayed from cassettes; no model is called" in second.stderr
    assert "not used" not in second.stderr
    replayed = trajectories(osmosis, repo)
    assert [one["messages"] for one in replayed] == [one["messages"] for one in recorded]
    assert len({one["messages"][-1]["content"] for one in replayed}) == 9
    kept = [[(turn.get("logprobs"), turn.get("token_ids")) for turn in one["turns"]] for one in replayed]
    assert kept == [[(turn.get("logprobs"), turn.get("token_ids")) for turn in one["turns"]] for one in recorded]
    assert kept[0][1][0]["content"][0]["logprob"] == -0.25
    assert len(endpoint.requests) == asked

    # Recording again asks for nothing that is recorded, and changes nothing in the file.
    before = (repo / "cassettes" / "policy.jsonl").read_bytes()
    third = record(osmosis, endpoint, repo, "--n", "3")
    assert third.code == 0, third.stderr
    assert len(endpoint.chats) == 18
    assert (repo / "cassettes" / "policy.jsonl").read_bytes() == before
    assert KEY.encode() not in before
    lines = [json.loads(line) for line in before.splitlines()]
    assert [line["record"] for line in lines] == ["tools"] + ["reply"] * 18
    # A continuing request holds only what is new in it.
    assert [len(line["messages"]) for line in lines[1:5]] == [2, 1, 2, 1]

    fewer = replay(osmosis, repo, "--n", "1", "--limit", "1")
    assert "16 recordings in policy.jsonl were not used" in fewer.stderr


def changed(repo: Path, file: str, old: str, new: str) -> None:
    content = (repo / file).read_text(encoding="utf-8")
    assert old in content
    (repo / file).write_text(content.replace(old, new), encoding="utf-8")


def test_a_miss_names_what_is_different_and_calls_nothing(
    osmosis: Osmosis, repo: Path, endpoint: ScriptedEndpoint
) -> None:
    assert record(osmosis, endpoint, repo, "--limit", "1").code == 0
    asked = len(endpoint.requests)

    def miss(*options: str) -> str:
        done = replay(osmosis, repo, "--limit", "1", *options)
        assert done.code == 1, done.stderr
        error: str = done.json["rows"][0]["runs"][0]["error"]
        assert error.endswith("; record it with the same command and --record cassettes")
        return error

    changed(repo, "mcp/main.py", "return a + b", "return a + b + 40")
    assert 'messages[3] differs: recorded "3", now "43"' in miss()
    changed(repo, "mcp/main.py", "Add two numbers.", "Add them.")
    assert 'tools differ: description of "add"' in miss()
    changed(repo, "test_data.jsonl", "Use the tools.", "Use no tools.")
    assert 'messages[0] differs: recorded "Use the tools.", now "Use no tools."' in miss()
    changed(repo, "test_data.jsonl", "Use no tools.", "Use the tools.")
    changed(repo, "mcp/main.py", "Add them.", "Add two numbers.")
    assert "parameter temperature differs: recorded null, now 0.5" in miss("--temperature", "0.5")
    changed(repo, "mcp/main.py", "return a + b + 40", "return a + b")
    more = replay(osmosis, repo, "--limit", "1", "--n", "2")
    assert "attempt 1 of this request isn't recorded, only 0" in more.json["rows"][0]["runs"][1]["error"]
    assert len(endpoint.requests) == asked

    assert record(osmosis, endpoint, repo, "--limit", "1", "--n", "2").code == 0
    assert len(endpoint.requests) == asked + 3  # the probe, and the two turns of the new attempt
    assert replay(osmosis, repo, "--limit", "1", "--n", "2").code == 0


def test_errors_and_several_models_are_replayed(osmosis: Osmosis, repo: Path, endpoint: ScriptedEndpoint) -> None:
    assert record(osmosis, endpoint, repo, "--limit", "1").code == 0
    first = record(osmosis, endpoint, repo, "--limit", "1", "--model", "failing")
    assert first.code == 1, first.stderr
    errors = [one["error"] for one in trajectories(osmosis, repo)]
    assert "may not" in errors[0]
    assert replay(osmosis, repo, "--limit", "1", "--model", "failing").code == 1
    assert [one["error"] for one in trajectories(osmosis, repo)] == errors
    assert replay(osmosis, repo, "--limit", "1", "--model", "scripted", "--baseline-model", "failing").code == 1
    file = (repo / "cassettes" / "policy.jsonl").read_text(encoding="utf-8")
    assert KEY not in file
    assert "may not" in file
    several = replay(osmosis, repo)
    assert several.code == 2
    assert "has recordings of several models; name one with --model: failing, scripted" in several.stderr
    unknown = replay(osmosis, repo, "--model", "another")
    assert unknown.code == 2
    assert "has no recordings of openai/another: it has failing, scripted" in unknown.stderr


@pytest.mark.litellm
def test_judges_are_replayed_attempt_by_attempt(osmosis: Osmosis, repo: Path, endpoint: ScriptedEndpoint) -> None:
    (repo / "rubric_configs.yaml").write_text(RUBRIC, encoding="utf-8")
    rubric = ("--rubric", "short", "--n", "2", "--limit", "1")
    judge = ("--judge-model", "judge")
    first = record(osmosis, endpoint, repo, *rubric, *judge, "--judge-base-url", endpoint.url)
    assert first.code == 0, first.stderr
    asked = len(endpoint.requests)
    second = replay(osmosis, repo, *rubric, *judge)
    assert second.code == 0, second.stderr
    scores = [[[run["scores"] for run in row["runs"]] for row in done.json["rows"]] for done in (first, second)]
    assert scores[0] == scores[1]
    assert len(endpoint.requests) == asked

    # Equal records have equal requests; each of their runs has a recording of its own.
    (repo / "records.jsonl").write_text(json.dumps({"solution_str": "Yes."}) + "\n", encoding="utf-8")
    same = ("--rubric", "short", "--data", "records.jsonl", "--n", "4", "--json", *judge)
    spoken = osmosis(
        "eval-rubric", *same, "--record", "judged", "--judge-base-url", endpoint.url, cwd=repo,
        env={"OSMOSIS_JUDGE_API_KEY": KEY},
    )  # fmt: skip
    assert spoken.code == 0, spoken.stderr
    silent = osmosis("eval-rubric", *same, "--replay", "judged", cwd=repo)
    assert silent.code == 0, silent.stderr
    runs = [[run["score"] for run in done.json["records"][0]["runs"]] for done in (spoken, silent)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4
    changed(repo, "rubric_configs.yaml", "Is it short?", "Is it long?")
    missed = osmosis("eval-rubric", *same, "--replay", "judged", cwd=repo)
    assert missed.code == 1
    assert "messages[1] differs" in missed.json["records"][0]["runs"][0]["error"]


def test_what_cannot_be_replayed_is_said_before_the_run(
    osmosis: Osmosis, repo: Path, endpoint: ScriptedEndpoint
) -> None:
    nothing = replay(osmosis, repo)
    assert nothing.code == 2
    assert "there are no recordings in cassettes; record it with the same command and --record" in nothing.stderr
    both = osmosis("eval", "--record", "a", "--replay", "b", cwd=repo)
    assert both.code == 2
    assert "--record and --replay exclude each other" in both.stderr
    (repo / "cassettes").mkdir()
    (repo / "cassettes" / "policy.jsonl").write_text("<<<<<<< HEAD\n", encoding="utf-8")
    broken = replay(osmosis, repo)
    assert broken.code == 2
    assert "policy.jsonl:1 is not a recorded reply" in broken.stderr


def test_rows_with_the_same_prompts_share_their_recordings(
    osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint
) -> None:
    row = {"system_prompt": "Use the tools.", "user_prompt": "What is 1 + 2?", "ground_truth": "3"}
    repo = write_repo(tmp_path / "repo", rows=[row] * 4)
    first = record(osmosis, endpoint, repo, "--workers", "2")
    assert first.code == 0, first.stderr
    recorded = [one["messages"] for one in trajectories(osmosis, repo)]
    assert all(messages == recorded[0] for messages in recorded)
    assert replay(osmosis, repo, "--workers", "2").code == 0
    assert [one["messages"] for one in trajectories(osmosis, repo)] == recorded
