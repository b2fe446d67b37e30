"""The policy: the next assistant message, from the conversation and the tools alone.

It keeps no state. Every call reads the prompt again, follows the plan it makes of it through the tool results so far,
and either makes the calls that are next or answers.
"""

from __future__ import annotations

import json
import re
from typing import Any

from osmosis_ai.records import Message, Tool

from .answers import asks_for_form, decimals_asked, render
from .arithmetic import Evaluation, covers
from .conversation import Call, Conversation, call_key, number_in, read_conversation, scalars_in, text_in
from .evidence import Evidence
from .expressions import Node, format_number
from .filling import fill_arguments
from .matching import Skill, ToolSpec, find_skills, read_tools
from .parsing import find_expression
from .steps import Step, find_steps, names_tool
from .word_problems import guess_expression

__all__ = ["plan"]

_MAX_TURNS = 8
_MAX_SAME_CALLS = 2
_NO_ANSWER = "unknown"
_UNDEFINED = "undefined"
_SUBMIT_NAMES = frozenset({"submit", "finish", "final_answer", "finalanswer", "give_answer", "answer"})
_ASKS_NUMBER = re.compile(r"\bhow (?:many|much|long|far|often)\b|\b(?:number|value|count|total|score)\b", re.IGNORECASE)

_Calls = list[tuple[str, dict[str, Any]]]


def plan(messages: list[Message], tools: list[Tool]) -> Message:
    """Return the next assistant message: tool calls, or an answer. The same input gives the same message.

    Args:
        messages: The conversation so far. The last user message is the task.
        tools: The tools that may be called, as the model sees them.
    """
    conversation = read_conversation(messages)
    specs = read_tools(tools)
    skills = find_skills(specs)
    node = _expression(conversation.prompt, specs, skills)
    if node is not None:
        calls, answer = _work_out(node, specs, skills, conversation)
    else:
        calls, answer = _follow_steps(specs, conversation)
    if calls:
        return _calling(calls, conversation)
    return {"role": "assistant", "content": render(answer, conversation.system, conversation.prompt)}


def _expression(prompt: str, specs: list[ToolSpec], skills: list[Skill]) -> Node | None:
    """The arithmetic to work out; None if there is none, or if it is not what these tools are for."""
    node = find_expression(prompt)
    if node is not None:
        # Arithmetic tools that lack just this operation are no reason to call another tool instead.
        beyond = bool(skills) and not names_tool(prompt, specs)
        return node if not specs or covers(skills, node) or beyond else None
    able = {skill.tool.name for skill in skills}
    if names_tool(prompt, [spec for spec in specs if spec.name not in able]):
        return None
    node = guess_expression(prompt)
    return node if node is not None and (not specs or covers(skills, node)) else None


def _work_out(node: Node, specs: list[ToolSpec], skills: list[Skill], conversation: Conversation) -> tuple[_Calls, str]:
    evaluation = Evaluation(node, skills, conversation, may_call=conversation.turns < _MAX_TURNS)
    if evaluation.calls:
        return evaluation.calls, ""
    if evaluation.value is None:
        return [], _UNDEFINED
    decimals = decimals_asked(conversation.system, conversation.prompt)
    answer = format_number(evaluation.value, decimals)
    return _submission(answer, specs, conversation), answer


def _submission(answer: str, specs: list[ToolSpec], conversation: Conversation) -> _Calls:
    """The call that hands the answer in, where there is a tool for that and it was not called yet."""
    if conversation.turns >= _MAX_TURNS:
        return []
    for spec in specs:
        named = spec.name.lower() in _SUBMIT_NAMES or "submit" in spec.words
        if not named or len([leaf for leaf in spec.leaves if leaf.required]) != 1:
            continue
        arguments = fill_arguments(spec.schema, Evidence(answer, answer))
        if call_key(spec.name, arguments) not in conversation.calls:
            return [(spec.name, arguments)]
        return []
    return []


def _follow_steps(specs: list[ToolSpec], conversation: Conversation) -> tuple[_Calls, str]:
    """One call a turn, in the order of the prompt, because a later one may build on what an earlier one did."""
    last: Call | None = None
    known: dict[str, Any] = {}
    used: dict[str, int] = {}
    for step in find_steps(conversation.prompt, specs):
        for attempt in (0, 1):
            arguments = _arguments(step, conversation, last, known, attempt)
            key = call_key(step.tool.name, arguments)
            occurrence = used.get(key, 0)
            # The same call twice is what a prompt may ask for; as a second attempt it is pointless.
            if occurrence >= _MAX_SAME_CALLS or (attempt and occurrence):
                break
            used[key] = occurrence + 1
            made = conversation.calls.get(key, [])
            if len(made) <= occurrence:
                if conversation.turns < _MAX_TURNS:
                    return [(step.tool.name, arguments)], ""
                break
            call = made[occurrence]
            if not call.failed:
                last = call
                known |= scalars_in(call.result or "")
                break
    return [], _answer_from(last, conversation)


def _arguments(
    step: Step, conversation: Conversation, last: Call | None, known: dict[str, Any], attempt: int
) -> dict[str, Any]:
    previous = text_in(last.result)[:2000] if last is not None and last.result is not None else None
    evidence = Evidence(step.segment, conversation.prompt, previous, known, attempt)
    return fill_arguments(step.tool.schema, evidence, attempt=attempt)


def _answer_from(last: Call | None, conversation: Conversation) -> str:
    if last is None or last.result is None:
        return _NO_ANSWER
    if asks_for_form(conversation.system, conversation.prompt) and _ASKS_NUMBER.search(conversation.prompt):
        number = number_in(last.result, last.arguments)
        if number is not None:
            return format_number(number, decimals_asked(conversation.system, conversation.prompt))
    text = text_in(last.result)
    number = number_in(text, {}) if re.fullmatch(r"\s*[-+]?[0-9.,]+\s*", text) else None
    return format_number(number) if number is not None else text


def _calling(calls: _Calls, conversation: Conversation) -> Message:
    made: list[dict[str, Any]] = []
    for name, arguments in calls:
        identity = f"call_{conversation.replies}_{len(made)}"
        while identity in conversation.ids:
            identity += "x"
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        made.append({"id": identity, "type": "function", "function": function})
    return {"role": "assistant", "content": None, "tool_calls": made}
