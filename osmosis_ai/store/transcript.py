"""A trajectory as text to read: messages, tool calls with their results and times, scores, errors."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator

from osmosis_ai.records import Message, Rollout, ToolCall, Turn
from osmosis_ai.store import ScoredRollout
from osmosis_ai.text import content_text, counted, duration, failure_text, indented, json_text, score_text

__all__ = ["transcript", "visible"]

INLINE_CHARACTERS = 100
"""Longer arguments of a tool call stand below its name."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Text without what a terminal would obey: control characters other than tab and newline become escapes."""
    text = text.replace("\r\n", "\n")
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def transcript(scored: ScoredRollout) -> Iterator[str]:
    """The lines of a rollout's transcript.

    Args:
        scored: The rollout with its trajectory, its row and its scores.
    """
    for section in _sections(scored):
        yield from visible(section).split("\n")


def _sections(scored: ScoredRollout) -> Iterator[str]:
    rollout = scored.stored.rollout
    yield _title(scored)
    if scored.row.ground_truth is not None:
        yield _labelled("ground truth", scored.row.ground_truth)
    if scored.row.extra:
        yield _labelled("row", json_text(scored.row.extra))
    yield from _conversation(rollout)
    for turn in rollout.samples:
        yield f"\n── sample asked for by a tool, {_spent(turn)}"
    if rollout.failure is not None:
        yield "\n── failure"
        yield failure_text(rollout.failure)
    if scored.scores:
        yield "\n── scores"
        yield from map(score_text, scored.scores.values())


def _title(scored: ScoredRollout) -> str:
    stored, rollout = scored.stored, scored.stored.rollout
    policy = "" if rollout.policy == "policy" else f" ({rollout.policy})"
    parts = [
        rollout.finish_reason,
        counted(stored.turns, "turn"),
        counted(stored.tool_calls, "tool call"),
        f"{rollout.usage.total_tokens:,} tokens",
        duration(rollout.duration_ms),
    ]
    if rollout.cost_usd:
        parts.append(f"${rollout.cost_usd:.4f}")
    if stored.requests > stored.turns + len(rollout.samples):
        parts.append(f"{stored.requests} model requests, retries included")
    if stored.attempt > 1:
        parts.append(f"attempt {stored.attempt}")
    return f"row {rollout.row_index}, run {rollout.run_index}{policy}: {', '.join(parts)}"


def _conversation(rollout: Rollout) -> Iterator[str]:
    replies = [message for message in rollout.messages if message.get("role") == "assistant"]
    # A conversation may open with assistant messages that no turn of this rollout produced.
    turns: deque[Turn | None] = deque([None] * (len(replies) - len(rollout.turns)))
    turns.extend(rollout.turns)
    # Two calls of one turn may have the same id, and ids may come again in later turns.
    calls: defaultdict[tuple[int, str], deque[ToolCall]] = defaultdict(deque)
    for call in rollout.tool_calls:
        calls[call.turn, call.id].append(call)
    index = -1
    for message in rollout.messages:
        if message.get("role") == "assistant":
            turn = turns.popleft() if turns else None
            index = index + 1 if turn is None else turn.index
            yield from _reply(message, turn)
        elif message.get("role") == "tool":
            waiting = calls[index, str(message.get("tool_call_id"))]
            yield from _result(message, waiting.popleft() if waiting else None)
        else:
            yield f"\n── {message.get('role')}"
            yield content_text(message.get("content"))
    for waiting in calls.values():
        yield from (f"\n── no result of {_facts(call)}" for call in waiting)


def _reply(message: Message, turn: Turn | None) -> Iterator[str]:
    yield "\n── assistant" + ("" if turn is None else f", turn {turn.index + 1}, {_spent(turn)}")
    reasoning = message.get("reasoning_content")
    if reasoning:
        yield _labelled("reasoning", content_text(reasoning))
    content = content_text(message.get("content"))
    if content:
        yield content
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield f"→ {_call(str(function.get('name')), content_text(function.get('arguments')))}"


def _result(message: Message, call: ToolCall | None) -> Iterator[str]:
    yield f"\n── result of {'tool' if call is None else _facts(call)}"
    yield content_text(message.get("content"))
    if call is not None and call.content is not None:
        yield _labelled("not shown to the model as text", json_text(call.content))


def _facts(call: ToolCall) -> str:
    parts = [call.name, duration(call.duration_ms)]
    if call.error is not None:
        parts.append(f"error: {call.error}")
    if call.truncated_from is not None:
        parts.append(f"cut from {call.truncated_from:,} characters")
    if call.edited:
        parts.append("edited by hand")
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
    if turn.edited:
        parts.append("edited by hand")
    return ", ".join(parts)


def _call(name: str, arguments: str) -> str:
    if len(arguments) <= INLINE_CHARACTERS and "\n" not in arguments:
        return f"{name} {arguments}"
    return f"{name}\n{indented(arguments)}"


def _labelled(label: str, text: str) -> str:
    return f"{label}: {text}" if "\n" not in text else f"{label}:\n{indented(text)}"
