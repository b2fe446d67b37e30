"""One rollout's MCP session: call tools, and turn each outcome into text for the model."""

from __future__ import annotations

import asyncio
import difflib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

from osmosis_ai.errors import ToolError
from osmosis_ai.failures import FailureKind
from osmosis_ai.mcp_tools.clients import Closer, McpSession, SamplingHandler, is_alive
from osmosis_ai.mcp_tools.conversion import clean, convert_result
from osmosis_ai.mcp_tools.table import LIBRARIES, Backend, Route, SchemaProblem, ToolTable
from osmosis_ai.records import Failure, JsonObject, Record
from osmosis_ai.tracebacks import describe, locate, short_traceback
from osmosis_ai.urls import redact_urls
from osmosis_ai.wire_json import decode_json

__all__ = ["CallOutcome", "Limit", "ToolSession", "note_raised"]

Limit: TypeAlias = Callable[[float], AbstractContextManager[object, bool]]
"""Makes a scope that cancels its block after a number of seconds."""


class CallOutcome(Record, frozen=True):
    """The outcome of a tool call.

    `text` is for the model, even if the call failed. `error` is None or the cause, as in `records.ToolCall.error`.
    `content` keeps what the text only mentions: images, files, structured content. `raised` locates the exception of a
    tool in this process, unless it raised it on purpose, as a ToolError.
    """

    text: str
    error: FailureKind | None = None
    content: object = None
    raised: Failure | None = None


class _Raised(NamedTuple):
    """An exception of a tool, and the call that it belongs to."""

    tool: str
    arguments: JsonObject
    error: BaseException


_raised: ContextVar[list[_Raised] | None] = ContextVar("_raised", default=None)
"""The exceptions of a session's tools. A server of this process handles a session's requests in its context."""


def note_raised(tool: str, arguments: JsonObject | None, error: BaseException) -> None:
    """Keep a tool's exception for the call that it belongs to: the server's answer has only its message."""
    if (raised := _raised.get()) is not None:
        raised.append(_Raised(tool, arguments or {}, error))


class ToolSession:
    """One rollout's MCP session, from `ToolHost.session`. The first tool call opens it.

    Args:
        table, closer, limit, root: The host's.
        open_session: Makes a session with a server, not yet connected.
        meta, sampling_handler, grace: As for `ToolHost.session`.

    Attributes:
        clean: False after exit if the session could not be closed in time because a tool's thread is still blocked.
        lost: Why the process of the tools ended, which for a server of this process is never so.
    """

    lost: Failure | None = None

    def __init__(
        self,
        table: ToolTable,
        open_session: Callable[[Backend, SamplingHandler | None], McpSession],
        closer: Closer,
        limit: Limit,
        root: Path | None,
        *,
        meta: JsonObject,
        sampling_handler: SamplingHandler | None,
        grace: float,
    ) -> None:
        self.clean = True
        self._table = table
        self._open = open_session
        self._closer = closer
        self._limit = limit
        self._root = root
        self._meta = meta
        self._sampling_handler = sampling_handler
        self._grace = grace
        self._sessions: dict[str, McpSession] = {}
        self._opening = asyncio.Lock()
        self._closing: list[asyncio.Task[None]] = []
        self._raised: list[_Raised] = []

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for prefix, session in list(self._sessions.items()):
            self._drop(prefix, session)
        self.clean = await self._closer.wait(self._grace, self._closing)

    async def call(self, name: str, arguments: str | JsonObject, *, timeout: float) -> CallOutcome:
        """Call a tool; every failure becomes an outcome. Simultaneous calls run concurrently.

        Args:
            name: The tool, as in `ToolHost.tools`.
            arguments: The JSON text the model wrote (empty means `{}`), or the object.
            timeout: Seconds the call may take, including opening the session. The MCP SDK 2.x then cancels the tool;
                otherwise it ends with the session at the latest.

        Returns:
            The outcome. Its `error` is `schema` if the server refused the arguments because of the tool's schema. As in
            production, a server may accept more than the schema says, such as "5" for a number.
        """
        route = self._table.routes.get(name)
        if route is None:
            return CallOutcome(_unknown(name, self._table.routes), "unknown_tool")
        try:
            values = _parse(arguments)
        except ToolError as exc:
            return CallOutcome(f"Error: {exc}", "bad_json")
        _raised.set(self._raised)
        with self._limit(timeout):
            try:
                session = await self._connect(route.backend)
            except Exception as exc:  # noqa: BLE001 - the connection's failure, of whatever transport
                text = redact_urls(describe(exc))
                return CallOutcome(f"Error: no connection to the tool server: {text}", "session")
            try:
                answer = await session.call_tool(route.name, values, dict(self._meta))
            except Exception as exc:  # noqa: BLE001 - the server's failure, of whatever transport
                return await self._refusal(name, route, session, values, exc)
            return self._outcome(name, route, values, answer)
        text = f"Error: tool {name!r} did not answer within {timeout:g} seconds"
        current = self._sessions.get(route.backend.prefix)
        if current is not None and not await is_alive(current):
            self._drop(route.backend.prefix, current)
            return CallOutcome(f"{text}, and the connection to it was lost", "session")
        return CallOutcome(text, "timeout")

    async def _connect(self, backend: Backend) -> McpSession:
        # Locked, so that simultaneous first calls don't open two sessions.
        async with self._opening:
            if backend.prefix not in self._sessions:
                session = self._open(backend, self._sampling_handler)
                try:
                    await session.__aenter__()
                except BaseException:
                    self._closing.append(self._closer.close(session))
                    raise
                self._sessions[backend.prefix] = session
            return self._sessions[backend.prefix]

    def _drop(self, prefix: str, session: McpSession) -> None:
        """Close a broken session once, so that the next call opens a new one."""
        if self._sessions.get(prefix) is session:
            del self._sessions[prefix]
            self._closing.append(self._closer.close(session))

    def _outcome(self, name: str, route: Route, arguments: JsonObject, result: JsonObject) -> CallOutcome:
        text, content = convert_result(result)
        if not result.get("isError"):
            return CallOutcome(text, None, content)
        if refused := self._refused(name, arguments, text):
            return CallOutcome(refused, "schema", content)
        return self._exception(route, arguments, text, content)

    async def _refusal(
        self, name: str, route: Route, session: McpSession, arguments: JsonObject, exc: Exception
    ) -> CallOutcome:
        text = clean(str(exc) or type(exc).__name__)
        # A malformed answer and a lost connection raise alike; a ping tells them apart.
        if not await is_alive(session):
            self._drop(route.backend.prefix, session)
            lost = "Error: the connection to the tool server was lost"
            return CallOutcome(f"{lost}: {redact_urls(text)}", "session")
        if refused := self._refused(name, arguments, text):
            return CallOutcome(refused, "schema")
        return self._exception(route, arguments, text)

    def _exception(self, route: Route, arguments: JsonObject, text: str, content: object = None) -> CallOutcome:
        """Make the outcome of a tool that raised. Only a server of this process shows where."""
        call = (route.name, arguments)
        found = next((raised for raised in self._raised if (raised.tool, raised.arguments) == call), None)
        failure = None
        if found is not None:
            self._raised.remove(found)
            failure = None if self._root is None else _located(found.error, self._root)
        return CallOutcome(_error_text(text), "exception", content, failure)

    def _refused(self, name: str, arguments: JsonObject, text: str) -> str | None:
        """Describe the problem with the arguments if the server refused them, else return None."""
        errors = self._table.problems(name, arguments)
        if not _REFUSAL.search(text) and all(_may_be_coerced(error) for error in errors):
            return None
        if not errors:
            return _error_text(text)
        return clean(f"Error: invalid arguments for tool {name!r}: {'; '.join(_problem(error) for error in errors)}")


