"""A conversation as the planner reads it: what is asked, what was called, and what came back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from osmosis_ai.records import Message

from .expressions import Number, finite, whole
from .parsing import parse_number

__all__ = ["Call", "Conversation", "call_key", "is_error", "number_in", "read_conversation", "scalars_in", "text_in"]

_MAX_TEXT = 8000  # of a prompt: the first three quarters and the last one
_MAX_RESULT = 20_000
_RESULT_KEYS = ("result", "answer", "value", "output", "total", "sum", "data", "content", "text")
_NUMBER = r"[-−]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)"
_STATED = re.compile(rf"(?:=|:|→|\bis|\bequals|\bare|\breturns|\bgives)\s*(?:now\s+|about\s+)?[$€£]?({_NUMBER})")
_ANY_NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}")
_ERROR = re.compile(
    r"\W{0,3}(?:error\b|(?:\w{1,40} ){1,3}error\s*:|\w{1,60}Error:|[0-9]+ validation errors?\b|exception\b|traceback\b"
    r"|failed\b|invalid\b|unknown tool\b|cannot\b|can't\b|unable\b)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Call:
    """One tool call that was made, and the text that came back; `result` is None if nothing did."""

    name: str
    arguments: dict[str, Any]
    result: str | None

    @property
    def failed(self) -> bool:
        return self.result is None or is_error(self.result)


@dataclass
class Conversation:
    """The last question of a conversation, and what was done about it since.

    `calls` holds the calls of each `call_key`, in their order; `turns` counts replies to the question, and
    `replies` those of the whole conversation. `ids` are the tool call ids in use.
    """

    system: str = ""
    prompt: str = ""
    calls: dict[str, list[Call]] = field(default_factory=dict)
    turns: int = 0
    replies: int = 0
    ids: set[str] = field(default_factory=set)


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """Return what identifies a call: its tool and its arguments."""
    return f"{name}\n{json.dumps(arguments, sort_keys=True)}"


def read_conversation(messages: Sequence[Any]) -> Conversation:
    """Read messages of any shape; what isn't as expected is passed over."""
    found = Conversation()
    system: list[str] = []
    made: list[tuple[str, str, dict[str, Any]]] = []
    results: dict[str, str] = {}
    for message in messages:
        if not isinstance(message, dict):
            continue
        role, text = str(message.get("role")), _text_of(message.get("content"))
        if role in {"system", "developer"}:
            system.append(text)
        elif role == "user":
            found.prompt, found.turns = text, 0
            made, results = [], {}
        elif role == "assistant":
            found.turns += 1
            found.replies += 1
            calls = _calls_of(message)
            made += calls
            found.ids.update(identity for identity, _, _ in calls)
        elif role == "tool":
            results[str(message.get("tool_call_id"))] = text
    found.system = _cut("\n".join(system))
    found.prompt = _cut(found.prompt)
    for identity, name, arguments in made:
        call = Call(name, arguments, results.get(identity))
        found.calls.setdefault(call_key(name, arguments), []).append(call)
    return found


def _calls_of(message: Message) -> list[tuple[str, str, dict[str, Any]]]:
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(arguments)
        if isinstance(arguments, dict):
            found.append((str(call.get("id")), str(function.get("name")), arguments))
    return found


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "\n".join(part for part in parts if isinstance(part, str))
    # A lone surrogate can't be written as UTF-8, and would come back out in an argument.
    return content.encode("utf-8", "replace").decode("utf-8") if isinstance(content, str) else ""


def _cut(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[: _MAX_TEXT * 3 // 4]}\n{text[-_MAX_TEXT // 4 :]}"


def _from_json(text: str) -> Any:
    if len(text) > _MAX_RESULT:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def is_error(text: str) -> bool:
    """Whether a tool result reports an error: it begins with one, or is an object that says so."""
    value = _from_json(text)
    if isinstance(value, dict):
        status = value.get("status")
        bad_status = isinstance(status, str) and status.lower() in {"error", "failed", "failure"}
        return bool(value.get("error") or value.get("isError")) or bad_status or value.get("success") is False
    said = value if isinstance(value, str) else text.strip() if value is None else ""
    return _ERROR.match(said) is not None


def number_in(text: str, arguments: Mapping[str, Any]) -> Number | None:
    """Return the number a tool result states, or None.

    Args:
        text: A plain number, JSON such as `{"result": 5}`, or a sentence such as `The sum is 5`.
        arguments: What the tool was called with: a sentence often repeats it.
    """
    value = _from_json(text)
    if value is not None:
        return _number_of(value, arguments, 0)
    plain = parse_number(text)
    return whole(plain) if plain is not None else _stated_number(text, arguments)


def _number_of(value: Any, arguments: Mapping[str, Any], depth: int) -> Number | None:
    if finite(value):
        return whole(value)
    if depth > 5:
        return None
    if isinstance(value, str):
        plain = parse_number(value)
        return whole(plain) if plain is not None else _stated_number(value, arguments)
    if isinstance(value, list):
        return _number_of(value[0], arguments, depth + 1) if len(value) == 1 else None
    if isinstance(value, dict):
        for key in _RESULT_KEYS:
            if key in value:
                return _number_of(value[key], arguments, depth + 1)
        numbers = [item for key, item in value.items() if finite(item) and key not in arguments]
        if numbers:
            return whole(numbers[-1])
    return None


def _stated_number(text: str, arguments: Mapping[str, Any]) -> Number | None:
    text = text[:_MAX_RESULT]
    stated = [parse_number(match) for match in _STATED.findall(text)]
    if stated and stated[-1] is not None:
        return whole(stated[-1])
    given = {repr(whole(value)) for value in _numbers_given(arguments, 0)}
    numbers = [value for value in map(parse_number, _ANY_NUMBER.findall(text)) if value is not None]
    new = [value for value in numbers if repr(whole(value)) not in given]
    return whole((new or numbers)[-1]) if numbers else None


def _numbers_given(value: Any, depth: int) -> list[Number]:
    if finite(value):
        return [value]
    if depth > 5 or not isinstance(value, list | Mapping):
        return []
    inner = value if isinstance(value, list) else list(value.values())
    return [number for item in inner for number in _numbers_given(item, depth + 1)]


def text_in(text: str) -> str:
    """Return what a tool result says as text: the value of `{"result": …}` and the like, else the text itself."""
    value = _from_json(text)
    if isinstance(value, dict):
        for key in _RESULT_KEYS:
            if isinstance(value.get(key), str):
                return str(value[key])
        if len(value) == 1:
            value = next(iter(value.values()))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else text.strip()


def scalars_in(text: str) -> dict[str, Any]:
    """Return the named strings and numbers of a tool result that is a JSON object, such as `session_id`."""
    value = _from_json(text)
    if not isinstance(value, dict):
        return {}
    return {key: item for key, item in value.items() if finite(item) or (isinstance(item, str) and len(item) <= 500)}
