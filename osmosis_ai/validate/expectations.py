"""Check the column `expect` of a dataset: tools that aren't there, and what no rollout can meet."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from osmosis_ai.records import Row, Tool
from osmosis_ai.reward_fn.expected import COLUMN, ExpectedCall, expected_calls, read_expect

__all__ = ["KnownTools", "Problem", "known_tools", "problems_with"]

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}

KnownTools = Mapping[str, Mapping[str, Any] | None]
"""The repository's tools by name, with the schemas of their parameters; None for one that is only read from source."""


class Problem(NamedTuple):
    """A problem with a row's `expect`, with the code of its finding."""

    code: str
    message: str
    hint: str = ""


def known_tools(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any] | None]:
    """Return the tools as the model sees them."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: (function.get("parameters") or {}).get("properties") for function in functions}


def problems_with(row: Row, tools: KnownTools) -> Iterator[Problem]:
    """Yield the problems with a row's `expect`. Without any known tools, names aren't checked."""
    try:
        expect = read_expect(row.extra)
    except ValueError as error:
        yield Problem("OSM412", str(error), "See docs/testing.md; a rollout of this row gets no score.")
        return
    lists = {name: expected_calls(expect, name) for name in ("must", "may", "must_not")}
    for name, calls in lists.items():
        for call in calls:
            yield from _problems_with_call(f"{COLUMN}.{name}", call, tools)
    for call in lists["must"]:
        if any(other.matches(call) for other in lists["must_not"]):
            yield Problem("OSM414", f"{call} must be called and must not")
    for call in lists["may"]:
        if any(other.matches(call) for other in lists["must_not"]):
            yield Problem("OSM414", f"{call} may be called and must not")
    most = expect.get("max_calls")
    if most is not None and most < len(lists["must"]):
        yield Problem("OSM414", f"{len(lists['must'])} calls must be made, but at most {most} may (max_calls)")


def _problems_with_call(place: str, call: ExpectedCall, tools: KnownTools) -> Iterator[Problem]:
    if tools and call.tool not in tools:
        yield Problem("OSM413", f"{place}: there is no tool {call.tool!r}{_near(call.tool, tools)}")
        return
    if call.arguments is not None and not isinstance(call.arguments, dict):
        yield Problem("OSM414", f"{place}: {call}: no call has such arguments; they are an object")
        return
    parameters = tools.get(call.tool)
    if parameters is None:
        return
    for name, pattern in (call.arguments or {}).items():
        if name not in parameters:
            yield Problem("OSM414", f"{place}: {call.tool} has no parameter {name!r}{_near(name, parameters)}")
        elif not _can_match(pattern, parameters[name]):
            kind = parameters[name]["type"]
            yield Problem("OSM414", f"{place}: {call.tool}: {name} is of type {kind}, which never matches {pattern!r}")


def _can_match(pattern: Any, schema: Any) -> bool:
    """Return False if no value of a parameter's type is like the pattern."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    # A list of types, or none, rules nothing out.
    if pattern == "*" or not isinstance(kind, str) or kind not in _JSON_TYPES:
        return True
    # In Python, True is an int, which would match a number.
    if isinstance(pattern, bool):
        return kind == "boolean"
    # An integer may be written as 2.0.
    return isinstance(pattern, _JSON_TYPES[kind]) or (kind == "integer" and isinstance(pattern, float))


def _near(name: str, names: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(names)[:20]) or 'none'}"
