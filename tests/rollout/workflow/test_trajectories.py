"""Trajectory files: the messages of three APIs as steps, the controller's figures, and what is saved for a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from workflows import ANSWER, Controller, local, raising, run, serving

from osmosis_ai import __version__
from osmosis_ai.rollout import ExecutionResult, RolloutSample, RolloutStatus
from osmosis_ai.rollout.testing import raw_json
from osmosis_ai.rollout.trajectory import (
    TrajectoryReport,
    convert_sample_to_trajectory,
    report_from_response,
    save_trajectory,
)
from osmosis_ai.rollout.trajectory.report import SampleReport
from waiting import eventually

CALL = {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2, "b": 2}}
SEEN = {"results": [{"source_call_id": "c1", "content": "4"}]}
CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": [{"type": "text", "text": "2 + 2"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "a sum",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
    {"role": "assistant", "content": "4"},
]
STRANDS = [
    {"role": "system", "content": [{"text": "Add."}]},
    {"role": "user", "content": [{"text": "2 + 2"}]},
    {
        "role": "assistant",
        "content": [
            {"reasoningContent": {"reasoningText": {"text": "a sum"}}},
            {"toolUse": {"toolUseId": "c1", "name": "add", "input": {"a": 2, "b": 2}}},
        ],
    },
    {"role": "user", "content": [{"toolResult": {"toolUseId": "c1", "content": [{"text": "4"}], "status": "success"}}]},
    {"role": "assistant", "content": [{"text": "4"}]},
]
RESPONSES = [
    {"role": "developer", "content": "Add."},
    {"role": "user", "content": [{"type": "input_text", "text": "2 + 2"}]},
    {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "a sum"}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2, "b": 2}'},
    {"type": "function_call_output", "call_id": "c1", "output": "4"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
]
STEPS = [
    {"step_id": 1, "source": "system", "message": "Add."},
    {"step_id": 2, "source": "user", "message": "2 + 2"},
    {
        "step_id": 3,
        "source": "agent",
        "message": "",
        "reasoning_content": "a sum",
        "tool_calls": [CALL],
        "observation": SEEN,
    },
    {"step_id": 4, "source": "agent", "message": "4"},
]


def steps_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a conversation, without their numbers."""
    steps = convert_sample_to_trajectory(RolloutSample(messages=messages), rollout_id="r1").steps
    return [{name: value for name, value in step.items() if name != "step_id"} for step in steps]


@pytest.mark.parametrize("messages", [CHAT, STRANDS, RESPONSES], ids=["chat", "strands", "responses"])
def test_messages_of_every_api_become_the_same_steps(messages: list[dict[str, Any]]) -> None:
    trajectory = convert_sample_to_trajectory(RolloutSample(messages=messages, reward=1), rollout_id="r1")
    assert trajectory.to_json_dict() == {
        "schema_version": "ATIF-v1.7",
        "session_id": "r1",
        "trajectory_id": "r1",
        "agent": {"name": "osmosis-rollout-sdk", "version": __version__},
        "steps": STEPS,
        "final_metrics": {"total_steps": 4},
        "extra": {"osmosis": {"rollout_id": "r1", "reward": 1.0}},
    }


