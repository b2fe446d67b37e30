"""Sessions with a FastMCP server of this process that skip the transport.

A session over in-memory streams costs more CPU than most tools: two loops that frame, route and parse messages which
never leave the process. The SDK 2.x has public parts to do without: a session is its `Connection` and `ServerRunner`,
and a request is a call of the runner. The server sees what it would see from any client: its middleware, a session of
its own, a handshake if anything in it would notice, and a task for each request that can be cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import anyio

from osmosis_ai.errors import ToolError
from osmosis_ai.mcp_tools.clients import SamplingCallback, SamplingHandler, sampling_callback
from osmosis_ai.mcp_tools.table import SchemaValidators, UnusableSchemaError
from osmosis_ai.records import JsonObject
from osmosis_ai.tracebacks import describe

if TYPE_CHECKING:
    from fastmcp import FastMCP
    from mcp.shared.dispatcher import CallOptions

__all__ = ["TOOL_CALLS_ONLY", "DirectServer", "DirectSession", "direct_server"]

TOOL_CALLS_ONLY = "_osmosis_tool_calls_only"
"""Set on a class of middleware of our own that lets everything but tool calls pass."""
_LIBRARIES = ("fastmcp", "mcp")
_LISTS = ("prompts", "resource_templates", "resources", "tools")
_DEAF_TO_HANDSHAKES = {
    *("__init__", "check_resource_access", "on_call_tool", "on_get_prompt", "on_read_resource"),
    *(f"on_list_{what}" for what in _LISTS),
}
"""The methods of a middleware that no handshake passes through."""
_CONNECTION_CLOSED = "the session was closed"
_log = logging.getLogger(__name__)


async def direct_server(server: object, tools: Iterable[JsonObject]) -> DirectServer | None:
    """Find what sessions without a transport need; the server's lifespan must be running.

    The parts are public, but only the transport is documented. So a session is tried, and where one doesn't come about
    that is logged, and sessions have a transport.

    Returns:
        None for what isn't a FastMCP server, and where the installed libraries don't have the parts.
    """
    from fastmcp import FastMCP

    if not isinstance(server, FastMCP):
        return None
    try:
        import mcp.server.runner  # noqa: F401
    except ImportError:
        _log.debug("sessions have a transport: the MCP SDK 1.x has no other way")
        return None
    try:
        found = await _connected(server, tools)
        session = await found.session(None).__aenter__()
        await session.close()
    except Exception as error:  # noqa: BLE001 - whatever another version of the libraries raises; streams work with any
        _log.warning(
            "sessions have a transport, which is slower, with these versions of fastmcp and mcp: %s", describe(error)
        )
        return None
    return found


async def _connected(server: FastMCP[Any], tools: Iterable[JsonObject]) -> DirectServer:
    from fastmcp.server.http import StreamableHTTPASGIApp

    # The app that would serve it over HTTP is the one public place that names the protocol's own server object.
    app = server.http_app()
    endpoints = [getattr(route, "endpoint", None) for route in app.routes]
    async with app.router.lifespan_context(app):
        managers = [endpoint.session_manager for endpoint in endpoints if isinstance(endpoint, StreamableHTTPASGIApp)]
        core = next(manager.app for manager in managers if manager is not None)
    async with core.lifespan(core) as state:
        # What the lifespan gave is the same for every session and lives as long as the one that runs already.
        pass
    return DirectServer(server, core, state, tools)


class DirectServer:
    """Makes sessions with a FastMCP server, of the SDK's own server object and of what its lifespan gave."""

    def __init__(self, server: FastMCP[Any], core: Any, state: object, tools: Iterable[JsonObject]) -> None:
        from mcp.server.connection import Connection
        from mcp.server.runner import ServerRunner, aclose_shielded
        from mcp.shared.transport_context import TransportContext

        self._server = server
        self.core = core
        self.state = state
        self.connection, self.runner, self.close_connection = Connection, ServerRunner, aclose_shielded
        self.transport = TransportContext(kind="direct", can_send_request=True)
        # One for all sessions: a server need not read what it has read before.
        self.options = core.create_initialization_options()
        self.greetings = {sampling: _greeting(sampling=sampling) for sampling in (False, True)}
        self._schemas = {tool["name"]: schema for tool in tools if (schema := tool.get("outputSchema")) is not None}
        self._validators = SchemaValidators(self._schemas)

    def session(self, sampling: SamplingHandler | None) -> DirectSession:
        """A session that isn't open yet; `sampling` answers what tools ask the model."""
        return DirectSession(self, None if sampling is None else sampling_callback(sampling))

    def hears_handshakes(self) -> bool:
        """True if anything in the server learns of a handshake but the connection itself."""
        return (
            any(_hears_handshakes(middleware) for middleware in self._server.middleware)
            or any(type(part).__module__.partition(".")[0] not in _LIBRARIES for part in self.core.middleware)
            or self.core.get_notification_handler("notifications/initialized") is not None
            or _traces()
        )

    def check(self, name: str, result: JsonObject) -> None:
        """See that a result has the structure that the tool promises, as the SDK's own client does; else ToolError."""
        if name not in self._schemas or result.get("isError"):
            return
        if "structuredContent" not in result:
            raise ToolError(f"Tool {name} has an output schema but did not return structured content", kind="exception")
        try:
            problems = self._validators.problems(name, result["structuredContent"], 1)
        except UnusableSchemaError as error:
            raise ToolError(f"Invalid schema for tool {name}: {error}", kind="exception") from error
        if problems:
            raise ToolError(f"Invalid structured content returned by tool {name}: {problems[0]}", kind="exception")


