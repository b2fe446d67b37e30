"""Compare a request with recorded ones: find the nearest, and say in a line what is different."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from osmosis_ai.records import JsonObject, Message, Tool

__all__ = ["Rendered", "first_difference", "miss_message"]

SHOWN = 80
"""Characters to show of each side of a difference."""
BEFORE = 20
"""How many of them precede the first different one."""


MARK = re.compile(r"<NAME_([0-9a-f]{16})>")
"""Where `reward_rubric.prompt` tells a judge the mark of its request."""


class Rendered(NamedTuple):
    """A request as the model gets it, and the attempt that makes it."""

    model: str
    attempt: int
    messages: list[Message]
    tools: list[Tool]
    params: JsonObject


def miss_message(request: Rendered, recorded: Sequence[Rendered], name: str) -> str:
    """Say how a request differs from the nearest recorded one in the file of this name."""
    request = _unmarked(request)
    same_model = [_unmarked(one) for one in recorded if one.model == request.model]
    if not same_model:
        models = ", ".join(sorted({one.model for one in recorded}))
        return f"no recording in {name} for {request.model}: " + (f"it has {models}" if models else "it is empty")
    nearest = max(same_model, key=lambda one: _nearness(request, one))
    attempts = sorted({one.attempt for one in same_model if _alike(one, request)})
    if attempts:
        known = ", ".join(map(str, attempts))
        return f"no recording in {name}: attempt {request.attempt} of this request isn't recorded, only {known}"
    return f"no recording in {name}: {first_difference(nearest, request)}"


def first_difference(recorded: Rendered, now: Rendered) -> str:
    """Name the first difference of two requests to one model: messages, tools, or parameters."""
    for index, (before, after) in enumerate(zip(recorded.messages, now.messages, strict=False)):
        if before != after:
            return _difference(f"messages[{index}]", before, after)
    if recorded.tools != now.tools:
        return f"tools differ: {_tools_difference(recorded.tools, now.tools)}"
    for name in sorted(recorded.params.keys() | now.params.keys()):
        if recorded.params.get(name) != now.params.get(name):
            return _difference(f"parameter {name}", recorded.params.get(name), now.params.get(name))
    count = len(recorded.messages)
    if len(now.messages) > count:
        return f"messages[{count}] is new: {_cut(now.messages[count], 0)}"
    if len(now.messages) < count:
        return f"messages[{len(now.messages)}] is missing: recorded {_cut(recorded.messages[len(now.messages)], 0)}"
    return f"it was another attempt or a repeated request (attempt {now.attempt})"


def _unmarked(request: Rendered) -> Rendered:
    """Return a judge's request without the mark around its texts, which changes throughout when one text does."""
    content = json.dumps(request.messages)
    mark = MARK.search(content)
    return request if mark is None else request._replace(messages=json.loads(content.replace(mark[1], "")))


def _alike(one: Rendered, other: Rendered) -> bool:
    # All but the model and the attempt.
    return one[2:] == other[2:]


def _nearness(request: Rendered, one: Rendered) -> tuple[int, int, int, bool, bool]:
    pairs = zip(request.messages, one.messages, strict=False)
    same = _equal(pairs)
    longer = abs(len(request.messages) - len(one.messages))
    rest = request.messages[same : same + 1], one.messages[same : same + 1]
    alike = _common(*(json.dumps(part, sort_keys=True) for part in rest))
    # In order of weight: equal messages from the start, then length, then the first different message.
    return same, -longer, alike, request.tools == one.tools, request.params == one.params


def _equal(pairs: Iterable[tuple[Any, Any]]) -> int:
    """Return the number of equal pairs at the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _common(one: str, other: str) -> int:
    """Return the length of what two texts begin with."""
    return _equal(zip(one, other, strict=False))


def _difference(path: str, before: Any, after: Any) -> str:
    """Describe a difference of two JSON values at the innermost place that holds all of it."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        # The text of a message is what people see in it.
        if len(names) == 1 and names[0] in before and names[0] in after:
            inner = path if names[0] == "content" else f"{path}.{names[0]}"
            return _difference(inner, before[names[0]], after[names[0]])
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        places = [index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
        if len(places) == 1:
            return _difference(f"{path}[{places[0]}]", before[places[0]], after[places[0]])
    start = 0
    if isinstance(before, str) and isinstance(after, str):
        start = _common(before, after)
    return f"{path} differs: recorded {_cut(before, start)}, now {_cut(after, start)}"


def _tools_difference(before: list[Tool], after: list[Tool]) -> str:
    known, given = ({tool["function"]["name"]: tool["function"] for tool in tools} for tools in (before, after))
    changes = [f'"{name}" is gone' for name in known if name not in given]
    changes += [f'"{name}" is new' for name in given if name not in known]
    for name, function in given.items():
        old = known.get(name, function)
        parts = [part for part in {**old, **function} if old.get(part) != function.get(part)]
        changes += [f'{part} of "{name}"' for part in parts]
    return ", ".join(changes) or "their order"


def _cut(value: Any, start: int) -> str:
    """Show a value as JSON, texts from shortly before a position on."""
    if isinstance(value, str):
        first = max(0, start - BEFORE) if len(value) > SHOWN else 0
        part = value[first : first + SHOWN]
        shown = json.dumps(part, ensure_ascii=False)
        return f"{'…' if first else ''}{shown}{'…' if first + SHOWN < len(value) else ''}"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
