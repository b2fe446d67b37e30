"""Open, close and ping MCP sessions as a client, and answer a server's sampling requests."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import anyio

from osmosis_ai.mcp_tools.conversion import clean
from osmosis_ai.records import JsonObject, Message
from osmosis_ai.tracebacks import describe

if TYPE_CHECKING:
    import httpx
    from pydantic import BaseModel

__all__ = [
    "Closer",
    "McpSession",
    "SamplingCallback",
    "SamplingHandler",
    "StreamSession",
    "is_alive",
    "sampling_callback",
]

SamplingHandler: TypeAlias = Callable[[list[Message], JsonObject], Awaitable[Message]]
"""Answers a tool's request to the model.

It takes chat messages and parameters (`temperature`, `max_tokens`, `stop`; absent if the tool set none) and returns the
assistant message. An exception fails the tool's request, not the rollout.
"""

_PING_SECONDS = 2.0
_log = logging.getLogger(__name__)


SamplingCallback: TypeAlias = "Callable[[Sequence[BaseModel], BaseModel, object], Awaitable[str]]"
"""A `SamplingHandler` as `fastmcp.Client` takes it: messages, parameters, the request's context."""


class McpSession(Protocol):
    """One MCP session, however it reaches the server."""

    async def __aenter__(self) -> object: ...
    async def call_tool(self, name: str, arguments: JsonObject, meta: JsonObject) -> JsonObject:
        """Call a tool and return the result in protocol form; `meta` is sent as `_meta`."""
        ...

    async def ping(self) -> object: ...
    async def close(self) -> None: ...


class _Client(Protocol):
    """The part of `fastmcp.Client` used here."""

    transport: object

    async def __aenter__(self) -> object: ...
    async def list_tools(self) -> Sequence[BaseModel]: ...
    async def call_tool_mcp(self, name: str, arguments: JsonObject, *, meta: JsonObject | None) -> BaseModel: ...
    async def ping(self) -> object: ...
    async def close(self) -> object: ...


class StreamSession:
    """A session over a transport: HTTP, stdio, or streams within this process.

    Args:
        source: An argument of `fastmcp.Client`: a server object, a URL, an `mcp.json` with one server.
        sampling: Answers tools' requests to the model; without one they fail.
    """

    def __init__(self, source: object, sampling: SamplingHandler | None) -> None:
        from fastmcp import Client

        options: dict[str, object] = {}
        if sampling is not None:
            options["sampling_handler"] = sampling_callback(sampling)
        if "mode" in inspect.signature(Client.__init__).parameters:
            # Protocol 2026-07-28 has no sessions, so a server would lose its per-session state at every call.
            options["mode"] = "legacy"
        make: Callable[..., _Client] = Client
        self._client = make(source, **options)
        _refuse_redirects(self._client)

    async def __aenter__(self) -> StreamSession:
        await self._client.__aenter__()
        return self

    async def list_tools(self) -> list[JsonObject]:
        """Return the server's tools in protocol form."""
        return [tool.model_dump(mode="json", by_alias=True) for tool in await self._client.list_tools()]

    async def call_tool(self, name: str, arguments: JsonObject, meta: JsonObject) -> JsonObject:
        result = await self._client.call_tool_mcp(name, arguments, meta=meta or None)
        return result.model_dump(mode="json", by_alias=True)

    async def ping(self) -> object:
        return await self._client.ping()

    async def close(self) -> None:
        """End the session and a stdio server's process, which would outlive the session."""
        await self._client.close()


def _refuse_redirects(client: _Client) -> None:
    """Keep an HTTP session, its headers and their keys on the server's own origin; SDK 2.x does so by itself."""
    transport = getattr(client.transport, "transport", client.transport)  # that of an mcp.json is inside another one
    if hasattr(transport, "httpx_client_factory") and version("mcp").startswith("1."):
        transport.httpx_client_factory = _own_origin_client


