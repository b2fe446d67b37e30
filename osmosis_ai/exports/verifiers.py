"""verifiers' traces, version 1: a graph of messages, each with the tokens that it adds.

A path from a root to a leaf is one sequence of tokens. A turn that doesn't follow its predecessor cleanly begins
another path, whose context isn't trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import IO, TYPE_CHECKING

from osmosis_ai import __version__
from osmosis_ai.exports.base import ExportFormat, ExportOptions, Written, write_lines
from osmosis_ai.exports.tokens import Sequences, turn_logprobs
from osmosis_ai.records import JsonObject, Message

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout, ExportedTurn

__all__ = ["FORMAT"]

REASONS = ("stop", "length", "tool_calls")
"""The finish reasons that the format knows; others become null."""


def _record(rollout: ExportedRollout) -> JsonObject:
    nodes, calls = _graph(rollout)
    # Reversed, so that the first message of each role wins.
    opening = {message["role"]: message.get("content") for message in reversed(rollout.messages[:2])}
    data = {
        "idx": rollout.row_index,
        "id": rollout.row_id,
        "prompt": opening.get("user"),
        "system_prompt": opening.get("system"),
        "answer": rollout.ground_truth,
        "info": rollout.metadata,
    }
    return {
        "version": 1,
        "id": rollout.id,
        "verifiers": {"version": f"osmosis-ai {__version__}"},
        "task": {"type": "Row", "data": data, "key": rollout.row_id},
        "agent": {"config": {"model": rollout.model}, "name": rollout.policy, "trainable": rollout.policy == "policy"},
        "tools": [tool["function"] for tool in rollout.tools or []],
        "nodes": nodes,
        "calls": calls,
        "rewards": {name: None if score is None else {"score": score} for name, score in rollout.rewards.items()},
        "info": {"run_id": rollout.run_id, "run_index": rollout.run_index},
        # The store holds rollouts that have ended, and no others.
        "is_completed": True,
        "ok": rollout.error is None,
        "stop_condition": rollout.finish_reason,
        "is_timeout": rollout.finish_reason == "timeout",
        "errors": [] if rollout.error is None else [_error(rollout.error)],
    }


def _graph(rollout: ExportedRollout) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return the messages as nodes, and the model calls, which point to their replies."""
    nodes: list[JsonObject] = []
    calls: list[JsonObject] = []
    sequences = Sequences()
    turns = iter(rollout.turns)
    parent: int | None = None
    start = 0
    for number, message in enumerate(rollout.messages):
        turn = next(turns, None) if message["role"] == "assistant" else None
        if turn is None:
            continue
        known = turn.prompt_token_ids is not None and turn.token_ids is not None
        held = len(sequences.all[-1].ids) if sequences.all else 0
        if known and sequences.all:
            clean = sequences.all[-1].drift(turn.prompt_token_ids or []) == "clean"
            # A rewritten or retokenised context can't be a child of the earlier nodes: repeat it under a new root.
            if not clean:
                sequences, parent, start, held = Sequences(), None, 0, 0
        for each in rollout.messages[start:number]:
            nodes.append({"parent": parent, "message": _message(each)})
            parent = len(nodes) - 1
        # The nodes before this one hold the sequence so far, so the reply's node adds only what is beyond it.
        added = (turn.prompt_token_ids or [])[held:] if known else []
        nodes.append({"parent": parent, "message": _message(message), "sampled": True, **_tokens(turn, added)})
        parent = len(nodes) - 1
        calls.append(_model_call(turn, parent))
        if known:
            # Only the ids matter here; each node has its own log probabilities.
            sequences.add(turn.prompt_token_ids or [], turn.token_ids or [], None)
        start = number + 1
    for each in rollout.messages[start:]:
        nodes.append({"parent": parent, "message": _message(each)})
        parent = len(nodes) - 1
    return nodes, calls


def _tokens(turn: ExportedTurn, context: Sequence[int]) -> JsonObject:
    """Return a reply's tokens, after the context that its messages added; which one added which token is unknown."""
    if turn.token_ids is None:
        return {}
    ids = [*context, *turn.token_ids]
    mask = [False] * len(context) + [True] * len(turn.token_ids)
    return {"token_ids": ids, "mask": mask, "logprobs": turn_logprobs(turn) or []}


def _message(message: Message) -> JsonObject:
    content = message.get("content")
    kept: JsonObject = {"role": message["role"], "content": content}
    if message["role"] == "assistant":
        if calls := message.get("tool_calls"):
            numbers = count()
            kept["tool_calls"] = [
                {
                    "id": str(call.get("id") or f"call_{next(numbers)}"),
                    "name": call["function"]["name"],
                    "arguments": call["function"].get("arguments") or "",
                }
                for call in calls
            ]
        if message.get("reasoning_content"):
            kept["reasoning_content"] = message["reasoning_content"]
    else:
        kept["content"] = "" if content is None else content
    if message["role"] == "tool":
        kept["tool_call_id"] = str(message.get("tool_call_id"))
    return kept


def _model_call(turn: ExportedTurn, node: int) -> JsonObject:
    return {
        "node": node,
        "model": turn.model,
        "finish_reason": turn.finish_reason if turn.finish_reason in REASONS else None,
        "usage": {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens},
    }


def _error(text: str) -> JsonObject:
    kind, _, message = text.partition(": ")
    return {"type": kind, "message": message or text}


def _write(rollouts: Iterable[ExportedRollout], sink: IO[bytes], options: ExportOptions) -> Written:
    return write_lines(rollouts, sink, options, lambda rollout: [_record(rollout)])


FORMAT = ExportFormat(
    name="verifiers",
    suffix=".jsonl",
    text=True,
    description="verifiers' traces, version 1, with the tokens of each message.",
    read_with=("verifiers.v1.WireTrace.model_validate_json(line)",),
    write=_write,
)
