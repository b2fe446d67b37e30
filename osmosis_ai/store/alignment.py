"""Align the conversations of two rollouts step by step, to show where they part."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple, TypeAlias

from osmosis_ai.conversation import call_name, steps
from osmosis_ai.records import Record, Rollout
from osmosis_ai.text import content_text

__all__ = ["AlignedStep", "Change", "ComparedStep", "align", "word_changes"]

Change: TypeAlias = Literal["equal", "changed", "only_a", "only_b"]
"""`changed`: the same kind of step, with other words, arguments or results."""

MAX_WORDS = 4000
_WORD = re.compile(r"\s+|\w+|[^\w\s]")


class ComparedStep(Record, frozen=True):
    """A step of a conversation: a message, or a tool call with its result."""

    role: str
    """The message's role; `call` for a tool call."""
    tool: str | None
    """Name of the called tool, null for a message."""
    text: str
    """Text of the message, or arguments of the call."""
    result: str | None
    """Result of the call, null for a message and for a call without a result."""


class AlignedStep(Record, frozen=True):
    """A step of one rollout or of both."""

    change: Change
    """`equal`, `changed`, `only_a` or `only_b`."""
    a: ComparedStep | None
    """The step of the first rollout, null if it has none here."""
    b: ComparedStep | None
    """The step of the second rollout, null if it has none here."""


class _Key(NamedTuple):
    """The parts by which steps are equal, apart from results: the kind of step, and its text or canonical arguments."""

    kind: tuple[str, str | None]
    content: str


def align(a: Rollout, b: Rollout) -> list[AlignedStep]:
    """Align two rollouts, read with their trajectories, on role, tool and canonical arguments."""
    steps_a, steps_b = list(_steps(a)), list(_steps(b))
    keys_a, keys_b = list(map(_key, steps_a)), list(map(_key, steps_b))
    aligned: list[AlignedStep] = []
    for change, i, to_i, j, to_j in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_opcodes():
        if change == "equal":
            aligned += map(_pair, steps_a[i:to_i], steps_b[j:to_j])
        else:
            aligned += _replaced(steps_a[i:to_i], steps_b[j:to_j])
    return aligned


def word_changes(a: str, b: str) -> list[tuple[Literal["equal", "delete", "insert"], str]]:
    """Split two texts into the parts that both have or only one of them has, in order."""
    words_a, words_b = _WORD.findall(a), _WORD.findall(b)
    # SequenceMatcher takes quadratic time.
    if len(words_a) + len(words_b) > MAX_WORDS:
        return [("equal", a)] if a == b else [("delete", a), ("insert", b)]
    found: list[tuple[Literal["equal", "delete", "insert"], str]] = []
    for change, i, to_i, j, to_j in SequenceMatcher(None, words_a, words_b, autojunk=False).get_opcodes():
        if change == "equal":
            found.append(("equal", "".join(words_a[i:to_i])))
            continue
        if to_i > i:
            found.append(("delete", "".join(words_a[i:to_i])))
        if to_j > j:
            found.append(("insert", "".join(words_b[j:to_j])))
    return found


def _steps(rollout: Rollout) -> Iterator[ComparedStep]:
    """Yield a rollout's steps; each result belongs to the call that it answers."""
    # By reply too, because models reuse call ids, and a queue for each, because one reply may repeat an id.
    results: defaultdict[tuple[int, str], deque[str]] = defaultdict(deque)
    reply = 0
    known = list(steps(rollout.messages, rollout.turns, rollout.tool_calls))
    for step in known:
        if step.message is None:
            continue
        if step.role == "assistant":
            reply += 1
        elif step.role == "tool":
            results[reply, str(step.message.get("tool_call_id"))].append(content_text(step.message.get("content")))
    reply = 0
    for step in known:
        message = step.message
        if message is None or step.role == "tool":
            continue
        calls = message.get("tool_calls") or () if step.role == "assistant" else ()
        text = content_text(message.get("content"))
        if text or not calls:
            yield ComparedStep(step.role, None, text, None)
        reply += step.role == "assistant"
        for call in calls:
            waiting = results[reply, str(call.get("id"))]
            arguments = content_text((call.get("function") or {}).get("arguments"))
            yield ComparedStep("call", call_name(call), arguments, waiting.popleft() if waiting else None)


def _key(step: ComparedStep) -> _Key:
    return _Key((step.role, step.tool), step.text.strip() if step.tool is None else _canonical(step.text))


def _canonical(arguments: str) -> str:
    """Return arguments in one form, whatever the order of keys and the white space; other text as it is."""
    try:
        value: Any = json.loads(arguments)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def _pair(a: ComparedStep, b: ComparedStep) -> AlignedStep:
    return AlignedStep("equal" if a.result == b.result and _key(a) == _key(b) else "changed", a, b)


def _replaced(a: Sequence[ComparedStep], b: Sequence[ComparedStep]) -> Iterator[AlignedStep]:
    """Pair steps of the same kind where the rollouts diverge."""
    kinds_a, kinds_b = ([_key(step).kind for step in each] for each in (a, b))
    for change, i, to_i, j, to_j in SequenceMatcher(None, kinds_a, kinds_b, autojunk=False).get_opcodes():
        if change == "equal":
            yield from map(_pair, a[i:to_i], b[j:to_j])
        else:
            yield from (AlignedStep("only_a", step, None) for step in a[i:to_i])
            yield from (AlignedStep("only_b", None, step) for step in b[j:to_j])
