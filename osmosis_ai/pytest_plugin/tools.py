"""The fixture `tools`: the repository's tools in this process, in one MCP session per test."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from osmosis_ai.current import rollout_scope
from osmosis_ai.mcp_tools.session import CallOutcome, ToolSession
from osmosis_ai.records import Failure, JsonObject

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from osmosis_ai.mcp_tools.host import ToolHost
    from osmosis_ai.mcp_tools.setups import Setup

__all__ = ["ToolResult", "Tools", "open_tools"]

SECONDS = 60.0
"""Time limit of a call, the default of `--tool-timeout`."""


class ToolResult(str):
    """A tool's result: the text that the model would see.

    Attributes:
        error: The kind of failure, as in a run's results (`exception`, `schema`, `unknown_tool`, …); None if the call
            succeeded.
        content: The parts that the text only mentions: structured content, images, files.
        failure: The tool's exception, with file and line; None if it raised none.
    """

    error: str | None
    content: Any
    failure: Failure | None

    def __new__(cls, outcome: CallOutcome) -> ToolResult:
        result = super().__new__(cls, outcome.text)
        result.error, result.content, result.failure = outcome.error, outcome.content, outcome.raised
        return result

    def __repr__(self) -> str:
        return super().__repr__() if self.error is None else f"<{self.error}: {super().__repr__()}>"


class Tools:
    """The repository's tools, called as a model calls them."""

    def __init__(
        self, portal: BlockingPortal, host: ToolHost, session: ToolSession, context: contextvars.Context
    ) -> None:
        self._portal = portal
        self._host = host
        self._session = session
        self._context = context

    @property
    def names(self) -> list[str]:
        """The tools' names, in the server's order."""
        return [tool["function"]["name"] for tool in self._host.tools]

    def schema(self, name: str) -> JsonObject:
        """Return the JSON Schema of a tool's arguments; raise LookupError if there is no such tool."""
        return dict(self._definition(name).get("parameters") or {})

    def description(self, name: str) -> str:
        """Return a tool's description; raise LookupError if there is no such tool."""
        return str(self._definition(name).get("description") or "")

    def call(self, name: str, arguments: str | JsonObject | None = None, /, **values: Any) -> ToolResult:
        """Call a tool in this test's session. A failing call returns a result too, as it does for a model.

        Args:
            name: The tool's name.
            arguments: The arguments, as an object or as a model's JSON text; in place of `values`.
            values: The arguments by name.
        """
        given = values if arguments is None else arguments

        async def call() -> CallOutcome:
            # In the session's own context, so that tools see its context variables.
            work = self._session.call(name, given, timeout=SECONDS)
            return await self._context.run(asyncio.ensure_future, work)

        return ToolResult(self._portal.call(call))

    def _definition(self, name: str) -> JsonObject:
        for tool in self._host.tools:
            if tool["function"]["name"] == name:
                return dict(tool["function"])
        raise LookupError(f"there is no tool {name!r}; there are {', '.join(self.names) or 'none'}")


@contextmanager
def open_tools(portal: BlockingPortal, host: ToolHost, setups: list[Setup], root: Path) -> Iterator[Tools]:
    """Open a session for one test, after running the setup functions as for a rollout."""
    with portal.wrap_async_context_manager(_session(host, setups, root)) as (session, context):
        yield Tools(portal, host, session, context)


@asynccontextmanager
async def _session(
    host: ToolHost, setups: list[Setup], root: Path
) -> AsyncIterator[tuple[ToolSession, contextvars.Context]]:
    with rollout_scope(uuid4().hex, 0, {}, None):
        async with host.session() as session:
            if setups:
                from osmosis_ai.runtime.worker.setups import SetupRun

                failure = await SetupRun(setups, root).run()
                if failure is not None:
                    raise RuntimeError(f"setup: {failure.message} ({failure.file}:{failure.line})")
            yield session, contextvars.copy_context()
