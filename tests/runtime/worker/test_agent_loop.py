"""The built-in agent loop: model and tools in turns, until the model stops or a limit does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from osmosis_ai.config import LimitsConfig
from osmosis_ai.records import Completion, Row, TokenIds, Usage
from osmosis_ai.rollout.core.base import CompletionsResult, RolloutResult
from osmosis_ai.runtime.protocol import RolloutJob
from osmosis_ai.runtime.worker.agent_loop import McpAgentLoop, McpContext, result_of, row_request

pytestmark = pytest.mark.anyio

JOB = RolloutJob("job", Row(0, "row", "Be good.", "1 + 2?", "3", {"level": 1}), 0, "policy")
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def calling(*names: str) -> CompletionsResult:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return CompletionsResult(message, usage=USAGE, finish_reason="tool_calls")


def saying(text: str, finish_reason: str = "stop") -> CompletionsResult:
    return CompletionsResult({"role": "assistant", "content": text}, usage=USAGE, finish_reason=finish_reason)


class Scripted:
    """A model with these replies, the last one again and again."""

    def __init__(self, replies: Sequence[CompletionsResult]) -> None:
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self._replies = replies

    async def chat_completions(self, messages: list[dict[str, Any]], **params: Any) -> CompletionsResult:
        self.asked.append((messages, params))
        return self._replies[min(len(self.asked), len(self._replies)) - 1]


async def named(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}


async def run(
    model: Scripted, *, call_tool: Any = named, counted: str = "total_tokens", **limits: Any
) -> RolloutResult:
    bounds = LimitsConfig(**limits)
    request = row_request(JOB, bounds, params={"top_p": 0.5})
    options = {"max_tokens_total": bounds.max_tokens_total, "counted": counted}
    context = McpContext(request, [], model, call_tool=call_tool, **options)
    with anyio.fail_after(30):
        return await McpAgentLoop().run(context)


async def test_tools_are_called_and_their_results_answered_until_the_model_stops() -> None:
    model = Scripted([calling("a", "b"), saying("done")])
    result = await run(model)
    assert result.finish_reason == "stop"
    assert [message["role"] for message in result.final_messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant"),
    ]
    assert [params for _, params in model.asked] == [{"top_p": 0.5}] * 2
    assert model.asked[1][0] == result.final_messages[:-1]


async def test_calls_of_a_turn_run_at_once_and_their_results_keep_the_order() -> None:
    second_came = anyio.Event()

    async def call_tool(call: dict[str, Any]) -> dict[str, Any]:
        if call["id"] == "a":
            await second_came.wait()
        else:
            second_came.set()
        return await named(call)

    result = await run(Scripted([calling("a", "b"), saying("done")]), call_tool=call_tool)
    assert [message["content"] for message in result.final_messages[3:5]] == ["a", "b"]
    assert result.metrics is not None
    assert (result.metrics.num_tool_calls, result.metrics.num_llm_calls) == (2, 2)


@pytest.mark.parametrize(
    ("reply", "limits", "reason", "asked", "called"),
    [
        (saying("cut", "length"), {}, "length", 1, 0),
        (saying("odd", "content_filter"), {}, "stop", 1, 0),
        (calling("a"), {"max_turns": 3}, "max_turns", 3, 3),
        # Results that no request would carry are not asked for.
        (calling("a"), {"max_tokens_total": 30}, "max_tokens_total", 2, 1),
        (calling("a"), {"max_tokens_total": 31}, "max_tokens_total", 3, 2),
        (calling("a"), {"max_tokens_total": 10, "counted": "completion_tokens"}, "max_tokens_total", 2, 1),
        (saying("done"), {"max_tokens_total": 1}, "stop", 1, 0),
    ],
)
async def test_why_a_rollout_ends(
    reply: CompletionsResult, limits: dict[str, Any], reason: str, asked: int, called: int
) -> None:
    model = Scripted([reply])
    result = await run(model, **limits)
    tools = [message for message in result.final_messages if message["role"] == "tool"]
    assert (result.finish_reason, len(model.asked), len(tools)) == (reason, asked, called)


def test_a_row_is_requested_as_a_trainer_would() -> None:
    request = row_request(JOB, LimitsConfig(max_turns=3, max_tokens_total=9), metadata={"level": 1})
    assert (request.rollout_id, request.max_turns, request.max_tokens_total) == ("job", 3, 9)
    assert [message["content"] for message in request.messages] == ["Be good.", "1 + 2?"]
    assert (request.metadata, request.completion_params) == ({"level": 1}, {})


def test_a_reply_is_given_to_loops_with_its_tokens() -> None:
    reply = {"role": "assistant", "content": "3"}
    full = result_of(Completion(reply, "stop", Usage(10, 5, 15), token_ids=TokenIds([1, 2], [3])))
    assert (full.message, full.finish_reason, full.usage) == (reply, "stop", USAGE)
    assert full.token_ids == [3]
    assert result_of(Completion(reply, "stop", Usage())).token_ids is None
