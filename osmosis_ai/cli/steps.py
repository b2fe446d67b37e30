"""A stepped rollout as text: requests, replies, results, scores and tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from osmosis_ai.records import Message, ModelSpec, Score, Tool, ToolCall, Turn
from osmosis_ai.runtime.protocol import Called, Paused
from osmosis_ai.runtime.run.debugger import Ended
from osmosis_ai.text import content_text, counted, duration, failure_text, json_text, score_text

__all__ = ["called", "conversation", "ended", "paused", "scores", "tools"]

CUT = 2000
ONE_LINE = 160


def paused(stop: Paused, model: ModelSpec, tools: Sequence[Tool]) -> Iterator[str]:
    """What a rollout has stopped at: the request that comes, the reply, or the results. Long texts are cut."""
    if stop.stage == "request":
        yield from _request(stop, model, tools)
    elif stop.stage == "reply":
        yield f"── reply {stop.index + 1}" + ("" if stop.turn is None else f": {_spent(stop.turn)}")
        yield from _reply(stop.messages[-1], CUT)
    else:
        for call, message in zip(stop.calls, stop.messages[-len(stop.calls) :], strict=True):
            yield f"── result of {_call(call.name, call.arguments, CUT)}, {_ended(call)}"
            yield _cut(content_text(message.get("content")), CUT)


def conversation(messages: Sequence[Message]) -> Iterator[str]:
    """Messages in full."""
    names = _tool_names(messages)
    for message in messages:
        yield f"── {_title(message, names)}"
        yield from _reply(message, None)


def called(tool: str, result: Called) -> Iterator[str]:
    """What a call by hand came to, in full."""
    error = "" if result.error is None else f", error: {result.error}"
    yield f"── result of {tool}, called by hand, {duration(result.duration_ms)}{error}"
    yield result.text


def ended(end: Ended, *, edited: bool) -> Iterator[str]:
    """How a rollout ended, and its scores."""
    rollout = end.rollout
    parts = [
        rollout.finish_reason,
        counted(len(rollout.turns), "turn"),
        counted(len(rollout.tool_calls), "tool call"),
        f"{rollout.usage.total_tokens:,} tokens",
        duration(rollout.duration_ms),
    ]
    if rollout.cost_usd:
        parts.append(f"${rollout.cost_usd:.4f}")
    if edited:
        parts.append("edited by hand")
    yield f"── row {rollout.row_index} ended: {', '.join(parts)}"
    if rollout.failure is not None:
        yield failure_text(rollout.failure)
    yield from scores(end.scores)


def scores(given: Sequence[Score]) -> Iterator[str]:
    """Scores, each with its explanation."""
    return map(score_text, given)


def tools(given: Sequence[Tool]) -> Iterator[str]:
    """The tools with their JSON Schemas."""
    for tool in given:
        function = tool["function"]
        yield f"── {function['name']}"
        if function.get("description"):
            yield function["description"]
        yield msgspec.json.format(msgspec.json.encode(function["parameters"]), indent=2).decode("utf-8")


def _request(stop: Paused, model: ModelSpec, tools: Sequence[Tool]) -> Iterator[str]:
    replies = [place for place, message in enumerate(stop.messages) if message.get("role") == "assistant"]
    # The last reply is new in this request, with everything after it.
    new = stop.messages[replies[-1] :] if replies and stop.index else stop.messages
    where = f" at {model.base_url}" if model.base_url else ""
    parts = [f"{model.name}{where}", f"{counted(len(stop.messages), 'message')}, {len(new)} of them new"]
    parts.append(counted(len(tools), "tool"))
    if model.params:
        parts.append(json_text(model.params))
    yield f"── request {stop.index + 1}: {', '.join(parts)}"
    names = _tool_names(stop.messages)
    for message in new:
        if stop.index:
            # These were shown in full length a moment ago.
            text = " ".join(" ".join(_reply(message, None)).split())
            yield f"{_title(message, names)}: {text if len(text) <= ONE_LINE else text[:ONE_LINE] + '…'}"
        else:
            yield f"{_title(message, names)}: {_cut(content_text(message.get('content')), CUT)}"


def _reply(message: Message, limit: int | None) -> Iterator[str]:
    reasoning = content_text(message.get("reasoning_content"))
    if reasoning:
        yield f"reasoning: {_cut(reasoning, limit)}"
    content = content_text(message.get("content"))
    calls = message.get("tool_calls") or ()
    if content or not calls:
        yield _cut(content, limit)
    for call in calls:
        function = call.get("function") or {}
        yield f"→ {_call(str(function.get('name')), content_text(function.get('arguments')), limit)}"


def _title(message: Message, names: dict[str, str]) -> str:
    role = str(message.get("role"))
    name = names.get(str(message.get("tool_call_id")))
    return f"result of {name}" if role == "tool" and name else role


def _tool_names(messages: Sequence[Message]) -> dict[str, str]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {str(call.get("id")): str((call.get("function") or {}).get("name")) for call in calls}


def _call(name: str, arguments: str, limit: int | None) -> str:
    return f"{name} {_cut(arguments, limit)}"


def _ended(call: ToolCall) -> str:
    parts = [duration(call.duration_ms)]
    if call.error is not None:
        parts.append(f"error: {call.error}")
    if call.truncated_from is not None:
        parts.append(f"cut from {call.truncated_from:,} characters (--max-tool-output)")
    return ", ".join(parts)


def _spent(turn: Turn) -> str:
    usage = turn.usage
    parts = [turn.finish_reason]
    if turn.model is not None:
        parts.append(turn.model)
    parts += [f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens", duration(turn.duration_ms)]
    if turn.attempts > 1:
        parts.append(f"{turn.attempts} attempts")
    if turn.cached:
        parts.append("from the cache")
    return ", ".join(parts)


def _cut(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters; m shows all of it"
