"""Parse tool calls and reasoning out of a reply's text, in the forms that models write.

The chat template shows the model how to write tool calls, so it also identifies the form. Anything malformed stays
text: the model should learn from the reward, not from a parser's guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from osmosis_ai.records import JsonObject, Message, Tool
from osmosis_ai.wire_json import decode_json

__all__ = ["FORMS", "Form", "form_of", "read_reply"]


class _Call(NamedTuple):
    name: str
    arguments: str


class Form(NamedTuple):
    """A form in which models write tool calls.

    Attributes:
        name: Its name as a value of `reply_form`.
        sign: Text that identifies it in a chat template.
        block: Matches a tool call in a reply; `read` gets its first group.
        read: Parses a call, given its text and the tools' parameter schemas by name; returns None if malformed.
    """

    name: str
    sign: str
    block: re.Pattern[str]
    read: Callable[[str, Mapping[str, JsonObject]], _Call | None]


def _json_call(text: str, _: Mapping[str, JsonObject]) -> _Call | None:
    try:
        found = decode_json(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, (dict, str)):
        return None
    return _Call(found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _tagged_call(name: re.Pattern[str], argument: re.Pattern[str]) -> Callable[..., _Call | None]:
    """Return a parser of calls with one tag per argument; the tool's schema tells the string `1` from the number."""

    def read(text: str, schemas: Mapping[str, JsonObject]) -> _Call | None:
        named = name.match(text)
        if named is None:
            return None
        properties = schemas.get(named[1], {}).get("properties", {})
        arguments = {found[1]: _typed(found[2], properties.get(found[1], {})) for found in argument.finditer(text)}
        return _Call(named[1], json.dumps(arguments, ensure_ascii=False))

    return read


def _typed(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return decode_json(text)
    except ValueError:
        return text


_TOOL_CALL = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
# Llama 3.1 may write this tag before a call.
_BARE_JSON = re.compile(r"\A\s*(?:<\|python_tag\|>)?(\{.*\})\s*\Z", re.DOTALL)
FORMS = {
    form.name: form
    for form in (
        Form(
            "function-tags",
            "<function=",
            _TOOL_CALL,
            _tagged_call(
                re.compile(r"<function=([^\n>]+)>"),
                re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
            ),
        ),
        Form(
            "argument-tags",
            "<arg_key>",
            _TOOL_CALL,
            _tagged_call(
                re.compile(r"([^\s<]+)"),
                re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
            ),
        ),
        Form("tool-call-json", "<tool_call>", _TOOL_CALL, _json_call),
        Form("bare-json", '"name": function name', _BARE_JSON, _json_call),
    )
}
"""Every form by name, the most specific first: the first whose sign is in a chat template is the model's."""

# The opening tag is optional, because many templates end the prompt with it.
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def form_of(template: str) -> Form | None:
    """Return the form of tool calls that a chat template shows, or None if it shows no known form."""
    return next((form for form in FORMS.values() if form.sign in template), None)


def read_reply(text: str, form: Form | None, tools: Sequence[Tool], position: int) -> Message:
    """Parse a reply into a message.

    Args:
        text: The reply, without its stop token.
        form: How the model writes tool calls; None to leave them as text.
        tools: The tools that the model may call; their schemas give the arguments' types.
        position: The number of messages before the reply, which makes the calls' ids unique.
    """
    message: Message = {"role": "assistant"}
    if thought := _THOUGHT.match(text):
        text = text[thought.end() :]
        if thought[1].strip():
            message["reasoning_content"] = thought[1].strip("\n")
    calls: list[JsonObject] = []
    if form is not None:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}

        def take(found: re.Match[str]) -> str:
            call = form.read(found[1], schemas)
            if call is None:
                return found[0]
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": f"call_{position}_{len(calls)}", "type": "function", "function": function})
            return ""

        text = form.block.sub(take, text)
    if calls:
        message["tool_calls"] = calls
    message["content"] = (text.strip() or None) if calls else text
    return message
