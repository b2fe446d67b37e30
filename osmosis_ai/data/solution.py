"""Parse a row's reference solution and resolve its references to earlier results.

A solution is a list of steps. A step is a tool call, a list of tool calls that one reply makes together, or, as the
last step, the text of the answer:

    [
      [{"tool": "add", "arguments": {"a": 2, "b": 3}}, {"tool": "find", "arguments": {"name": "x"}}],
      {"tool": "multiply", "arguments": {"a": "{{result[0]}}", "b": "{{result[1].items[0].price}}"}},
      "#### {{result[2]}}"
    ]

`{{result[N]}}` is the result of call N; calls are numbered from 0 in the order written. A path selects part of a JSON
result: `.name` or `["name"]` in an object, `[0]` in a list (`[-1]` is its last item). A string that consists of one
reference becomes the value itself, with its type, unless the tool takes a string there; inside a longer text the value
is written out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from osmosis_ai.records import JsonValue, SolutionCall, SolutionStep
from osmosis_ai.wire_json import decode_json

__all__ = ["decode_result", "fill", "fill_text", "read_solution"]

_EXACT_FLOATS = 2.0**53
"""Largest magnitude below which floats represent every integer exactly."""

# Matches anything that begins like a reference, so that a typo raises an error instead of passing as text.
_REFERENCE = re.compile(r"\{\{\s*(results?\b[^{}]*)\}\}")
_FORM = re.compile(r"result\[(\d+)\]((?:\.\w+|\[(?:-?\d+|\"[^\"]*\"|'[^']*')\])*)\s*")
_PART = re.compile(r"\.(\w+)|\[(-?\d+)\]|\[[\"']([^\"']*)[\"']\]")
_WHOLE_NUMBER = re.compile(r"^(-?\d+)\.0$")
_JSON_LIST = re.compile(r"\s*\[\s*[\[{\"]")
"""The beginning of a list of steps. A worked solution in prose may begin with a bracket too, such as `[1]`."""


Result: TypeAlias = Callable[[int], object]
"""Returns the result of a call by its number, as in its tool message; None if there is none."""


class _Reference(NamedTuple):
    """The number of a result, and the path of keys into it."""

    number: int
    path: tuple[str | int, ...]


def read_solution(value: object) -> list[SolutionStep] | None:
    """Parse and check a row's solution; return None for other text, such as a worked solution in prose.

    The value is a list of steps, or its JSON text, as in CSV files. Raises ValueError, which names the wrong step,
    counted from 0, and what is expected.
    """
    if isinstance(value, str):
        if not _JSON_LIST.match(value):
            return None
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(value, list) or not value:
        raise ValueError("a list of steps is expected")
    steps: list[SolutionStep] = []
    made = 0
    for number, step in enumerate(value):
        try:
            if isinstance(step, str):
                if number != len(value) - 1:
                    raise ValueError("a text is the answer, so only the last step can be one")
                checked: SolutionStep = step
            else:
                checked = [_read_call(call) for call in (step if isinstance(step, list) else [step])]
                if not checked:
                    raise ValueError("an empty list, where tool calls are expected")
            # Before this step's calls are counted: they run together, so they can't refer to each other.
            _check_references(checked, made)
        except ValueError as error:
            raise ValueError(f"step {number}: {error}") from None
        made += 0 if isinstance(checked, str) else len(checked)
        steps.append(checked)
    return steps


def _read_call(call: object) -> SolutionCall:
    form = '{"tool": "name", "arguments": {…}}'
    if not isinstance(call, dict):
        raise ValueError(f"a tool call {form} or a text is expected, not {json.dumps(call)[:40]}")
    for name in sorted(call.keys() - {"tool", "arguments"}):
        raise ValueError(f"unknown key {name!r}; a tool call is {form}")
    tool, arguments = call.get("tool"), call.get("arguments", {})
    if not isinstance(tool, str) or not tool:
        raise ValueError(f"`tool` must be the name of a tool; a tool call is {form}")
    if not isinstance(arguments, dict):
        raise ValueError(f"`arguments` must be an object; a tool call is {form}")
    return SolutionCall(tool, arguments)


def _check_references(step: SolutionStep, made: int) -> None:
    for text in _texts([step] if isinstance(step, str) else [call.arguments for call in step]):
        for match in _REFERENCE.finditer(text):
            number = _parse(match).number
            if number >= made:
                before = f"the calls before it have the numbers 0 to {made - 1}" if made else "no call comes before it"
                raise ValueError(f"{match[0]} refers to a call that isn't made before this step: {before}")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _parse(match: re.Match[str]) -> _Reference:
    form = _FORM.fullmatch(match[1])
    if form is None:
        raise ValueError(f"{match[0]} isn't a reference; write {{{{result[0]}}}} or {{{{result[0].name[0]}}}}")
    path = [name or key if index == "" else int(index) for name, index, key in _PART.findall(form[2])]
    return _Reference(int(form[1]), tuple(path))


def decode_result(text: str) -> JsonValue:
    """Return a tool's result as a value: decoded if it is JSON, else the text. 42.0 becomes 42."""
    try:
        value: JsonValue = decode_json(text, parse_float=_number, parse_constant=_no_number)
    except ValueError:
        return text
    return value


def _number(text: str) -> float | int:
    value = float(text)
    # JSON allows 1e400, which no float holds; the result then remains text.
    if math.isinf(value):
        raise ValueError(text)
    return int(value) if value.is_integer() and abs(value) <= _EXACT_FLOATS else value


def _no_number(name: str) -> None:
    raise ValueError(name)


def fill(value: object, result: Result) -> object:
    """Replace each reference in a call's arguments, which `read_solution` has checked, by its value.

    Raises ValueError if there is no result or the path doesn't fit it; the message shows the reference.
    """
    if isinstance(value, dict):
        return {name: fill(inner, result) for name, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, result) for inner in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    return fill_text(value, result) if whole is None else _look_up(whole, result)


def fill_text(text: str, result: Result) -> str:
    """Write out each reference in a text as the tool wrote it, but 42.0 as 42 in a longer text; raises as `fill`."""

    def written(match: re.Match[str]) -> str:
        content = result(_parse(match).number)
        if _parse(match).path or not isinstance(content, str):
            return _as_text(_look_up(match, result))
        return content if match[0] == text else _WHOLE_NUMBER.sub(r"\1", content)

    return _REFERENCE.sub(written, text)


def _look_up(match: re.Match[str], result: Result) -> object:
    reference = _parse(match)
    content = result(reference.number)
    if content is None:
        raise ValueError(f"{match[0]}: the conversation has no result of this call")
    found = decode_result(content) if isinstance(content, str) else content
    for part in reference.path:
        inside = dict(enumerate(found)) if isinstance(found, list) else found
        # `inside` has a list's items under their numbers from 0 only.
        if isinstance(found, list) and isinstance(part, int) and part < 0:
            part += len(found)
        if not isinstance(inside, dict) or part not in inside:
            raise ValueError(f"{match[0]}: there is no {part!r} in the result: {_excerpt(content)}")
        found = inside[part]
    return found


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _excerpt(content: object) -> str:
    return " ".join(_as_text(content).split())[:200]
