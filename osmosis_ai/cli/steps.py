"""Render a stepped rollout as text: requests, replies, results, scores and tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from osmosis_ai.conversation import Section, call_facts, call_text, conversation, reply, rollout_facts, turn_facts
from osmosis_ai.records import Message, ModelSpec, Score, Tool
from osmosis_ai.runtime.protocol import Called, Paused
from osmosis_ai.runtime.run.debugger import Ended
from osmosis_ai.text import content_text, counted, duration, failure_text, json_text, score_text

__all__ = ["called", "ended", "messages", "paused", "scores", "tools"]

CUT = 2000
"""Characters shown of a text at a pause."""
ONE_LINE = 160
"""Characters shown of a message that an earlier step has shown."""


def paused(stop: Paused, model: ModelSpec, tools: Sequence[Tool]) -> Iterator[str]:
    """Render the step at which a rollout paused: the next request, the reply or the results. Long texts are cut."""
    if stop.stage == "request":
        yield from _request(stop, model, tools)
    elif stop.stage == "reply":
        facts = "" if stop.turn is None else f": {turn_facts(stop.turn)}"
        yield str(Section(f"reply {stop.index + 1}{facts}", list(reply(stop.messages[-1], _cut))))
    else:
        for call, message in zip(stop.calls, stop.messages[-len(stop.calls) :], strict=True):
            # Only the first line: the reply has shown long arguments.
            name = call_text(call.name, call.arguments).partition("\n")[0]
            yield str(Section(f"result of {name}, {call_facts(call)}", [_cut(content_text(message.get("content")))]))


def messages(given: Sequence[Message]) -> Iterator[str]:
    """Render messages in full."""
    return map(str, conversation(given))


def called(tool: str, result: Called) -> Iterator[str]:
    """Render the result of a manual call in full."""
    error = "" if result.error is None else f", error: {result.error}"
    yield str(Section(f"result of {tool}, called by hand, {duration(result.duration_ms)}{error}", [result.text]))


def ended(end: Ended, *, edited: bool) -> Iterator[str]:
    """Render a rollout's end and its scores."""
    rollout = end.rollout
    facts = rollout_facts(rollout)
    if edited:
        facts.append("edited by hand")
    failure = [] if rollout.failure is None else [failure_text(rollout.failure)]
    yield str(Section(f"row {rollout.row_index} ended: {', '.join(facts)}", failure))
    yield from scores(end.scores)


def scores(given: Sequence[Score]) -> Iterator[str]:
    """Render scores with their explanations."""
    return map(score_text, given)


def tools(given: Sequence[Tool]) -> Iterator[str]:
    """Render the tools with their JSON Schemas."""
    for tool in given:
        function = tool["function"]
        schema = msgspec.json.format(msgspec.json.encode(function["parameters"]), indent=2).decode("utf-8")
        description = [function["description"]] if function.get("description") else []
        yield str(Section(function["name"], [*description, schema]))


def _request(stop: Paused, model: ModelSpec, tools: Sequence[Tool]) -> Iterator[str]:
    replies = [place for place, message in enumerate(stop.messages) if message.get("role") == "assistant"]
    # A request adds the last reply and everything after it.
    first = replies[-1] if replies and stop.index else 0
    new = list(conversation(stop.messages))[first:]
    where = f" at {model.base_url}" if model.base_url else ""
    facts = [f"{model.name}{where}", f"{counted(len(stop.messages), 'message')}, {len(new)} of them new"]
    facts.append(counted(len(tools), "tool"))
    if model.params:
        facts.append(json_text(model.params))
    lines = []
    for section in new:
        text = "\n".join(section.body)
        # After the first request, the earlier steps have shown these in full.
        lines.append(f"{section.title}: {_one_line(text) if stop.index else _cut(text)}")
    yield str(Section(f"request {stop.index + 1}: {', '.join(facts)}", lines))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ONE_LINE else line[:ONE_LINE] + "…"


def _cut(text: str) -> str:
    if len(text) <= CUT:
        return text
    return f"{text[:CUT]}\n… {len(text) - CUT:,} more characters; m shows all of it"
