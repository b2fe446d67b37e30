"""JSON Schema validators, each made once and kept to what is here: no reference is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

from osmosis_ai.records import JsonObject

__all__ = ["SchemaProblem", "SchemaValidators", "UnusableSchemaError"]


class SchemaProblem(Protocol):
    """One way in which a value doesn't fit a schema: a `jsonschema.ValidationError`.

    `validator` is the schema's keyword, `instance` the part of the value; `context` holds the problems of each
    alternative, for `anyOf` and `oneOf`.
    """

    message: str
    validator: str
    instance: object
    absolute_path: Iterable[str | int]
    context: Sequence[SchemaProblem]


class _Validator(Protocol):
    def iter_errors(self, instance: object) -> Iterator[SchemaProblem]: ...


class UnusableSchemaError(Exception):
    """The schema itself is at fault, so it says nothing about any value."""


class SchemaValidators:
    """Validators of schemas, made when they are first asked for.

    Args:
        schemas: The schemas by name.
    """

    def __init__(self, schemas: Mapping[str, JsonObject]) -> None:
        self._schemas = schemas
        self._made: dict[str, _Validator | UnusableSchemaError] = {}

    def problems(self, name: str, value: object, most: int) -> list[SchemaProblem]:
        """Find where a value doesn't fit.

        Args:
            name: The schema's.
            value: Any JSON value.
            most: How many problems to give at most.

        Raises:
            UnusableSchemaError: It can't be said.
        """
        import referencing

        validator = self._made.get(name)
        if validator is None:
            validator = self._made[name] = _make(self._schemas[name])
        if isinstance(validator, UnusableSchemaError):
            raise validator
        try:
            return list(islice(validator.iter_errors(value), most))
        except (referencing.exceptions.Unresolvable, re.error, RecursionError) as error:
            raise UnusableSchemaError(str(error)) from error


def _make(schema: JsonObject) -> _Validator | UnusableSchemaError:
    import jsonschema  # type: ignore[import-untyped]
    import referencing

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        return UnusableSchemaError(str(error))
    # A registry of its own: the default one would fetch a remote $ref.
    made: _Validator = kind(schema, registry=referencing.Registry())
    return made