def _own_origin_client(**options: Any) -> httpx.AsyncClient:
    import httpx

    async def check(response: httpx.Response) -> None:
        if response.has_redirect_location:
            here, there = response.request.url, response.request.url.join(response.headers["Location"])
            if (here.scheme, here.host, here.port) != (there.scheme, there.host, there.port):
                message = f"Redirect to {there} not followed; use that URL as the endpoint if it is the intended server"
                raise httpx.HTTPStatusError(message, request=response.request, response=response)

    given = {name: value for name, value in options.items() if value is not None}
    # The SDK's own defaults.
    defaults = {"follow_redirects": True, "timeout": httpx.Timeout(30.0, read=300.0)}
    return httpx.AsyncClient(**{**defaults, **given}, event_hooks={"response": [check]})


class Closer:
    """Closes sessions, each in its own task, because a tool's blocked thread can stall one forever.

    Attributes:
        clean: False once a session could not be closed in time.
    """

    def __init__(self) -> None:
        self.clean = True
        self._closing: set[asyncio.Task[None]] = set()

    def close(self, session: McpSession) -> asyncio.Task[None]:
        """Start closing a session."""
        task = asyncio.ensure_future(_close(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def wait(self, grace: float, tasks: Iterable[asyncio.Task[None]] | None = None) -> bool:
        """Wait up to `grace` seconds for tasks of `close`, by default all; return False if some didn't finish."""
        waiting = list(self._closing if tasks is None else tasks)
        if not waiting:
            return True
        # Shielded, so that sessions close even if the rollout is being cancelled.
        with anyio.CancelScope(shield=True):
            _, late = await asyncio.wait(waiting, timeout=grace)
        self.clean = self.clean and not late
        return not late


async def _close(session: McpSession) -> None:
    try:
        await session.close()
    except Exception as exc:  # noqa: BLE001 - a server's shutdown code, or the transport
        _log.warning("an MCP session did not end well: %s", describe(exc))


async def is_alive(session: McpSession) -> bool:
    """Ping a session's server; return False if it doesn't answer within two seconds."""
    with anyio.move_on_after(_PING_SECONDS):
        try:
            await session.ping()
        except Exception as exc:  # noqa: BLE001 - any failure but "method not found" means that nobody answers
            return getattr(getattr(exc, "error", None), "code", None) == -32601
        return True
    return False


def sampling_callback(handler: SamplingHandler) -> SamplingCallback:
    """Adapt a handler to MCP's types."""

    async def answer(messages: Sequence[BaseModel], params: BaseModel, context: object) -> str:
        plain = params.model_dump(mode="json", by_alias=True)
        chat: list[Message] = []
        if plain.get("systemPrompt"):
            chat.append({"role": "system", "content": plain["systemPrompt"]})
        for message in messages:
            given = message.model_dump(mode="json", by_alias=True)
            chat.append({"role": given["role"], "content": _chat_content(given["content"])})
        names = {"temperature": "temperature", "max_tokens": "maxTokens", "stop": "stopSequences"}
        options = {ours: plain[theirs] for ours, theirs in names.items() if plain.get(theirs) is not None}
        reply = await handler(chat, options)
        content = reply.get("content") or ""
        return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)

    return answer


def _chat_content(content: JsonObject | list[JsonObject]) -> str | list[JsonObject]:
    blocks = content if isinstance(content, list) else [content]
    if all(block["type"] == "text" for block in blocks):
        return clean("\n".join(block["text"] for block in blocks))
    return [_chat_part(block) for block in blocks]


def _chat_part(block: Mapping[str, str]) -> JsonObject:
    if block["type"] == "text":
        return {"type": "text", "text": clean(block["text"])}
    if block["type"] == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}
    if block["type"] == "audio":
        form = block["mimeType"].rpartition("/")[2]
        return {"type": "input_audio", "input_audio": {"data": block["data"], "format": form}}
    raise ValueError(f"content of type {block['type']!r} can't be sent to the model")
