"""Helpers for loops that run their own tools: parse tool calls, and format results for the model."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import anyio

from osmosis_ai.errors import ToolArgumentError
from osmosis_ai.records import JsonObject
from osmosis_ai.wire_json import decode_json

__all__ = [
    "create_tool_error_result",
    "create_tool_result",
    "execute_tool_calls",
    "get_tool_call_info",
    "parse_tool_arguments",
    "serialize_tool_result",
]


def create_tool_result(tool_call_id: str, content: str) -> dict[str, str]:
    """Create the tool message that answers a tool call.

    Args:
        tool_call_id: The call's id.
        content: The result as text; see `serialize_tool_result`.
    """
    return {"role": "tool", "content": content, "tool_call_id": tool_call_id}


def create_tool_error_result(tool_call_id: str, error_message: str) -> dict[str, str]:
    """Create the tool message that tells the model that a tool call failed: `Error: …`."""
    return create_tool_result(tool_call_id, f"Error: {error_message}")


def serialize_tool_result(result: object) -> str:
    """Convert a tool's return value to text: a str unchanged, an int or float by `str`, anything else as JSON.

    Values that JSON can't represent (dates, objects) are written as their `str`.
    """
    if isinstance(result, str):
        return result
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        return str(result)
    return json.dumps(result, ensure_ascii=False, default=str)


def parse_tool_arguments(arguments: str | JsonObject | None) -> JsonObject:
    """Parse the arguments of a tool call into a dict; empty or missing arguments give an empty one.

    Args:
        arguments: As in `tool_call["function"]["arguments"]`; a dict is returned unchanged.

    Raises:
        ToolArgumentError: The arguments aren't a JSON object.
    """
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}
    try:
        parsed = decode_json(arguments)
    except ValueError as error:
        raise ToolArgumentError(f"the arguments are not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ToolArgumentError(f"the arguments must be a JSON object, not {type(parsed).__name__}")
    return parsed


def get_tool_call_info(tool_call: JsonObject) -> tuple[str, str, JsonObject]:
    """Return a tool call's id, the tool's name and the parsed arguments.

    Raises:
        ToolArgumentError: The call names no tool, or its arguments aren't a JSON object. The error has the call's id
            and the tool's name.
    """
    found = tool_call.get("id")
    call_id = "unknown" if found is None else str(found)
    function = tool_call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ToolArgumentError("the tool call names no function", tool_call_id=call_id)
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        kind = type(arguments).__name__
        raise ToolArgumentError(f"the arguments must be JSON text, not {kind}", tool_call_id=call_id, tool_name=name)
    try:
        return call_id, name, parse_tool_arguments(arguments)
    except ToolArgumentError as error:
        raise ToolArgumentError(str(error), tool_call_id=call_id, tool_name=name) from error


async def execute_tool_calls(
    tool_calls: list[JsonObject], executor: Callable[[JsonObject], Awaitable[JsonObject]]
) -> list[JsonObject]:
    """Run one turn's tool calls concurrently.

    Args:
        tool_calls: The calls, as in an assistant message.
        executor: Runs one call and returns its tool message. If it raises, that call gets an error result, and the
            other calls keep theirs.

    Returns:
        The tool messages, in call order.
    """
    results: list[JsonObject] = [{} for _ in tool_calls]

    async def run(position: int) -> None:
        call = tool_calls[position]
        try:
            results[position] = await executor(call)
        except Exception as error:  # noqa: BLE001  the tool's own failure, whatever it is, is the model's to see
            text = str(error) or type(error).__name__
            results[position] = create_tool_error_result(str(call.get("id", "unknown")), text)

    async with anyio.create_task_group() as group:
        for position in range(len(tool_calls)):
            group.start_soon(run, position)
    return results