def _located(error: BaseException, root: Path) -> Failure | None:
    """Return a tool's exception with its place; None for a ToolError, which tells the model something on purpose."""
    from fastmcp.exceptions import FastMCPError

    # The library wraps what a tool raises; a ToolError raised by the tool itself may have a cause as well.
    while error.__cause__ is not None and _is_of_library(error):
        error = error.__cause__
    place = None if isinstance(error, FastMCPError) else locate(error, root)
    if place is None:
        return None
    text, detail = describe(error), short_traceback(error, root)
    return Failure("tool", text, kind="exception", file=place.file, line=place.line, detail=detail)


def _is_of_library(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] in LIBRARIES


_REFUSAL = re.compile(r"Input validation error|\d+ validation errors? for (call\[|\w+Arguments\b)")
"""The beginnings of servers' refusals: of the SDKs' low-level servers, FastMCP, the Python SDK."""


def _parse(arguments: str | JsonObject) -> JsonObject:
    if isinstance(arguments, dict):
        return arguments
    if not arguments.strip():
        return {}
    try:
        values = decode_json(arguments, parse_constant=_no_constant)
    except ValueError as exc:
        raise ToolError(f"the arguments are not valid JSON: {exc}", kind="bad_json") from exc
    if not isinstance(values, dict):
        kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        found = kinds.get(type(values), "a number")
        raise ToolError(f"the arguments must be a JSON object, and not {found}", kind="bad_json")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _unknown(name: str, known: Iterable[str]) -> str:
    names = list(known)
    text = f"Error: there is no tool {clean(name)!r}."
    near = difflib.get_close_matches(name, names, n=3)
    if near:
        return f"{text} Did you mean {' or '.join(repr(match) for match in near)}?"
    if not names:
        return f"{text} There are no tools at all."
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{text} The tools are: {', '.join(names[:20])}{more}."


def _error_text(text: str) -> str:
    return text if text.lower().startswith("error") else f"Error: {text or 'the tool failed and did not say why'}"


def _may_be_coerced(error: SchemaProblem) -> bool:
    """Return True if a lenient server may accept this, such as a text for a number."""
    return error.validator == "type" and isinstance(error.instance, (str, int, float))


def _problem(error: SchemaProblem) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    text = " ".join(_leaves(error))
    text = text if len(text) <= 300 else text[:299] + "…"
    return f"{where[1:]}: {text}" if where.startswith(".") else f"{where}: {text}" if where else text


def _leaves(error: SchemaProblem) -> Iterator[str]:
    yield error.message
    if error.validator in ("anyOf", "oneOf") and error.context:
        yield f"({', or '.join(inner.message for inner in error.context[:4])})"
