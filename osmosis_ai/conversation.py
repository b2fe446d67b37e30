"""Render a conversation as text: messages, replies, tool calls and results. All commands share this rendering."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from osmosis_ai.records import Message, Rollout, ToolCall, Turn
from osmosis_ai.text import content_text, cost, counted, duration, failure_text, indented, json_text

__all__ = [
    "Section",
    "Step",
    "call_facts",
    "call_name",
    "call_text",
    "conversation",
    "labelled",
    "last_answer",
    "message_text",
    "reply",
    "rollout_facts",
    "steps",
    "turn_facts",
]

INLINE_CHARACTERS = 100
"""Longer tool call arguments go on a line below the tool's name."""


class Section(NamedTuple):
    """A heading with the texts below it."""

    title: str
    body: list[str]

    def __str__(self) -> str:
        return "\n".join([f"── {self.title}", *self.body])


class Step(NamedTuple):
    """A message of a conversation, and the model call or tool call that it is the result of, if known.

    `tool` is the name of the tool whose result it is. Without a message, it is a tool call that has no result.
    """

    role: str
    message: Message | None
    turn: Turn | None = None
    call: ToolCall | None = None
    tool: str = ""


def steps(
    messages: Sequence[Message], turns: Sequence[Turn] = (), tool_calls: Sequence[ToolCall] = ()
) -> Iterator[Step]:
    """Yield one step per message, and one per tool call without a result.

    Args:
        messages: The conversation.
        turns: The known model calls, which produced its last replies.
        tool_calls: The tool calls of these turns.
    """
    replies = sum(message.get("role") == "assistant" for message in messages)
    # Assistant messages in the prompt come first, and no turn of this rollout produced them.
    waiting_turns: deque[Turn | None] = deque([None] * (replies - len(turns)))
    waiting_turns.extend(turns)
    # Models reuse ids across turns, and even within one turn.
    waiting_calls: defaultdict[tuple[int, str], deque[ToolCall]] = defaultdict(deque)
    for call in tool_calls:
        waiting_calls[call.turn, call.id].append(call)
    names: dict[str, str] = {}
    index = -1  # of the last reply's turn, which the tool results after it belong to
    for message in messages:
        role = str(message.get("role"))
        if role == "assistant":
            turn = waiting_turns.popleft() if waiting_turns else None
            index = index + 1 if turn is None else turn.index
            names.update((str(call.get("id")), call_name(call)) for call in message.get("tool_calls") or ())
            yield Step(role, message, turn)
        elif role == "tool":
            id_ = str(message.get("tool_call_id"))
            calls = waiting_calls[index, id_]
            found = calls.popleft() if calls else None
            yield Step(role, message, call=found, tool=found.name if found else names.get(id_, "tool"))
        else:
            yield Step(role, message)
    for calls in waiting_calls.values():
        yield from (Step("tool", None, call=call, tool=call.name) for call in calls)


def conversation(
    messages: Sequence[Message], turns: Sequence[Turn] = (), tool_calls: Sequence[ToolCall] = ()
) -> Iterator[Section]:
    """Yield the text of each step."""
    for step in steps(messages, turns, tool_calls):
        if step.role == "tool":
            yield _result(step)
        elif step.message is not None and step.role == "assistant":
            turn = step.turn
            title = step.role if turn is None else f"{step.role}, turn {turn.index + 1}, {turn_facts(turn)}"
            yield Section(title, list(reply(step.message)))
        elif step.message is not None:
            yield Section(step.role, [content_text(step.message.get("content"))])


def reply(message: Message, shorten: Callable[[str], str] = str) -> Iterator[str]:
    """Yield a model's reply: its reasoning, its text and its tool calls."""
    reasoning = content_text(message.get("reasoning_content"))
    if reasoning:
        yield labelled("reasoning", shorten(reasoning))
    content = content_text(message.get("content"))
    if content:
        yield shorten(content)
    for call in message.get("tool_calls") or ():
        arguments = content_text((call.get("function") or {}).get("arguments"))
        yield f"→ {call_text(call_name(call), shorten(arguments))}"


def call_text(name: str, arguments: str) -> str:
    """Format a tool call: the arguments after the name, or below it if they are long."""
    if len(arguments) <= INLINE_CHARACTERS and "\n" not in arguments:
        return f"{name} {arguments}"
    return f"{name}\n{indented(arguments)}"


def call_facts(call: ToolCall) -> str:
    """Describe a tool call: its duration, and anything unusual."""
    parts = [duration(call.duration_ms)]
    if call.error is not None:
        parts.append(f"error: {call.error}")
    if call.truncated_from is not None:
        parts.append(f"cut from {call.truncated_from:,} characters (--max-tool-output)")
    if call.edited:
        parts.append("edited by hand")
    return ", ".join(parts)


def turn_facts(turn: Turn) -> str:
    """Describe a model call: why it ended, its tokens and duration, and anything unusual."""
    parts = [turn.finish_reason]
    if turn.model is not None:
        parts.append(turn.model)
    usage = turn.usage
    parts += [f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens", duration(turn.duration_ms)]
    if turn.attempts > 1:
        parts.append(f"{turn.attempts} attempts")
    if turn.cached:
        parts.append("from the cache")
    if turn.edited:
        parts.append("edited by hand")
    parts += [f"without {name} ({why})" for name, why in turn.left_out.items()]
    return ", ".join(parts)


def rollout_facts(rollout: Rollout) -> list[str]:
    """List why a rollout ended, its size, duration and cost."""
    parts = [
        rollout.finish_reason,
        counted(len(rollout.turns), "turn"),
        counted(len(rollout.tool_calls), "tool call"),
        f"{rollout.usage.total_tokens:,} tokens",
        duration(rollout.duration_ms),
    ]
    if rollout.cost_usd:
        parts.append(cost(rollout.cost_usd))
    return parts


def labelled(label: str, text: str) -> str:
    """Put a text after its label, or below it if it has several lines."""
    return f"{label}: {text}" if "\n" not in text else f"{label}:\n{indented(text)}"


def last_answer(messages: Sequence[Message]) -> str:
    """Return the text of the last assistant message; empty if that message only calls tools."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            return message_text(message.get("content"))
    return ""


def message_text(content: Any) -> str:
    """Return the text in a message's content, without images and the like."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def call_name(call: Message) -> str:
    """Return the name of the tool that a message's tool call names."""
    return str((call.get("function") or {}).get("name"))


def _result(step: Step) -> Section:
    call = step.call
    body = [] if step.message is None else [content_text(step.message.get("content"))]
    if call is None:
        return Section(f"result of {step.tool}", body)
    if step.message is None:
        return Section(f"no result of {call.name}, {call_facts(call)}", body)
    if call.failure is not None and call.failure.detail is not None:
        body.append(failure_text(call.failure))
    if call.content is not None:
        body.append(labelled("not shown to the model as text", json_text(call.content)))
    return Section(f"result of {call.name}, {call_facts(call)}", body)
