"""Sessions with a FastMCP server of this process that skip the transport.

A session over in-memory streams costs more CPU than most tools: two loops frame, route and parse messages that never
leave the process. The SDK 2.x has public parts that avoid this: a session is its `Connection` and `ServerRunner`, and a
request is a call of the runner. The server sees what any client would show it: its middleware runs, each client has its
own session, a handshake happens if anything in the server would notice, and each request is a cancellable task.
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
from osmosis_ai.mcp_tools.table import LIBRARIES, SchemaValidators, UnusableSchemaError
from osmosis_ai.records import JsonObject
from osmosis_ai.tracebacks import describe

if TYPE_CHECKING:
    from fastmcp import FastMCP
    from mcp.shared.dispatcher import CallOptions

__all__ = ["TOOL_CALLS_ONLY", "DirectServer", "DirectSession", "direct_server"]

TOOL_CALLS_ONLY = "_osmosis_tool_calls_only"
"""Set on our own middleware classes that affect only tool calls."""
_LISTS = ("prompts", "resource_templates", "resources", "tools")
_DEAF_TO_HANDSHAKES = {
    *("__init__", "check_resource_access", "on_call_tool", "on_get_prompt", "on_read_resource"),
    *(f"on_list_{what}" for what in _LISTS),
}
"""The methods of a middleware that a handshake never calls."""
_CONNECTION_CLOSED = "the session was closed"
_log = logging.getLogger(__name__)


async def direct_server(server: object, tools: Iterable[JsonObject]) -> DirectServer | None:
    """Prepare sessions without a transport; the server's lifespan must be running.

    The SDK's parts are public but undocumented, so one session is tried first. If it fails, that is logged, and
    sessions use a transport.

    Returns:
        None if it isn't a FastMCP server, or if the installed libraries lack the parts.
    """
    from fastmcp import FastMCP

    if not isinstance(server, FastMCP):
        return None
    try:
        import mcp.server.runner  # noqa: F401
    except ImportError:
        _log.debug("sessions use a transport: the MCP SDK 1.x offers no other way")
        return None
    try:
        found = await _connected(server, tools)
        session = await found.session(None).__aenter__()
        await session.close()
    except Exception as error:  # noqa: BLE001 - whatever another version of the libraries raises; streams work with any
        _log.warning(
            "sessions use a transport, which is slower, with these versions of fastmcp and mcp: %s", describe(error)
        )
        return None
    return found


async def _connected(server: FastMCP[Any], tools: Iterable[JsonObject]) -> DirectServer:
    from fastmcp.server.http import StreamableHTTPASGIApp

    # The app that would serve it over HTTP is the only public place that exposes the SDK's own server object.
    app = server.http_app()
    endpoints = [getattr(route, "endpoint", None) for route in app.routes]
    async with app.router.lifespan_context(app):
        managers = [endpoint.session_manager for endpoint in endpoints if isinstance(endpoint, StreamableHTTPASGIApp)]
        core = next(manager.app for manager in managers if manager is not None)
    async with core.lifespan(core) as state:
        # fastmcp's running lifespan provides this state, so it outlives this block and serves every session.
        pass
    return DirectServer(server, core, state, tools)


class DirectServer:
    """A factory of sessions with a FastMCP server, from the SDK's own server object and its lifespan's state."""

    def __init__(self, server: FastMCP[Any], core: Any, state: object, tools: Iterable[JsonObject]) -> None:
        from mcp.server.connection import Connection
        from mcp.server.runner import ServerRunner, aclose_shielded
        from mcp.shared.transport_context import TransportContext

        self._server = server
        self.core = core
        self.state = state
        self.connection, self.runner, self.close_connection = Connection, ServerRunner, aclose_shielded
        self.transport = TransportContext(kind="direct", can_send_request=True)
        # Shared by all sessions, because they are the same for each.
        self.options = core.create_initialization_options()
        self.greetings = {sampling: _greeting(sampling=sampling) for sampling in (False, True)}
        self._schemas = {tool["name"]: schema for tool in tools if (schema := tool.get("outputSchema")) is not None}
        self._validators = SchemaValidators(self._schemas)

    def session(self, sampling: SamplingHandler | None) -> DirectSession:
        """Return a session that isn't open yet; `sampling` answers tools' requests to the model."""
        return DirectSession(self, None if sampling is None else sampling_callback(sampling))

    def hears_handshakes(self) -> bool:
        """Return True if anything in the server besides the connection notices a handshake."""
        return (
            any(_hears_handshakes(middleware) for middleware in self._server.middleware)
            or any(type(part).__module__.partition(".")[0] not in LIBRARIES for part in self.core.middleware)
            or self.core.get_notification_handler("notifications/initialized") is not None
            or _traces()
        )

    def check(self, name: str, result: JsonObject) -> None:
        """Validate a result by the tool's output schema, as the SDK's own client does; raises ToolError."""
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
    """One MCP session without a transport, created by `DirectServer.session`.

    It is also the connection's back channel, which handles the server's own requests and notifications.
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

            # All that a handshake would do here: `for_loop` has set the version already.
            self._connection.client_params = InitializeRequestParams.model_validate(
                self.server.greetings[samples], by_name=False
            )
            self._connection.initialized.set()
        return self

    async def call_tool(self, name: str, arguments: JsonObject, meta: JsonObject) -> JsonObject:
        """Call a tool; raises MCPError if the server refuses, ToolError if the result breaks the output schema."""
        params: JsonObject = {"name": name, "arguments": arguments}
        if meta:
            params["_meta"] = meta
        result = await self._request("tools/call", params)
        self.server.check(name, result)
        return result

    async def ping(self) -> None:
        """Do nothing: there is no connection to lose."""

    async def close(self) -> None:
        """Cancel the running requests, wait for them, and let the server end the session."""
        self._closed = True
        for request in self._running.values():
            request.cancel()
        if self._running:
            await asyncio.wait(list(self._running))
        await self.server.close_connection(self._connection)

    async def _request(self, method: str, params: JsonObject) -> JsonObject:
        """Handle a request in its own task, so that one that can't be cancelled doesn't block the caller."""
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
        # The caller was cancelled and no longer waits for an answer.
        if answer.done():
            return
        if result is not None:
            answer.set_result(result)
        else:
            answer.set_exception(failure or MCPError(code=-32000, message=_CONNECTION_CLOSED))

    async def send_raw_request(
        self, method: str, params: Mapping[str, object] | None, opts: CallOptions | None = None
    ) -> JsonObject:
        """Answer a request that the server makes to its client."""
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
            # A model's failure fails only this request.
            raise MCPError(code=-32603, message=str(error)) from error
        return {"role": "assistant", "model": "osmosis-ai", "content": {"type": "text", "text": text}}

    async def notify(self, method: str, params: Mapping[str, object] | None, opts: CallOptions | None = None) -> None:
        """Handle the server's notifications: log its log messages, ignore the rest."""
        if method == "notifications/message":
            from fastmcp.client.logging import default_log_handler
            from mcp.types import LoggingMessageNotificationParams

            await default_log_handler(LoggingMessageNotificationParams.model_validate(params, by_name=False))


class _Request:
    """One request that the server handles, or a notification (without an id); the SDK's `DispatchContext`."""

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
        """Do nothing: the client never requests progress."""


def _greeting(*, sampling: bool) -> JsonObject:
    """Return the parameters of a session's `initialize` request."""
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
    """Return the methods of a middleware that a handshake may call."""
    from fastmcp.server.middleware import Middleware

    return frozenset(name for name, value in vars(Middleware).items() if callable(value)) - _DEAF_TO_HANDSHAKES


def _traces() -> bool:
    """Return True if a tracer is set up: a handshake creates a span too."""
    try:
        from opentelemetry import trace
    except ImportError:
        return False
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