class DirectSession:
    """One MCP session, with the interface of `fastmcp.Client` as far as it is needed. Made by `DirectServer.session`.

    It is also the connection's way back to the client: what a server asks or tells its client without being asked.
    """

    def __init__(self, server: DirectServer, sampling: SamplingCallback | None) -> None:
        self.server = server
        self._sampling = sampling
        self._connection = server.connection.for_loop(self)
        self._runner = server.runner(server.core, self._connection, server.state, init_options=server.options)
        self._ids = itertools.count(1)
        self._running: dict[asyncio.Task[None], _Request] = {}
        self._closed = False

    async def __aenter__(self) -> DirectSession:
        samples = self._sampling is not None
        if self.server.hears_handshakes():
            await self._request("initialize", self.server.greetings[samples])
            await self._runner.on_notify(_Request(self, None), "notifications/initialized", None)
        else:
            from mcp.types import InitializeRequestParams

            # All that a handshake comes to, then. `for_loop` has the version already.
            self._connection.client_params = InitializeRequestParams.model_validate(
                self.server.greetings[samples], by_name=False
            )
            self._connection.initialized.set()
        return self

    async def call_tool(self, name: str, arguments: JsonObject, meta: JsonObject) -> JsonObject:
        """As in `McpSession`; raises MCPError when the server refuses, ToolError when the tool breaks its promise."""
        params: JsonObject = {"name": name, "arguments": arguments}
        if meta:
            params["_meta"] = meta
        result = await self._request("tools/call", params)
        self.server.check(name, result)
        return result

    async def ping(self) -> None:
        """There is no connection that could be lost."""

    async def close(self) -> None:
        """Cancel what still runs, wait for it, and let the server end the session."""
        self._closed = True
        for request in self._running.values():
            request.cancel()
        if self._running:
            await asyncio.wait(list(self._running))
        await self.server.close_connection(self._connection)

    async def _request(self, method: str, params: JsonObject) -> JsonObject:
        """Have a request handled in a task of its own, so that what can't be cancelled doesn't hold up the caller."""
        request = _Request(self, next(self._ids))
        answer: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._handle(request, method, params, answer))
        self._running[task] = request
        task.add_done_callback(self._running.pop)
        try:
            return await answer
        except asyncio.CancelledError:
            request.cancel()
            raise

    async def _handle(
        self, request: _Request, method: str, params: JsonObject, answer: asyncio.Future[JsonObject]
    ) -> None:
        from mcp.shared.exceptions import MCPError
        from pydantic import ValidationError

        result: JsonObject | None = None
        failure: Exception | None = None
        with request.scope:
            try:
                result = await self._runner.on_request(request, method, params)
            except MCPError as error:
                failure = error
            except ValidationError:
                failure = MCPError(code=-32602, message="Invalid request parameters", data="")
            except Exception as error:  # noqa: BLE001 - the answer of a server whose handler or middleware raised
                _log.exception("the handler of %r raised", method)
                failure = MCPError(code=0, message=str(error))
            finally:
                request.open = False
        # Whoever was cancelled while waiting has no use for an answer.
        if answer.done():
            return
        if result is not None:
            answer.set_result(result)
        else:
            answer.set_exception(failure or MCPError(code=-32000, message=_CONNECTION_CLOSED))

    async def send_raw_request(
        self, method: str, params: Mapping[str, object] | None, opts: CallOptions | None = None
    ) -> JsonObject:
        """Answer what the server asks its client."""
        from mcp.shared.exceptions import MCPError

        if self._closed:
            raise MCPError(code=-32000, message=_CONNECTION_CLOSED)
        if method == "ping":
            return {}
        if method == "sampling/createMessage" and self._sampling is not None:
            with anyio.fail_after((opts or {}).get("timeout")):
                return await self._sample(self._sampling, params)
        names = {"sampling/createMessage": "Sampling", "elicitation/create": "Elicitation", "roots/list": "List roots"}
        if method not in names:
            raise MCPError(code=-32601, message="Method not found", data=method)
        raise MCPError(code=-32600, message=f"{names[method]} not supported")

    async def _sample(self, sampling: SamplingCallback, params: Mapping[str, object] | None) -> JsonObject:
        from mcp.shared.exceptions import MCPError
        from mcp.types import CreateMessageRequestParams

        asked = CreateMessageRequestParams.model_validate(params, by_name=False)
        try:
            text = await sampling(asked.messages, asked, None)
        except Exception as error:
            # Whatever kept the model from answering is the answer to this one request.
            raise MCPError(code=-32603, message=str(error)) from error
        return {"role": "assistant", "model": "osmosis-ai", "content": {"type": "text", "text": text}}

    async def notify(self, method: str, params: Mapping[str, object] | None, opts: CallOptions | None = None) -> None:
        """Take what the server tells its client: log messages are logged, nothing else is of interest."""
        if method == "notifications/message":
            from fastmcp.client.logging import default_log_handler
            from mcp.types import LoggingMessageNotificationParams

            await default_log_handler(LoggingMessageNotificationParams.model_validate(params, by_name=False))


