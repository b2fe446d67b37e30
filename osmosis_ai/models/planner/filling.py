"""Arguments for a tool call: a value for every required parameter, and for optional ones that the prompt names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .evidence import Evidence
from .expressions import Number, finite, whole
from .schemas import MISSING, Path, Schema, cast, is_json, kind, named_list, options, within

__all__ = ["fill_arguments"]

_MAX_VALUES = 200
_MAX_DEPTH = 6
_MAX_ITEMS = 100
_LARGEST_TEXT = 10_000


def fill_arguments(
    schema: Schema, evidence: Evidence, fixed: Mapping[Path, Any] | None = None, attempt: int = 0
) -> dict[str, Any]:
    """Return arguments for a tool.

    Args:
        schema: The tool's parameters.
        evidence: What the values come from.
        fixed: Values that are settled, by path.
        attempt: With 1, numbers take the next type that is allowed too.
    """
    return _Filler(schema, evidence, dict(fixed or {}), attempt).object(schema, (), 0)


class _Filler:
    def __init__(self, root: Schema, evidence: Evidence, fixed: dict[Path, Any], attempt: int) -> None:
        self.root = root
        self.evidence = evidence
        self.fixed = fixed
        self.attempt = attempt
        self.budget = _MAX_VALUES

    def object(self, schema: Schema, path: Path, depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = named_list(schema.get("required"))
        wanted = [*required, *(name for name in properties if isinstance(name, str) and name not in required)]
        values: dict[str, Any] = {}
        # Who takes first: what the prompt names, then what is required, then the rest.
        for name in sorted(wanted[:_MAX_VALUES], key=lambda name: not (_is_letter(name) or self.evidence.names(name))):
            here = (*path, name)
            must = name in required or any(settled[: len(here)] == here for settled in self.fixed)
            value = self.value(options(properties.get(name), self.root), here, must, depth + 1)
            if value is not MISSING:
                values[name] = value
        return {name: values[name] for name in [*properties, *required] if name in values}

    def value(self, choices: list[Schema], path: Path, must: bool, depth: int) -> Any:
        if path in self.fixed:
            return self.fixed[path]
        self.budget -= 1
        if self.budget < 0 or depth > _MAX_DEPTH:
            return None if must else MISSING
        for choice in choices:
            found = self.offered(choice, path, must, depth)
            if found is not MISSING:
                return found
        if not must:
            return MISSING
        default = next((choice["default"] for choice in choices if "default" in choice), MISSING)
        if default is not MISSING and is_json(default):
            return default
        return self.invented(choices[0])

    def offered(self, schema: Schema, path: Path, must: bool, depth: int) -> Any:
        """A value that the prompt or an earlier result offers, or MISSING."""
        name, what = path[-1], kind(schema)
        if "const" in schema:
            return schema["const"] if must and is_json(schema["const"]) else MISSING
        if isinstance(schema.get("enum"), list):
            values = [value for value in schema["enum"] if is_json(value)]
            return next(iter(self.evidence.mentioned(values)), MISSING)
        if name in self.evidence.known and self.agrees(self.evidence.known[name], what):
            return self.evidence.known[name]
        if what == "boolean":
            flag = self.evidence.flag(name)
            return MISSING if flag is None else flag
        if what in {"integer", "number", "any"}:
            found = self.evidence.number(
                name,
                lambda value: (what != "integer" or isinstance(whole(value), int)) and within(whole(value), schema),
                explicit=not must or "default" in schema,
            )
            if found is not None:
                typed = cast(found, [schema], self.attempt)
                return typed if typed is not MISSING else cast(found, [schema])
        if what in {"string", "any"}:
            form = schema.get("format")
            text = self.evidence.string(
                name,
                form if isinstance(form, str) else "",
                lambda text: _fits(text, name, schema),
                explicit=not must or "default" in schema,
            )
            return MISSING if text is None else text
        if what == "object":
            settled = any(fixed[: len(path)] == path for fixed in self.fixed)
            return self.object(schema, path, depth) if must or settled else MISSING
        if what == "array":
            return self.array(schema, path, depth) if must else MISSING
        return MISSING

    def array(self, schema: Schema, path: Path, depth: int) -> list[Any]:
        least = _size(schema.get("minItems"), 0)
        most = _size(schema.get("maxItems"), _MAX_ITEMS)
        places = schema.get("prefixItems")
        if isinstance(places, list) and places:
            return [self.value(options(place, self.root), (*path, ""), True, depth + 1) for place in places[:most]]
        choices = options(schema.get("items"), self.root)
        what = kind(choices[0])
        items: list[Any]
        if isinstance(choices[0].get("enum"), list):
            items = self.evidence.mentioned([value for value in choices[0]["enum"] if is_json(value)])
        elif what in {"integer", "number"}:
            items = [item for item in (cast(value, choices) for value in self.numbers()) if item is not MISSING]
        elif what in {"string", "any"}:
            items = [*self.evidence.all_strings()]
            if what == "any" and not items:
                items = [*self.numbers()]
        else:
            items = []
        if schema.get("uniqueItems") is True:
            items = [item for position, item in enumerate(items) if item not in items[:position]]
        if not items:
            least = max(least, 1 if what == "object" else 0)
        while len(items) < min(least, most):
            items.append(self.value(choices, (*path, ""), True, depth + 1))
        return items[:most]

    def numbers(self) -> list[Number]:
        return [whole(value) for value in self.evidence.all_numbers()]

    def agrees(self, value: Any, what: str) -> bool:
        """Whether a value from an earlier result has a parameter's type."""
        if what == "string":
            return isinstance(value, str)
        if what in {"integer", "number"}:
            return finite(value) and (what == "number" or isinstance(value, int))
        return what == "any" or (what == "boolean" and isinstance(value, bool))

    def invented(self, schema: Schema) -> Any:
        """The smallest value a schema allows, for what nothing is known about."""
        allowed = schema.get("enum")
        if isinstance(allowed, list):
            return next((value for value in allowed if is_json(value)), None)
        what = kind(schema)
        if what in {"integer", "number"}:
            candidates: list[Any] = [1, 0, schema.get("minimum"), schema.get("maximum"), schema.get("multipleOf")]
            low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
            candidates += [low + 1] if finite(low) and low is not None else []
            candidates += [high - 1] if finite(high) and high is not None else []
            numbers = [whole(value) for value in candidates if finite(value)]
            fitting = [value for value in numbers if within(value, schema)]
            return next((value for value in fitting if what == "number" or isinstance(value, int)), 1)
        if what == "string":
            return "x" * min(_size(schema.get("minLength"), 0), _LARGEST_TEXT)
        return {"boolean": False, "array": [], "object": {}}.get(what)


def _is_letter(name: str) -> bool:
    return name.lower() in {"char", "character", "letter"}


def _fits(text: str, name: str, schema: Schema) -> bool:
    if _is_letter(name):
        return len(text) == 1
    return _size(schema.get("minLength"), 0) <= len(text) <= _size(schema.get("maxLength"), _LARGEST_TEXT)


def _size(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
