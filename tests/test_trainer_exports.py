"""Exports for trainers: what each format keeps, pairs, leaves out and counts.

`make test-train` has the libraries that read them do so.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osmosis_ai.errors import RepositoryError
from osmosis_ai.exports import EXPORT_FORMATS
from osmosis_ai.exports.base import Arguments, ExportOptions, Written
from osmosis_ai.exports.rollouts import ExportedRollout, ExportedTurn
from osmosis_ai.exports.tokens import FORK_TOKENS, NO_TOKENS, Sequences
from osmosis_ai.exports.trl import FAILED, NO_OBJECT, NO_PAIR, NO_REPLY
from osmosis_ai.records import JsonObject, Logprobs, Message, TokenLogprob, TokenUsage
from osmosis_ai.runtime.worker.workflows.environments import prepare_environment

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
PROMPT: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def called(arguments: str = '{"a": 1}', answer: str = "2") -> list[Message]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}, "index": 0}
    return [
        *PROMPT,
        {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "assistant", "content": answer},
    ]


def turn(prompt: list[int] | None = None, reply: list[int] | None = None) -> ExportedTurn:
    logprobs = None if reply is None else Logprobs([TokenLogprob("t", -0.5) for _ in reply])
    return ExportedTurn("stop", "m", {}, 3, 2, 1.0, 1, logprobs, prompt, reply)


def rollout(row: int = 0, run: int = 0, score: float | None = 1.0, **fields: Any) -> ExportedRollout:
    values: dict[str, Any] = {
        "id": f"{row}-{run}",
        "run_id": "r",
        "row_id": f"row{row}",
        "row_index": row,
        "run_index": run,
        "policy": "policy",
        "model": "m",
        "messages": called(),
        "tools": TOOLS,
        "reward": score,
        "rewards": {"f": score},
        "scoring_errors": {},
        "finish_reason": "stop",
        "error": None,
        "human": None,
        "human_note": None,
        "ground_truth": "2",
        "metadata": {"level": [1, "x"]},
        "token_usage": TokenUsage(6, 4, 10),
        "cost_usd": None,
        "duration_ms": 1.0,
        "turns": [turn([1, 2], [3]), turn([1, 2, 3, 4], [5, 6])],
    }
    return ExportedRollout(**{**values, **fields})


def export(
    name: str, rollouts: Iterable[ExportedRollout], arguments: Arguments = "text"
) -> tuple[list[JsonObject], Written]:
    sink = io.BytesIO()
    options = ExportOptions(["f"], lambda data: data.replace(b"secret", b"[masked]"), 1.0, arguments)
    written = EXPORT_FORMATS[name].write(iter(rollouts), sink, options)
    lines = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert len(lines) == written.records
    return lines, written


def test_conversations_for_sft() -> None:
    items = [
        rollout(),
        rollout(1, error="model: gone"),
        rollout(2, messages=PROMPT),
        rollout(3, messages=called(answer="secret")),
    ]
    (first, last), written = export("trl-sft", items)
    assert first["tools"] == TOOLS
    assert first["messages"][2:4] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c", "name": "add"},
    ]
    assert last["messages"][-1]["content"] == "[masked]"
    assert written.left_out == {FAILED: 1, NO_REPLY: 1}


def test_arguments_as_objects() -> None:
    items = [
        rollout(),
        rollout(1, messages=called("[1]")),
        rollout(2, messages=called("{")),
        rollout(3, messages=called("")),
        rollout(4, messages=called("[" * 100_000)),
    ]
    lines, written = export("trl-sft", items, "object")
    found = [line["messages"][2]["tool_calls"][0]["function"]["arguments"] for line in lines]
    assert found == [{"a": 1}, {}]
    assert written.left_out == {NO_OBJECT: 3}


def test_pairs_of_a_pass_and_a_fail_of_the_same_row() -> None:
    items = [
        rollout(0, 0, 1.0),
        rollout(0, 1, 0.5, messages=called(answer="3")),
        rollout(0, 2, 1.0),
        rollout(0, 3, None),
        rollout(0, 4, 0.0, error="timeout: late"),
        rollout(1, 0, 1.0),
        rollout(1, 1, 1.0),
    ]
    (pair,), written = export("trl-preference", items)
    assert [message["role"] for message in pair["prompt"]] == ["system", "user"]
    assert (pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) == ("2", "3")
    assert written.left_out == {NO_PAIR: 1}


def test_a_prompt_for_each_row() -> None:
    lines, _ = export(
        "trl-prompts", [rollout(0, 0), rollout(0, 1), rollout(1, 0, messages=PROMPT, error="model: gone")]
    )
    assert [line["row_id"] for line in lines] == ["row0", "row1"]
    assert lines[0]["prompt"] == PROMPT
    assert json.loads(lines[0]["metadata"]) == {"level": [1, "x"]}


def test_token_sequences_mask_what_was_not_sampled() -> None:
    (line,), written = export("tokens", [rollout(), rollout(1, turns=[turn()])])
    assert line["input_ids"] == [1, 2, 3, 4, 5, 6]
    assert line["mask"] == [0, 0, 1, 0, 1, 1]
    assert line["logprobs"] == [0, 0, -0.5, 0, -0.5, -0.5]
    assert (line["prompt_length"], line["transitions"]) == (2, {"clean": 1, "realign": 0, "fork": 0})
    assert written.left_out == {NO_TOKENS: 1}


def test_a_reply_that_was_tokenised_differently_is_masked_from_there() -> None:
    (line,), _ = export("tokens", [rollout(turns=[turn([1], [2, 3, 4]), turn([1, 2, 9, 9], [5])])])
    assert (line["input_ids"], line["mask"]) == ([1, 2, 9, 9, 5], [0, 1, 0, 0, 1])
    assert line["transitions"]["realign"] == 1


def test_an_earlier_or_larger_change_begins_another_sequence() -> None:
    long = list(range(10, 10 + FORK_TOKENS))
    for second in ([7, 2, 3], [1, 2, 7]):
        first = turn([1, 2], long) if second[0] == 1 else turn([1, 2], [3])
        lines, _ = export("tokens", [rollout(turns=[first, turn(second, [5])])])
        assert [line["sequence"] for line in lines] == [0, 1]
        assert lines[1]["input_ids"] == [*second, 5]
        assert lines[1]["transitions"] == {"clean": 0, "realign": 0, "fork": 1}


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=6))
def test_every_sequence_ends_with_what_the_engine_saw(turns: list[tuple[list[int], list[int]]]) -> None:
    found = Sequences()
    for prompt, reply in turns:
        found.add(prompt, reply, [-1.0] * len(reply))
        last = found.all[-1]
        assert last.ids == prompt + reply
        assert last.mask[-len(reply) :] == [1] * len(reply)
        assert last.logprobs is not None
        assert len(last.ids) == len(last.mask) == len(last.logprobs)
        assert all((mask == 1) == (logprob == -1.0) for mask, logprob in zip(last.mask, last.logprobs, strict=True))
    assert sum(found.transitions.values()) == len(turns) - 1
    assert len(found.all) == found.transitions["fork"] + 1


def test_traces_of_verifiers_hold_each_token_once() -> None:
    (line,), _ = export("verifiers", [rollout(error="timeout: late", finish_reason="timeout")])
    roles = [(node["message"]["role"], node["parent"], bool(node.get("sampled"))) for node in line["nodes"]]
    assert roles == [
        ("system", None, False),
        ("user", 0, False),
        ("assistant", 1, True),
        ("tool", 2, False),
        ("assistant", 3, True),
    ]
    assert [token for node in line["nodes"] for token in node.get("token_ids", [])] == [1, 2, 3, 4, 5, 6]
    assert [call["node"] for call in line["calls"]] == [2, 4]
    assert (line["ok"], line["is_timeout"], line["errors"]) == (False, True, [{"type": "timeout", "message": "late"}])


def test_traces_of_verifiers_branch_where_tokens_differ() -> None:
    (line,), _ = export("verifiers", [rollout(turns=[turn([1, 2], [3]), turn([1, 9, 4], [5])])])
    replies = [node for node in line["nodes"] if node.get("sampled")]
    assert replies[1]["token_ids"] == [1, 9, 4, 5]
    path = []
    number: int | None = line["nodes"].index(replies[1])
    while number is not None:
        path.append(line["nodes"][number])
        number = line["nodes"][number]["parent"]
    assert [node["message"]["role"] for node in reversed(path)] == ["system", "user", "assistant", "tool", "assistant"]
    # The first reply is context on this path: none of its tokens is trained on twice.
    assert [bool(node.get("sampled")) for node in reversed(path)] == [False, False, False, False, True]


READERS = """
[project]
name = "readers"
version = "0.1.0"
requires-python = ">=3.12,<3.14"
dependencies = ["datasets", "harbor", "verifiers>=0.4"]
"""
READING = """
import json
from pathlib import Path

