"""TRL's dataset types: conversations for SFT, pairs for preference training, and prompts for GRPO.

Loaders such as `datasets` give a column one type. So messages have the same few fields in every line, and whatever has
no fixed form (arguments, unless asked for as objects, and the row's other columns) is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import IO, TYPE_CHECKING, TypeAlias

from osmosis_ai.exports.base import Arguments, ExportFormat, ExportOptions, LeftOut, Written, write_lines
from osmosis_ai.records import JsonObject, Message
from osmosis_ai.text import json_text
from osmosis_ai.wire_json import decode_json

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["PREFERENCE", "PROMPTS", "SFT"]

FAILED = "the rollout failed"
NO_REPLY = "the model never answered"
NO_OBJECT = "a tool call's arguments are no JSON object; --arguments text keeps them"
NO_PAIR = "the row has no pass and fail of the same model"

_Pair: TypeAlias = "tuple[ExportedRollout, ExportedRollout]"


def _conversation(messages: Iterable[Message], arguments: Arguments) -> list[Message]:
    """Return messages with the fields that chat templates read; tool messages name their tool."""
    tools: dict[object, str] = {}
    found = []
    for message in messages:
        kept: Message = {"role": message["role"], "content": _content(message.get("content"))}
        if message.get("reasoning_content"):
            kept["reasoning_content"] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            kept["tool_calls"] = [_call(call, arguments) for call in calls]
            tools |= {call.get("id"): call["function"]["name"] for call in calls}
        if message["role"] == "tool":
            kept |= {"tool_call_id": message.get("tool_call_id"), "name": tools.get(message.get("tool_call_id"), "")}
        found.append(kept)
    return found


def _content(content: object) -> str:
    """Return text: that of a content's parts, if it has any, without images."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return "" if content is None else str(content)


def _call(call: JsonObject, arguments: Arguments) -> JsonObject:
    text = call["function"].get("arguments") or "{}"
    function = {"name": call["function"]["name"], "arguments": text if arguments == "text" else _object(text)}
    return {"id": call.get("id"), "type": "function", "function": function}


def _object(text: str) -> JsonObject:
    try:
        found = decode_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LeftOut(NO_OBJECT)
    return found


def _split(rollout: ExportedRollout) -> tuple[list[Message], list[Message]]:
    """Return the messages before the first reply, and those from it on."""
    replies = [number for number, message in enumerate(rollout.messages) if message["role"] == "assistant"]
    start = replies[0] if replies else len(rollout.messages)
    return rollout.messages[:start], rollout.messages[start:]


def _write_sft(rollouts: Iterable[ExportedRollout], sink: IO[bytes], options: ExportOptions) -> Written:
    def record(rollout: ExportedRollout) -> list[JsonObject]:
        if rollout.error is not None:
            raise LeftOut(FAILED)
        if not _split(rollout)[1]:
            raise LeftOut(NO_REPLY)
        return [{"messages": _conversation(rollout.messages, options.arguments), "tools": rollout.tools or []}]

    return write_lines(rollouts, sink, options, record)


def _write_preference(rollouts: Iterable[ExportedRollout], sink: IO[bytes], options: ExportOptions) -> Written:
    # Rollouts arrive ordered by row, so only one row's attempts are in memory.
    rows = groupby(rollouts, key=lambda rollout: (rollout.row_id, rollout.policy))
    pairs = (pair for _, attempts in rows for pair in _pairs(list(attempts), options.pass_threshold))
    return write_lines(pairs, sink, options, lambda pair: [_preference(pair, options.arguments)])


def _pairs(attempts: list[ExportedRollout], threshold: float) -> Sequence[_Pair | None]:
    """Pair a row's passes with its fails, each once; an attempt that failed or lacks a score is neither.

    A row without a pair has None in its place.
    """
    scored = [
        (attempt, [score for score in attempt.rewards.values() if score is not None])
        for attempt in attempts
        if attempt.error is None and attempt.rewards and None not in attempt.rewards.values() and _split(attempt)[1]
    ]
    # A pass must pass by every function, or a pair could prefer the better reply by one and the worse by another.
    passes = [attempt for attempt, scores in scored if min(scores) >= threshold]
    fails = [attempt for attempt, scores in scored if min(scores) < threshold]
    return list(zip(passes, fails, strict=False)) or [None]


def _preference(pair: _Pair | None, arguments: Arguments) -> JsonObject:
    if pair is None:
        raise LeftOut(NO_PAIR)
    passed, failed = pair
    prompt, chosen = _split(passed)
    return {
        "prompt": _conversation(prompt, arguments),
        "chosen": _conversation(chosen, arguments),
        "rejected": _conversation(_split(failed)[1], arguments),
        "tools": passed.tools or [],
    }


def _write_prompts(rollouts: Iterable[ExportedRollout], sink: IO[bytes], options: ExportOptions) -> Written:
    return write_lines(_first_attempts(rollouts), sink, options, lambda rollout: [_prompt(rollout)])


def _first_attempts(rollouts: Iterable[ExportedRollout]) -> Iterator[ExportedRollout]:
    for _, attempts in groupby(rollouts, key=lambda rollout: rollout.row_id):
        yield next(attempts)


def _prompt(rollout: ExportedRollout) -> JsonObject:
    return {
        "prompt": _conversation(_split(rollout)[0], "text"),
        "ground_truth": rollout.ground_truth,
        "row_id": rollout.row_id,
        # As text, because `datasets` infers one type per column, and rows may differ.
        "metadata": json_text(rollout.metadata),
    }


SFT = ExportFormat(
    name="trl-sft",
    suffix=".jsonl",
    text=True,
    description="TRL's SFT: messages and tools of every rollout that didn't fail.",
    read_with=("trl.SFTTrainer(…, train_dataset=…)",),
    write=_write_sft,
)
PREFERENCE = ExportFormat(
    name="trl-preference",
    suffix=".jsonl",
    text=True,
    description="TRL's DPO: prompt, chosen and rejected, from a pass and a fail of the same row.",
    read_with=("trl.DPOTrainer(…, train_dataset=…)",),
    write=_write_preference,
    record="pair",
)
PROMPTS = ExportFormat(
    name="trl-prompts",
    suffix=".jsonl",
    text=True,
    description="TRL's GRPO: each row's prompt, ground truth and other columns, these as JSON text.",
    read_with=("trl.GRPOTrainer(…, train_dataset=…)",),
    write=_write_prompts,
    record="prompt",
)