@pytest.mark.parametrize(
    ("messages", "steps"),
    [
        # Reasoning and text are one reply of the Responses API.
        (
            [RESPONSES[2], RESPONSES[5]],
            [{"source": "agent", "message": "4", "reasoning_content": "a sum"}],
        ),
        # So are text and calls.
        ([RESPONSES[5], RESPONSES[3]], [{"source": "agent", "message": "4", "tool_calls": [CALL]}]),
        (
            [{"type": "web_search_call", "id": "ws"}],
            [{"source": "agent", "message": "", "extra": {"items": [{"type": "web_search_call", "id": "ws"}]}}],
        ),
        (
            [{"role": "critic", "content": "no"}],
            [{"source": "user", "message": "no", "extra": {"original_role": "critic"}}],
        ),
        (
            [{"role": "user", "content": "no", "reasoning_content": "hm"}],
            [{"source": "user", "message": "no", "extra": {"reasoning_content": "hm"}}],
        ),
        (
            [{"role": "tool", "tool_call_id": "c9", "content": "4"}],
            [
                {
                    "source": "system",
                    "message": "",
                    "extra": {"original_role": "tool"},
                    "observation": {"results": [{"content": "4", "extra": {"tool_call_id": "c9"}}]},
                }
            ],
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}],
            [
                {
                    "source": "agent",
                    "message": "",
                    "tool_calls": [
                        {"tool_call_id": "call_0", "function_name": "f", "arguments": {"_raw": "[" * 100_000}}
                    ],
                }
            ],
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}, {}, "odd"]}],
            [
                {
                    "source": "agent",
                    "message": "",
                    "tool_calls": [
                        {"tool_call_id": "call_0", "function_name": "f", "arguments": {"_raw": "{"}},
                        {"tool_call_id": "call_1", "function_name": "unknown", "arguments": {}},
                    ],
                }
            ],
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            [{"source": "user", "message": '[{"type": "image_url", "image_url": {"url": "u"}}]'}],
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": "4",
                    "model": "m",
                    "timestamp": 0,
                    "usage": {"input_tokens": 3, "output_tokens": 0, "input_tokens_details": {"cached_tokens": 2}},
                }
            ],
            [
                {
                    "source": "agent",
                    "message": "4",
                    "timestamp": "1970-01-01T00:00:00+00:00",
                    "model_name": "m",
                    "metrics": {"prompt_tokens": 3, "completion_tokens": 0, "cached_tokens": 2},
                    "llm_call_count": 1,
                }
            ],
        ),
    ],
)
def test_odd_messages_are_kept(messages: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    assert steps_of(*messages) == steps


def test_figures_of_model_calls_belong_to_steps_if_there_are_as_many() -> None:
    calls = [
        {"prompt_tokens": 10, "completion_tokens": 5, "model_name": "m", "completion_token_ids": [1, 2]},
        {"prompt_tokens": 20, "cost_usd": 0.5},
    ]
    report = SampleReport.model_validate({"model_name": "policy", "llm_call_metrics": calls})
    document = convert_sample_to_trajectory(RolloutSample(messages=CHAT), rollout_id="r1", report=report).to_json_dict()
    assert document["agent"]["model_name"] == "policy"
    agents = [step for step in document["steps"] if step["source"] == "agent"]
    assert [step["metrics"] for step in agents] == [
        {"prompt_tokens": 10, "completion_tokens": 5, "completion_token_ids": [1, 2]},
        {"prompt_tokens": 20, "cost_usd": 0.5},
    ]
    assert (agents[0]["model_name"], agents[0]["llm_call_count"]) == ("m", 1)
    totals = {"total_prompt_tokens": 30, "total_completion_tokens": 5, "total_cost_usd": 0.5, "total_steps": 4}
    assert document["final_metrics"] == totals

    other = convert_sample_to_trajectory(RolloutSample(messages=ANSWER), rollout_id="r1", report=report).to_json_dict()
    assert other["extra"]["osmosis"]["unmatched_llm_call_metrics"] == calls
    assert "metrics" not in other["steps"][1]


def test_the_controllers_totals_count() -> None:
    report = SampleReport(final_metrics={"total_prompt_tokens": 7, "total_steps": 99, "odd": 1})
    trajectory = convert_sample_to_trajectory(RolloutSample(messages=ANSWER), rollout_id="r1", report=report)
    assert trajectory.final_metrics == {"total_prompt_tokens": 7, "total_steps": 2}


def test_a_sample_without_messages_for_it_has_no_trajectory() -> None:
    with pytest.raises(ValueError, match="no trajectory messages"):
        convert_sample_to_trajectory(RolloutSample(trajectory_messages=None), rollout_id="r1")


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ({"trajectory": {"model_name": "m"}}, TrajectoryReport(model_name="m")),
        ({"trajectory": {"samples": {"r1": {"llm_call_metrics": [{"prompt_tokens": "many"}]}}}}, None),
        ({}, None),
        ([], None),
        ("text", None),
    ],
)
def test_a_report_is_read_if_it_is_one(body: Any, report: TrajectoryReport | None) -> None:
    assert report_from_response(httpx.Response(200, json=body)) == report
    assert report_from_response(httpx.Response(200, text="<html>")) is None


@pytest.mark.anyio
async def test_what_is_saved(tmp_path: Path) -> None:
    async def save(name: str, **fields: Any) -> dict[str, Any]:
        result = ExecutionResult(status=RolloutStatus.SUCCESS, **fields)
        await save_trajectory(rollout_id=name, result=result, artifact_root=tmp_path)
        folder = tmp_path / name
        return {file.name: json.loads(file.read_bytes()) for file in sorted(folder.glob("*"))}

    sample = RolloutSample(messages=ANSWER)
    assert list(await save("one", sample=sample)) == ["trajectory.json"]
    several = await save("several", samples={"a": sample, "b": sample})
    assert list(several) == ["trajectory-1.json", "trajectory-2.json"]
    assert await save("none", extra_fields={"file": Path("x")}) == {"diagnostics.json": {"file": "x"}}
    assert await save("off", sample=RolloutSample(messages=ANSWER, trajectory_messages=None)) == {}
    odd = RolloutSample(messages=[{"role": "user", "content": "hi", "timestamp": "never"}], label="4")
    assert list(await save("odd", sample=odd)) == ["trajectory.json"]
    # A file where the folder should be.
    (tmp_path / "blocked").write_text("", encoding="utf-8")
    await save_trajectory(
        rollout_id="blocked",
        result=ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample),
        artifact_root=tmp_path,
    )


def test_a_served_rollout_leaves_its_trajectory_and_diagnostics(artifacts: Path) -> None:
    calls = [{"prompt_tokens": 10, "completion_tokens": 5}]
    answer = raw_json({"trajectory": {"model_name": "m", "samples": {"any": {"llm_call_metrics": calls}}}})
    with Controller(answers=[answer]).run_in_thread() as controller, serving(local()) as client:
        metadata = {"level": 1}
        client.post("/rollout", json=controller.called_back(metadata=metadata, extra_fields={"seed": 1}))
        file = artifacts / "r1" / "trajectory.json"
        eventually(file.exists)
        eventually(lambda: client.get("/health").json()["lifecycle"]["active_rollouts"] == 0)
    document = json.loads(file.read_bytes())
    assert document["agent"]["model_name"] == "m"
    assert document["steps"][1]["metrics"] == calls[0]
    assert document["extra"]["osmosis"] == {
        "rollout_id": "r1",
        "label": "4",
        "reward": 1.0,
        "request_metadata": metadata,
        "request_extra_fields": {"seed": 1},
    }


def test_a_failed_rollout_leaves_its_diagnostics(controller: Controller, artifacts: Path) -> None:
    with serving(local(raising(ValueError("bad")))) as client:
        run(client, controller.request("r2"))
        eventually((artifacts / "r2" / "diagnostics.json").exists)
    details = json.loads((artifacts / "r2" / "diagnostics.json").read_bytes())
    assert details["exception"] == "ValueError"
    assert not (artifacts / "r2" / "trajectory.json").exists()
