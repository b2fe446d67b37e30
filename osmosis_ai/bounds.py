"""Bounds on what comes from outside: a model, a tool, a worker process. Beyond them it is refused where it enters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, TypeAlias

import msgspec

__all__ = ["MAX_COUNT", "MAX_DEPTH", "Count", "count_of", "message_problem", "too_deep"]

MAX_COUNT = 10**12
"""Millions of them still add up to what SQLite can hold, and every JSON reader represents them exactly."""
MAX_DEPTH = 200
"""Levels of nesting in a value. Each level takes a frame of the C stack wherever it is encoded or decoded later."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""A number of things, checked wherever a record is decoded."""


def count_of(value: object) -> int:
    """Return a number of tokens that someone reported, or 0 if it can't be one (True is an `int`, too)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else 0


def message_problem(message: Mapping[str, object]) -> str | None:
    """Return what a message has that readers of trajectories can't handle, as `has …`; None if nothing."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, dict) for call in calls):
        return "has `tool_calls` that aren't a list of dicts"
    if not all(isinstance(call.get("function") or {}, dict) for call in calls):
        return "has a tool call whose `function` isn't a dict"
    return None


def too_deep(value: object) -> bool:
    """Return True if lists and dicts are nested more than `MAX_DEPTH` levels deep, or without an end."""
    # Not recursive, because deep values would exceed the recursion limit; depth first, to stop early in a cyclic value.
    path: list[Iterator[object]] = [iter((value,))]
    while path:
        for inner in path[-1]:
            if isinstance(inner, (dict, list, tuple)):
                path.append(iter(inner.values() if isinstance(inner, dict) else inner))
                break
        else:
            path.pop()
        if len(path) > MAX_DEPTH + 1:
            return True
    return False
