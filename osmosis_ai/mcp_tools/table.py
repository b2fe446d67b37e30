"""The tools of all of a repository's servers by name, and validation of their arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from osmosis_ai.errors import RepositoryError
from osmosis_ai.mcp_tools.conversion import convert_tool
from osmosis_ai.records import JsonObject, Tool

__all__ = ["LIBRARIES", "Backend", "Route", "SchemaProblem", "SchemaValidators", "ToolTable", "UnusableSchemaError"]

MOST_PROBLEMS = 5

LIBRARIES = ("fastmcp", "mcp")
"""The packages that servers are made of."""


class SchemaProblem(Protocol):
    """One mismatch between a value and a schema: a `jsonschema.ValidationError`.

    `validator` is the schema's keyword, `instance` the part of the value; for `anyOf` and `oneOf`, `context` has the
    problems of each alternative.
    """

    message: str
    validator: str
    instance: object
    absolute_path: Iterable[str | int]
    context: Sequence[SchemaProblem]


class _Validator(Protocol):
    def iter_errors(self, instance: object) -> Iterator[SchemaProblem]: ...


class UnusableSchemaError(Exception):
    """The schema itself is invalid, so no value can be checked by it."""


class SchemaValidators:
    """Validators of schemas, each made once on first use. No remote reference is fetched."""

    def __init__(self, schemas: Mapping[str, JsonObject]) -> None:
        self._schemas = schemas
        self._made: dict[str, _Validator | UnusableSchemaError] = {}

    def problems(self, name: str, value: object, most: int) -> list[SchemaProblem]:
        """Return at most `most` problems of a value with a schema. Raises UnusableSchemaError."""
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
    # The default registry would fetch a remote $ref.
    made: _Validator = kind(schema, registry=referencing.Registry())
    return made


class Backend(NamedTuple):
    """One MCP server: the argument of `fastmcp.Client`, the prefix of its tools' names, and its name in messages."""

    source: object
    prefix: str
    label: str


class Route(NamedTuple):
    """The server that handles a tool's calls, and the tool's own name there."""

    backend: Backend
    name: str


class ToolTable:
    """The tools, their routes and their schemas.

    Attributes:
        tools: As the model sees them, in the servers' order.
        routes: The server and own name of each tool, by name.
    """

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.routes: dict[str, Route] = {}
        self._schemas: dict[str, JsonObject] = {}
        self._validators = SchemaValidators(self._schemas)

    def add(self, backend: Backend, tools: Iterable[JsonObject]) -> None:
        """Add a server's tools in protocol form; raises RepositoryError if a name is taken."""
        for tool in tools:
            function = convert_tool(tool, backend.prefix)
            name = function["function"]["name"]
            if name in self.routes:
                other = self.routes[name].backend.label
                raise RepositoryError(f"two tools are called {name!r}: one of {other}, one of {backend.label}")
            self.routes[name] = Route(backend, tool["name"])
            self._schemas[name] = function["function"]["parameters"]
            self.tools.append(function)

    def problems(self, name: str, arguments: JsonObject) -> list[SchemaProblem]:
        """Return the first few problems of the arguments with the tool's schema."""
        try:
            return self._validators.problems(name, arguments, MOST_PROBLEMS)
        except UnusableSchemaError:
            return []
