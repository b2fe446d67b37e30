"""Reading JSON Schemas as tools give them: references, unions, nested objects, bounds. No schema makes it fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from .expressions import Number, finite, format_number, whole

__all__ = ["MISSING", "Leaf", "Path", "Schema", "cast", "is_json", "kind", "leaves", "named_list", "options", "within"]

Schema: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str, ...]

MISSING: Any = object()
"""Stands for "no value", where None is one."""

_MAX_LOOKS = 60  # schemas looked at for one parameter
_MAX_LEAVES = 64
_MAX_DEPTH = 6
_KINDS = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})


@dataclass(frozen=True)
class Leaf:
    """One value of a tool's arguments, however deep it lies. `required` counts the objects around it too."""

    path: Path
    options: tuple[Schema, ...]
    required: bool

    @property
    def name(self) -> str:
        return self.path[-1]


def named_list(value: object) -> list[str]:
    """Return the strings of a list, and an empty list for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def is_json(value: object) -> bool:
    """Whether a value from a schema can be written as standard JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def kind(schema: Schema) -> str:
    """Return the JSON type of a schema without unions, or `any`."""
    declared = schema.get("type")
    if isinstance(declared, str) and declared in _KINDS:
        return declared
    if isinstance(schema.get("properties"), dict):
        return "object"
    if isinstance(schema.get("items"), dict) or isinstance(schema.get("prefixItems"), list):
        return "array"
    return "any"


def options(schema: object, root: Schema) -> list[Schema]:
    """Return the alternatives a schema allows, without references, unions and null (unless it allows nothing else).

    Args:
        schema: Any value found where a schema belongs.
        root: The schema that local references (`#/$defs/…`) are resolved in.
    """
    return list(_alternatives(schema, root, [_MAX_LOOKS]))[:8] or [{"type": "null"}]


def _alternatives(schema: object, root: Schema, budget: list[int]) -> Iterator[Schema]:
    budget[0] -= 1
    if not isinstance(schema, dict) or budget[0] < 0:
        yield {}
        return
    reference = schema.get("$ref")
    if isinstance(reference, str):
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        yield from _alternatives({**_target(reference, root), **beside}, root, budget)
        return
    for key in ("anyOf", "oneOf"):
        union = schema.get(key)
        if isinstance(union, list) and union:
            beside = {name: value for name, value in schema.items() if name != key}
            for part in union[:8]:
                for option in _alternatives(part, root, budget):
                    yield from _alternatives({**beside, **option}, root, budget)
            return
    if isinstance(schema.get("allOf"), list):
        yield from _alternatives(_merged(schema, root, budget), root, budget)
        return
    declared = schema.get("type")
    if isinstance(declared, list):
        for name in named_list(declared)[:8]:
            if name != "null":
                yield {**schema, "type": name}
        return
    if kind(schema) != "null":
        yield schema


def _merged(schema: Schema, root: Schema, budget: list[int]) -> Schema:
    merged = {key: value for key, value in schema.items() if key != "allOf"}
    for part in schema["allOf"][:8]:
        option = next(_alternatives(part, root, budget), {})
        properties = {**_mapping(merged.get("properties")), **_mapping(option.get("properties"))}
        required = named_list(merged.get("required")) + named_list(option.get("required"))
        merged = {**option, **merged}
        if properties:
            merged |= {"properties": properties, "required": required}
    return merged


def _target(reference: str, root: Schema) -> Schema:
    target: Any = root
    if not reference.startswith("#"):
        return {}
    for part in reference[1:].split("/")[1:10]:
        part = part.replace("~1", "/").replace("~0", "~")
        target = target.get(part) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else {}


def _mapping(value: object) -> dict[str, Any]:
    return {key: item for key, item in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}


def leaves(schema: Schema) -> list[Leaf]:
    """Return every value a tool's arguments hold, in the order of the schema; arrays are one value."""
    found: list[Leaf] = []
    _collect(schema, schema, (), True, found)
    return found


def _collect(schema: Schema, root: Schema, path: Path, required: bool, found: list[Leaf]) -> None:
    needed = named_list(schema.get("required"))
    for name, value in _mapping(schema.get("properties")).items():
        if len(found) >= _MAX_LEAVES:
            return
        choices = options(value, root)
        here, must = (*path, name), required and name in needed
        nested = next((choice for choice in choices if kind(choice) == "object" and choice.get("properties")), None)
        if nested is not None and len(path) < _MAX_DEPTH:
            _collect(nested, root, here, must, found)
        else:
            found.append(Leaf(here, tuple(choices), must))


def within(value: Number, schema: Schema) -> bool:
    """Whether a number keeps to a schema's bounds."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    step = schema.get("multipleOf")
    if (finite(low) and value < low) or (finite(high) and value > high):
        return False
    if (finite(above) and value <= above) or (finite(below) and value >= below):
        return False
    return not (isinstance(step, int) and finite(step) and step > 0 and value % step != 0)


def cast(value: Number, choices: tuple[Schema, ...] | list[Schema], attempt: int = 0) -> Any:
    """Return a number as one of the types a parameter allows, or MISSING.

    Args:
        value: A finite number.
        choices: The parameter's alternatives.
        attempt: 0 for the natural type, 1 for the next one that is allowed too.
    """
    value = whole(value)
    natural: list[Any] = []
    texts: list[Any] = []
    for choice in choices:
        allowed = choice.get("enum")
        if isinstance(allowed, list):
            natural += [item for item in allowed if finite(item) and item == value]
            continue
        what = kind(choice)
        if what in {"integer", "number", "any"} and not within(value, choice):
            continue
        if what == "integer" and isinstance(value, int):
            natural.append(value)
        elif what in {"number", "any"}:
            natural += [value, float(value)]
        if what in {"string", "any"}:
            texts.append(format_number(value))
    found = {json.dumps(item): item for item in natural + texts}
    return list(found.values())[attempt] if attempt < len(found) else MISSING
