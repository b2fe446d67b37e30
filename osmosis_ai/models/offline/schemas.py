"""Make the smallest arguments that a tool's JSON Schema allows.

It never raises: if it can't satisfy a schema, the tool refuses the call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any

from osmosis_ai.records import JsonObject, JsonValue

__all__ = ["smallest_arguments"]

# Bounds for schemas of remote servers: references may be circular, and nested unions multiply.
_MAX_LOOKS = 60  # schemas looked at for one value
_MAX_DEPTH = 8
_MAX_VALUES = 500
_LARGEST_TEXT = 10_000
_LARGEST_LIST = 100
"""A schema that demands more gets this much, and the tool refuses the call."""
_PATTERN_SECONDS = 0.05
"""How long one pattern is tried on samples: a remote server's may take minutes for forty characters."""
_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "http://example.com/",
    "url": "http://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "json-pointer": "/a",
    "byte": "YQ==",
    "binary": "a",
}
# Each keyword with its value if absent. `_number` unpacks them in this order.
_BOUNDS = {
    **dict.fromkeys(("minimum", "exclusiveMinimum"), -math.inf),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), math.inf),
    "multipleOf": 0.0,
}
# The type of a schema that names none.
_IMPLIED = {
    **dict.fromkeys(("properties", "required"), "object"),
    **dict.fromkeys(("items", "prefixItems"), "array"),
    **dict.fromkeys(_BOUNDS, "number"),
}
# Texts to try against a `pattern`: solving a regular expression isn't worth it for a stand-in.
_SAMPLES = ("a", "A", "1", "a1", "A1", "1a", "a-1", "A-1", "/a", "+1", *_FORMATS.values())


def smallest_arguments(schema: object) -> JsonObject:
    """Return arguments for a tool with these parameters: only the required ones, each as small as possible.

    Numbers are 1 and texts one character if allowed, because many tools refuse 0 and the empty text.
    """
    root = schema if isinstance(schema, dict) else {}
    options = list(_alternatives(root, root, [_MAX_LOOKS]))
    return _Filler(root).object(next((option for option in options if option), {}), 0)