class _Request:
    """One request while the server handles it, or a notification, without a number; the SDK's `DispatchContext`."""

    message_metadata = None

    def __init__(self, session: DirectSession, request_id: int | None) -> None:
        self.request_id = request_id
        self.transport = session.server.transport
        self.scope = anyio.CancelScope()
        self.open = request_id is not None
        self._session = session
        self._cancel_requested: anyio.Event | None = None

    @property
    def can_send_request(self) -> bool:
        return self.open

    @property
    def cancel_requested(self) -> anyio.Event:
        if self._cancel_requested is None:
            self._cancel_requested = anyio.Event()
            if self.scope.cancel_called:
                self._cancel_requested.set()
        return self._cancel_requested

    def cancel(self) -> None:
        """Tell the handler to stop."""
        self.scope.cancel()
        if self._cancel_requested is not None:
            self._cancel_requested.set()

    async def send_raw_request(
        self, method: str, params: Mapping[str, object] | None, opts: CallOptions | None = None
    ) -> JsonObject:
        from mcp.shared.exceptions import NoBackChannelError

        if not self.open:
            raise NoBackChannelError(method)
        return await self._session.send_raw_request(method, params, opts)

    async def notify(self, method: str, params: Mapping[str, object] | None, opts: CallOptions | None = None) -> None:
        await self._session.notify(method, params, opts)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Nobody asked for it."""


def _greeting(*, sampling: bool) -> JsonObject:
    """How a session introduces itself."""
    from mcp_types.version import LATEST_HANDSHAKE_VERSION

    capabilities: JsonObject = {"sampling": {}} if sampling else {}
    client = {"name": "osmosis-ai", "version": "1"}
    return {"protocolVersion": LATEST_HANDSHAKE_VERSION, "capabilities": capabilities, "clientInfo": client}


def _hears_handshakes(middleware: object) -> bool:
    from fastmcp.server.middleware import Middleware

    kind = type(middleware)
    if not isinstance(middleware, Middleware):
        return True
    if getattr(kind, TOOL_CALLS_ONLY, False):
        return False
    # A hook may be set on the object, or be the class's.
    own = [vars(middleware), *(vars(one) for one in kind.__mro__ if not issubclass(Middleware, one))]
    return not all(_hooks().isdisjoint(names) for names in own)


@functools.cache
def _hooks() -> frozenset[str]:
    """The methods of a middleware that may hear of a handshake: all but those that can't."""
    from fastmcp.server.middleware import Middleware

    return frozenset(name for name, value in vars(Middleware).items() if callable(value)) - _DEAF_TO_HANDSHAKES


def _traces() -> bool:
    """True if spans go anywhere: a handshake has one too."""
    try:
        from opentelemetry import trace
    except ImportError:
        return False
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
