"""`tools_as_expected`: score a rollout's tool calls by its row's `expect`.

    {"expect": {"must": ["search", {"tool": "price", "arguments": {"item": "bread*"}}],
                "may": ["convert"], "must_not": ["delete"],
                "in_order": true, "max_calls": 4, "no_errors": true}}

A row with `may` allows no tools but those of `must` and `may`. Patterns of arguments name only what matters; in their
texts `*` and `?` stand for any characters.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from osmosis_ai.conversation import call_name
from osmosis_ai.records import FunctionRef, Message
from osmosis_ai.reward_fn.explaining import explain
from osmosis_ai.wire_json import decode_json

__all__ = [
    "COLUMN",
    "EXPECTED",
    "ExpectedCall",
    "expected_calls",
    "expected_ref",
    "expects_tools",
    "read_expect",
    "tools_as_expected",
]

COLUMN = "expect"
EXPECTED = "tools_as_expected"
VERSION = f"{EXPECTED} 1"
"""Stands for the function's code in the store; raise it when the function scores differently."""

_LISTS = ("must", "may", "must_not")
_SWITCHES = ("in_order", "no_errors")
_KEYS = (*_LISTS, *_SWITCHES, "max_calls")


class ExpectedCall(NamedTuple):
    """A tool call: as a row expects it, or as it was made. Without arguments, any will do."""

    tool: str
    arguments: Any = None
    failed: bool = False

    def __str__(self) -> str:
        return self.tool if self.arguments is None else f"{self.tool} {json.dumps(self.arguments, ensure_ascii=False)}"

    def matches(self, call: ExpectedCall) -> bool:
        """Return True if a call is as expected."""
        return self.tool == call.tool and (self.arguments is None or _matches(self.arguments, call.arguments))


def expected_ref(root: str) -> FunctionRef:
    """Return the function as scorers load it."""
    return FunctionRef(EXPECTED, __name__, EXPECTED, root, content=VERSION)


def expects_tools(columns: Mapping[str, Any]) -> bool:
    """Return True if a row's `expect` is about tools. Another column of that name is a column like any other."""
    value = _decoded(columns.get(COLUMN))
    return isinstance(value, dict) and any(name in value for name in _KEYS)