class _Filler:
    """A generator of values for the schemas inside one tool's parameters, with local references resolved."""

    def __init__(self, root: JsonObject) -> None:
        self._root = root
        self._left = _MAX_VALUES

    def value(self, schema: object, depth: int, number: int = 0) -> Any:
        """Return the smallest value of a schema; for `number` above 0, a different one if possible."""
        options = list(_alternatives(schema, self._root, [_MAX_LOOKS]))
        # Null exercises nothing, but lets a recursive schema end.
        values = [option for option in options if _kind(option) != "null" or depth >= _MAX_DEPTH // 2]
        # The flattest alternative needs the fewest values.
        chosen = min(values or options or [{}], key=_nesting)
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            return None
        if "const" in chosen:
            return chosen["const"]
        if isinstance(chosen.get("enum"), list) and chosen["enum"]:
            return chosen["enum"][number % len(chosen["enum"])]
        given = [value for value in (*_list(chosen.get("examples")), chosen.get("default")) if value is not None]
        if given and number == 0:
            return given[0]
        make: dict[str, Callable[[], JsonValue]] = {
            "integer": lambda: _number(chosen, number, whole=True),
            "number": lambda: _number(chosen, number, whole=False),
            "string": lambda: _text(chosen, number),
            "boolean": lambda: bool(number % 2),
            "array": lambda: self.array(chosen, depth),
            "object": lambda: self.object(chosen, depth),
            "null": lambda: None,
        }
        return make.get(_kind(chosen), lambda: _text(chosen, number))()

    def object(self, schema: JsonObject, depth: int) -> JsonObject:
        """Return the required properties, and as many others as `minProperties` demands."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        lacking = max(0, _size(schema, "minProperties", 0) - len(names))
        names += [name for name in properties if name not in names][:lacking]
        return {name: self.value(properties.get(name, {}), depth + 1) for name in names}

    def array(self, schema: JsonObject, depth: int) -> list[JsonValue]:
        places = _list(schema.get("prefixItems"))
        least = min(_size(schema, "minItems", 0), _LARGEST_LIST)
        items = [self.value(place, depth + 1) for place in places[:least]]
        unique = schema.get("uniqueItems") is True
        while len(items) < least:
            items.append(self.value(schema.get("items"), depth + 1, len(items) if unique else 0))
        return items


def _alternatives(schema: object, root: JsonObject, budget: list[int]) -> Iterator[JsonObject]:
    """Yield the alternatives of a schema, as schemas without references and unions."""
    # A list, because all branches of the recursion share the budget.
    budget[0] -= 1
    if not isinstance(schema, dict) or budget[0] < 0:
        return
    if isinstance(schema.get("$ref"), str):
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        yield from _alternatives({**_target(schema["$ref"], root), **beside}, root, budget)
        return
    for key in ("anyOf", "oneOf"):
        if _list(schema.get(key)):
            beside = {name: value for name, value in schema.items() if name != key}
            for part in schema[key]:
                for option in _alternatives(part, root, budget):
                    yield from _alternatives(_merged(beside, option), root, budget)
            return
    if _list(schema.get("allOf")):
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            merged = _merged(merged, next(_alternatives(part, root, budget), {}))
        yield from _alternatives(merged, root, budget)
        return
    kinds = schema.get("type")
    if isinstance(kinds, list):
        for kind in kinds:
            yield {**schema, "type": kind}
        return
    yield schema


def _merged(one: JsonObject, other: JsonObject) -> JsonObject:
    both = {**one, **other}
    for key in ("properties", "required"):
        if key in one and key in other:
            parts = one[key], other[key]
            if all(isinstance(part, dict) for part in parts):
                both[key] = parts[0] | parts[1]
            elif all(isinstance(part, list) for part in parts):
                both[key] = parts[0] + parts[1]
    return both


def _target(reference: str, root: JsonObject) -> JsonObject:
    target: object = root
    for part in reference.split("/")[1:] if reference.startswith("#") else [reference]:
        part = part.replace("~1", "/").replace("~0", "~")
        target = target.get(part) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else {}


def _kind(schema: JsonObject) -> str:
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind
    return next((implied for key, implied in _IMPLIED.items() if key in schema), "")


def _nesting(schema: JsonObject) -> int:
    return {"object": 2, "array": 1, "null": -1}.get(_kind(schema), 0)


def _number(schema: JsonObject, number: int, *, whole: bool) -> float:
    low, above, high, below, step = (
        value if isinstance(value := schema.get(name), (int, float)) and not isinstance(value, bool) else otherwise
        for name, otherwise in _BOUNDS.items()
    )
    edges = [edge for edge in (max(low, above), min(high, below)) if math.isfinite(edge)]
    candidates: list[float] = [1, 0]
    for edge in edges:
        candidates += [edge, math.ceil(edge), math.floor(edge) + 1, math.floor(edge), math.ceil(edge) - 1]
    candidates += [sum(edges) / 2] if len(edges) == 2 else []
    candidates += [math.ceil(value / step) * step for value in candidates] if step else []

    def fits(value: float) -> bool:
        is_multiple = not step or math.isclose(value / step, round(value / step), abs_tol=1e-9)
        return low <= value <= high and above < value < below and is_multiple and not (whole and value % 1)

    value = next(filter(fits, candidates), 1) + number * (step or 1)
    return int(value) if float(value).is_integer() else value


def _text(schema: JsonObject, number: int) -> str:
    least = min(_size(schema, "minLength", 0), _LARGEST_TEXT)
    most = _size(schema, "maxLength", _LARGEST_TEXT)
    pattern, form = schema.get("pattern"), _FORMATS.get(str(schema.get("format")), "a")
    if isinstance(pattern, str):
        sizes = range(max(least, 1), min(max(least, 1) + 40, most + 1))
        samples = (form, *_SAMPLES, *(each * size for size in sizes for each in "aA01"))
        started = perf_counter()
        with suppress(re.error):
            for sample in samples:
                # JSON Schema doesn't anchor patterns.
                if least <= len(sample) <= most and re.search(pattern, sample):
                    return sample
                # A pattern that backtracks takes twice as long with each character or two.
                if perf_counter() - started > _PATTERN_SECONDS:
                    break
    text = form.ljust(least, "a")
    return (text + str(number) if number else text)[:most]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _size(schema: JsonObject, name: str, otherwise: int) -> int:
    value = schema.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