import datasets
from harbor.models.trajectories import Trajectory
from verifiers.v1.trace import WireTrace

documents = [Trajectory.model_validate_json(line) for line in Path("atif.jsonl").read_text().splitlines()]
traces = [WireTrace.model_validate_json(line) for line in Path("verifiers.jsonl").read_text().splitlines()]
rows = {
    name: datasets.load_dataset("json", data_files=f"{name}.jsonl", split="train", cache_dir="cache")
    for name in ("trl-sft", "trl-preference", "trl-prompts", "tokens")
}
print(json.dumps({
    "steps": [len(document.steps) for document in documents],
    "branches": [[list(branch.token_ids) for branch in trace.branches] for trace in traces],
    "rewards": [trace.rewards["f"] and trace.rewards["f"].score for trace in traces],
    "rows": {name: len(loaded) for name, loaded in rows.items()},
    "rejected": rows["trl-preference"][0]["rejected"][-1]["content"],
    "mask": rows["tokens"][0]["mask"],
}))
"""


@pytest.mark.released
def test_the_libraries_that_read_them_do(tmp_path: Path) -> None:
    """TRL's trainers read what `datasets` loads."""
    forked = [turn([1, 2], [3]), turn([1, 9, 4], [5])]
    items = [
        rollout(0, 0, 1.0),
        rollout(0, 1, 0.5, messages=called(answer="3")),
        rollout(1, 0, None, turns=forked, error="timeout: late", finish_reason="timeout"),
        rollout(2, 0, 0.0, messages=called("{"), turns=[turn(), turn()]),
    ]
    for name in ("trl-sft", "trl-preference", "trl-prompts", "tokens", "atif", "verifiers"):
        with (tmp_path / f"{name}.jsonl").open("wb") as sink:
            EXPORT_FORMATS[name].write(iter(items), sink, ExportOptions(["f"], bytes))
    (tmp_path / "pyproject.toml").write_text(READERS, encoding="utf-8")
    try:
        python = prepare_environment(
            tmp_path, environ={**os.environ, "UV_PYTHON_DOWNLOADS": "never", "UV_COMPILE_BYTECODE": "0"}
        )
    except RepositoryError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [str(python), "-c", READING],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "steps": [4, 4, 4, 4],
        "branches": [[[1, 2, 3, 4, 5, 6]], [[1, 2, 3, 4, 5, 6]], [[1, 2, 3], [1, 9, 4, 5]], [[]]],
        "rewards": [1.0, 0.5, None, 0.0],
        "rows": {"trl-sft": 3, "trl-preference": 1, "trl-prompts": 3, "tokens": 4},
        "rejected": "3",
        "mask": [0, 0, 1, 0, 1, 1],
    }
