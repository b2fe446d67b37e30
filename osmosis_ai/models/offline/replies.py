"""The replies of offline models, and what of them a conversation shows."""

from __future__ import annotations

import json
from collections.abc import Iterable

from osmosis_ai.records import Completion, JsonObject, Message

__all__ = ["answer", "asked", "calling"]


def answer(model: str, text: str) -> Completion:
    """A last message.

    Args:
        model: Who says it.
        text: What it says.
    """
    return Completion(message={"role": "assistant", "content": text}, model=model, cost_usd=0.0)


def calling(model: str, prefix: str, calls: Iterable[tuple[str, JsonObject]], *, first: int = 0) -> Completion:
    """A message that calls tools, under ids such as `oracle_0`.

    Args:
        model: Who calls them.
        prefix: What the ids begin with.
        calls: Their names and arguments.
        first: The number of the first call.
    """
    made = [
        {
            "id": f"{prefix}_{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for number, (name, arguments) in enumerate(calls, first)
    ]
    message: Message = {"role": "assistant", "content": None, "tool_calls": made}
    return Completion(message=message, finish_reason="tool_calls", model=model, cost_usd=0.0)


def asked(messages: Iterable[Message]) -> set[str]:
    """The ids of all tool calls in a conversation."""
    return {str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()}
