"""The tools of all of a repository's servers, by the name that the model calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from osmosis_ai.errors import RepositoryError
from osmosis_ai.mcp_tools.conversion import convert_tool
from osmosis_ai.mcp_tools.validators import SchemaProblem, SchemaValidators, UnusableSchemaError
from osmosis_ai.records import JsonObject, Tool

__all__ = ["Backend", "Route", "ToolTable"]

MOST_PROBLEMS = 5


class Backend(NamedTuple):
    """One MCP server: what `fastmcp.Client` takes, the prefix of its tools' names, and its name in messages."""

    source: object
    prefix: str
    label: str


class Route(NamedTuple):
    """Where a tool's calls go: the server, and the tool's own name there."""

    backend: Backend
    name: str


class ToolTable:
    """The tools, and what fits their schemas.

    Attributes:
        tools: As the model sees them, in the servers' order.
        routes: Where their calls go, by name.
    """

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.routes: dict[str, Route] = {}
        self._schemas: dict[str, JsonObject] = {}
        self._validators = SchemaValidators(self._schemas)

    def add(self, backend: Backend, tools: Iterable[JsonObject]) -> None:
        """Add a server's tools.

        Args:
            backend: The server.
            tools: As in the protocol.

        Raises:
            RepositoryError: A name is taken.
        """
        for tool in tools:
            function = convert_tool(tool, backend.prefix)
            name = function["function"]["name"]
            if name in self.routes:
                other = self.routes[name].backend.label
                raise RepositoryError(f"two tools are called {name!r}, one of {other} and one of {backend.label}")
            self.routes[name] = Route(backend, tool["name"])
            self._schemas[name] = function["function"]["parameters"]
            self.tools.append(function)

    def problems(self, name: str, arguments: JsonObject) -> list[SchemaProblem]:
        """Find what in the arguments doesn't fit the tool's schema, the first problems only."""
        try:
            return self._validators.problems(name, arguments, MOST_PROBLEMS)
        except UnusableSchemaError:
            return []
