"""`--tokenizer`: the built-in loop, agent loops and workflows call a policy with tokens, without a change to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import run_osmosis
from repos import copy_repo
from token_models import END, TokenEndpoint, write_model

SERVERS = Path(__file__).parents[1] / "runtime" / "worker" / "workflows"
SUMS = [{"user_prompt": f"What is {number} + 2?", "ground_truth": "3"} for number in (1, 2)]
LOCAL = ["--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
CALL = f'<tool_call>{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}</tool_call>{END}'


@pytest.fixture
def endpoint() -> TokenEndpoint:
    """Calls `add` once, then answers."""
    return TokenEndpoint(lambda prompt: f"3{END}" if "<tool_response>" in prompt else CALL)


@pytest.fixture
def url(endpoint: TokenEndpoint) -> Iterator[str]:
    with endpoint.run() as url:
        yield url


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def sequences(root: Path) -> list[dict[str, Any]]:
    """Return the token sequences of the latest run, by the tokens export."""
    exported = run_osmosis("runs", "export", "--format", "tokens", cwd=root)
    assert exported.code == 0, exported.stderr
    return [json.loads(line) for line in exported.stdout.splitlines()]


def check(root: Path, endpoint: TokenEndpoint, rollouts: int) -> None:
    """Compare the sequences with what the endpoint has seen."""
    found = sequences(root)
    assert len(found) == rollouts
    assert {sum(one["transitions"].values()) for one in found} == {found[0]["transitions"]["clean"]}
    assert sum(sum(one["mask"]) for one in found) == sum(len(one.reply) for one in endpoint.requests)
    last = sorted([*one.prompt, *one.reply] for one in endpoint.requests)
    assert all(one["input_ids"] in last for one in found)


def test_the_built_in_loop(repo: Path, model: Path, endpoint: TokenEndpoint, url: str) -> None:
    done = run_osmosis("eval", "--base-url", url, "--model", "m", "--tokenizer", model, cwd=repo)
    assert done.code == 0, done.stderr
    check(repo, endpoint, 3)
    assert [request.body["model"] for request in endpoint.requests] == ["m"] * 6


def test_an_agent_loop_of_the_repository_s_own(tmp_path: Path, model: Path, endpoint: TokenEndpoint, url: str) -> None:
    root = copy_repo("agent_class", tmp_path, SUMS)
    done = run_osmosis(
        *("test", "-m", "calculator.agents:CalculatorAgent", "--limit", "2"),
        *("--base-url", url, "--model", "m", "--tokenizer", model),
        cwd=root,
    )
    assert "2 of 2 rollouts completed" in done.stdout, done.stdout + done.stderr
    check(root, endpoint, 2)


def test_a_workflow(tmp_path: Path, model: Path, url: str) -> None:
    folder = tmp_path / "rollouts" / "plain"
    folder.mkdir(parents=True)
    shutil.copy(SERVERS / "plain_rollout.py", folder / "main.py")
    row = {"system_prompt": "Compute.", "user_prompt": "greet", "ground_truth": "42"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    answering = TokenEndpoint(lambda _: f"42{END}")
    with answering.run() as served:
        done = run_osmosis(
            *("eval", "--rollout", "rollouts/plain", "-d", "rows.jsonl"),
            *("--base-url", served, "--model", "m", "--tokenizer", model),
            cwd=tmp_path,
        )
    assert done.code == 0, done.stderr
    check(tmp_path, answering, 1)


def test_a_run_that_is_continued_with_another_tokenizer_is_another_run(
    repo: Path, model: Path, tmp_path: Path, url: str
) -> None:
    given = ("eval", "--base-url", url, "--model", "m", "--name", "x")
    assert run_osmosis(*given, "--tokenizer", model, "--limit", "1", cwd=repo).code == 0
    other = write_model(tmp_path / "other", "tags")
    done = run_osmosis(*given, "--tokenizer", other, "--limit", "1", cwd=repo)
    assert (done.code, "tokenizer" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "offline/oracle"], "--tokenizer needs --base-url"),
        (
            [*LOCAL, "--cache"],
            "--tokenizer and --cache don't go together",
        ),
        ([*LOCAL, "--record", "r"], "--tokenizer and --record"),
        (LOCAL, "127.0.0.1:9"),
    ],
)
def test_options_that_do_not_go_together(repo: Path, model: Path, arguments: list[str], message: str) -> None:
    done = run_osmosis("eval", *arguments, "--tokenizer", model, cwd=repo)
    assert (done.code, message in done.stderr) == (2, True), done.stderr


def test_a_folder_without_a_model(repo: Path, url: str) -> None:
    done = run_osmosis("eval", "--base-url", url, "--model", "m", "--tokenizer", "reward_fn", cwd=repo)
    assert (done.code, "has no tokenizer.json. Name a model folder" in done.stderr) == (2, True), done.stderr