def read_expect(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's `expect`, empty if it isn't about tools.

    Raises:
        ValueError: It isn't as described in docs/testing.md.
    """
    if expects_tools(columns):
        return _checked(_decoded(columns[COLUMN]))
    value = _decoded(columns.get(COLUMN))
    if isinstance(value, str) and value.lstrip().startswith("{") and any(f'"{name}"' in value for name in _KEYS):
        raise ValueError(f"the column {COLUMN} isn't JSON")
    if isinstance(value, dict):
        for name in value:
            # Not a column of another kind, but a misspelled one of this.
            if difflib.get_close_matches(name, _KEYS, n=1, cutoff=0.75):
                raise ValueError(_unknown(name))
    return {}


def expected_calls(expect: Mapping[str, Any], name: str) -> list[ExpectedCall]:
    """Return the calls in one list of an `expect` that has been read."""
    return [_read(item) for item in expect.get(name) or []]


def tools_as_expected(messages: list[Message], ground_truth: str | None, metadata: dict[str, Any]) -> float:
    """Return 1.0 if the tool calls are as the row's `expect` says, else 0.0; a row without it expects nothing.

    Raises:
        ValueError: `expect` isn't as described in docs/testing.md.
    """
    if not expects_tools(metadata):
        return 1.0
    problems = list(_problems(read_expect(metadata), list(_calls(messages))))
    explain("; ".join(problems) or "the tool calls are as expected")
    return 0.0 if problems else 1.0


def _problems(expected: Mapping[str, Any], calls: list[ExpectedCall]) -> Iterator[str]:
    must, may, must_not = (expected_calls(expected, name) for name in _LISTS)
    left = list(calls)
    place = 0
    for wanted in must:
        rest = left[place:] if expected.get("in_order") else left
        found = next((call for call in rest if wanted.matches(call)), None)
        if found is None:
            late = expected.get("in_order") and any(map(wanted.matches, calls))
            alike = [str(call) for call in calls if call.tool == wanted.tool]
            instead = f", only {', '.join(alike)}" if alike and not late else ""
            yield f"{wanted} was called out of order" if late else f"{wanted} was not called{instead}"
        elif expected.get("in_order"):
            # By identity, because a rollout may make the same call twice.
            place = next(index for index, call in enumerate(left) if index >= place and call is found) + 1
        else:
            # A call fulfils one expectation only.
            left.remove(found)
    for call in calls:
        if any(wanted.matches(call) for wanted in must_not):
            yield f"{call} must not be called"
        elif "may" in expected and not any(wanted.matches(call) for wanted in (*must, *may)):
            yield f"{call} is not among the tools it may call"
        if expected.get("no_errors") and call.failed:
            yield f"{call} failed"
    most = expected.get("max_calls")
    if most is not None and len(calls) > most:
        yield f"{len(calls)} calls, at most {most} expected"


def _calls(messages: list[Message]) -> Iterator[ExpectedCall]:
    """Yield the conversation's tool calls in order."""
    for index, message in enumerate(messages):
        results = {}
        for later in messages[index + 1 :]:
            # Only the results right after this reply, because models reuse ids in later turns.
            if later.get("role") != "tool":
                break
            results[later.get("tool_call_id")] = str(later.get("content"))
        for call in message.get("tool_calls") or ():
            text = (call.get("function") or {}).get("arguments")
            try:
                arguments = decode_json(text) if isinstance(text, str) and text.strip() else text or {}
            except ValueError:
                arguments = text
            # A failed call's result begins with the word, as the model sees it.
            failed = results.get(call.get("id"), "").lower().startswith("error")
            yield ExpectedCall(call_name(call), arguments, failed)


def _matches(pattern: Any, value: Any) -> bool:
    if isinstance(pattern, str):
        if isinstance(value, str) and fnmatch.fnmatchcase(value, pattern):
            return True
        # A lone `*` stands for any value, not just for text.
        return pattern == "*" or pattern == value
    if isinstance(pattern, dict):
        return isinstance(value, dict) and all(
            name in value and _matches(part, value[name]) for name, part in pattern.items()
        )
    if isinstance(pattern, list):
        alike = isinstance(value, list) and len(pattern) == len(value)
        return alike and all(_matches(part, item) for part, item in zip(pattern, value, strict=True))
    # JSON's true isn't the number 1, although Python's True is.
    return bool(pattern == value) and isinstance(pattern, bool) == isinstance(value, bool)


def _decoded(value: Any) -> Any:
    """Decode the text of a CSV or Parquet file, if it is JSON."""
    try:
        return decode_json(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    except ValueError:
        return value


def _checked(expected: dict[str, Any]) -> dict[str, Any]:
    for name, value in expected.items():
        if name not in _KEYS:
            raise ValueError(_unknown(name))
        if name in _LISTS and not (isinstance(value, list) and all(_is_call(item) for item in value)):
            raise ValueError(f"{COLUMN}.{name} must be a list of tools or of {{'tool': …, 'arguments': …}}")
        if name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{COLUMN}.{name} must be true or false")
        if name == "max_calls" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"{COLUMN}.{name} must be a number of calls")
    return expected


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _KEYS, n=1)
    rest = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_KEYS)}"
    return f"the column {COLUMN} has the unknown key {name!r}; {rest}"


def _is_call(item: Any) -> bool:
    if isinstance(item, dict):
        return isinstance(item.get("tool"), str) and not item.keys() - {"tool", "arguments"}
    return isinstance(item, str)


def _read(item: Any) -> ExpectedCall:
    return ExpectedCall(item) if isinstance(item, str) else ExpectedCall(item["tool"], item.get("arguments"))
