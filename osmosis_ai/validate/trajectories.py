"""Conversations that differ in their tool calls only, for reward functions that judge trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from osmosis_ai.models.offline.schemas import smallest_arguments
from osmosis_ai.records import JsonObject, Message, Row, Tool

__all__ = ["MAX_TRAJECTORY_ROWS", "Call", "Trajectory", "trajectories"]

MAX_TRAJECTORY_ROWS = 3
MAX_TOOLS = 8
"""Bounds on the rows and tools whose calls are varied: each row gets a conversation for each tool, and nine more."""
_ERROR = "Error: the tool failed"
_UNKNOWN_TOOL: Tool = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
"""Called if the repository's tools aren't known, as after a failed load."""


class Call(NamedTuple):
    """A tool call with its result."""

    tool: str
    arguments: str
    result: str


class Trajectory(NamedTuple):
    """A conversation to score. `what` describes its tool calls; they all end with the right answer."""

    what: str
    row: Row
    messages: list[Message]


def trajectories(rows: Sequence[Row], tools: Sequence[Tool]) -> Iterator[Trajectory]:
    """Yield conversations for each row: with other calls, more or fewer, in another order, or with other results."""
    known = [_call(tool["function"]) for tool in list(tools)[:MAX_TOOLS] or [_UNKNOWN_TOOL]]
    for row in rows:
        truth = row.ground_truth or ""
        calls = [call._replace(result=truth) for call in known]
        first = calls[0]
        variants: dict[str, list[Call]] = {
            "no tool call": [],
            **{f"one call of {call.tool}": [call] for call in calls},
            f"two calls of {first.tool}": [first] * 2,
            f"five calls of {first.tool}": [first] * 5,
            "a failed tool call": [first._replace(result=_ERROR)],
            "a failed tool call and a good one": [first._replace(result=_ERROR), first],
            "a tool call with an empty result": [first._replace(result="")],
            "a tool call with malformed arguments": [first._replace(arguments="{", result=_ERROR)],
        }
        if len(calls) > 1:
            variants["one call of every tool"] = calls
            variants["one call of every tool, in reverse order"] = calls[::-1]
        for what, made in variants.items():
            yield Trajectory(what, row, _conversation(row, made, truth))


def _call(function: JsonObject) -> Call:
    arguments = msgspec.json.encode(smallest_arguments(function.get("parameters") or {})).decode("utf-8")
    return Call(str(function["name"]), arguments, "")


def _conversation(row: Row, calls: Sequence[Call], answer: str) -> list[Message]:
    messages: list[Message] = [
        {"role": "system", "content": row.system_prompt},
        {"role": "user", "content": row.user_prompt},
    ]
    for number, call in enumerate(calls, start=1):
        function = {"name": call.tool, "arguments": call.arguments}
        made = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": call.result})
    messages.append({"role": "assistant", "content": answer})
    return messages
