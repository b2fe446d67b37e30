"""The server for a worker's life, and one MCP session for each rollout.

Everything goes through `fastmcp.Client`, so any server works: one of this process, a URL, an `mcp.json`.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import anyio

from osmosis_ai.errors import RepositoryError, ToolError
from osmosis_ai.failures import FailureKind
from osmosis_ai.mcp_tools.conversion import clean, convert_result, convert_tool
from osmosis_ai.mcp_tools.direct import TOOL_CALLS_ONLY, DirectServer, DirectSession, direct_server
from osmosis_ai.records import Message, Record, Tool
from osmosis_ai.tracebacks import describe, locate
from osmosis_ai.urls import UrlError, http_url, redact_urls

__all__ = ["CallOutcome", "SamplingHandler", "ToolHost", "ToolSession", "read_config"]

SamplingHandler: TypeAlias = Callable[[list[Message], dict[str, Any]], Awaitable[Message]]
"""Answers a tool's request to the model.

It gets chat messages and parameters (`temperature`, `max_tokens`, `stop`; absent when the tool named none) and gives
the assistant message. What it raises fails the tool's request, not the rollout.
"""

_PING_SECONDS = 2.0
_log = logging.getLogger(__name__)


class CallOutcome(Record, frozen=True):
    """What a tool call came to.

    `text` is for the model, also when the call failed; `error` is None or the cause, as in `records.ToolCall.error`;
    `content` keeps what the text only mentions: images, files, structured content.
    """

    text: str
    error: FailureKind | None = None
    content: Any = None


class _Backend(NamedTuple):
    """One MCP server: what `fastmcp.Client` takes, the prefix of its tools' names, and its name in messages."""

    source: Any
    prefix: str
    label: str


class _Route(NamedTuple):
    """Where a tool's calls go: the server, the tool's own name there, and its JSON Schema."""

    backend: _Backend
    name: str
    schema: dict[str, Any]


class ToolHost:
    """A repository's tools: the server for a worker's life, as an async context manager.

    It keeps a session of its own open, so that the lifespan of a `fastmcp.FastMCP` server runs once and not once per
    rollout. (The SDK's own servers run theirs for every session; that is how they are made. And fastmcp 2.14 ends a
    lifespan by cancelling it, so that only what stands in a `finally` runs at its end.)

    Args:
        source: A server object, an http(s) URL, or the content of an `mcp.json` (see `read_config`).
        root: The repository's root folder, for the user's file and line in errors.
        start_timeout: Seconds a server may take to start and list its tools.
        grace: Seconds the server may take to shut down.
        limit: Makes the scope that cancels a call after so many seconds.

    Attributes:
        tools: The tools as the model sees them, in the server's order; there may be none.
        clean: False once the server, or a session, could not be closed in time. The process should then be replaced.
    """

    def __init__(
        self,
        source: Any,
        *,
        root: Path | None = None,
        start_timeout: float = 60.0,
        grace: float = 5.0,
        limit: Callable[[float], AbstractContextManager[object, bool]] = anyio.move_on_after,
    ) -> None:
        self.tools: list[Tool] = []
        self.clean = True
        self._backends = _backends(source)
        self._root = root
        self._start_timeout = start_timeout
        self._grace = grace
        self._limit = limit
        self._routes: dict[str, _Route] = {}
        self._validators: dict[str, Any] = {}
        self._own: list[Any] = []
        self._direct: dict[str, DirectServer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ToolHost:
        try:
            for backend in self._backends:
                tools = await self._start(backend)
                self._add_tools(backend, tools)
                direct = await direct_server(backend.source, tools)
                if direct is not None:
                    self._direct[backend.prefix] = direct
        except BaseException:
            await self._shut_down()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._shut_down()

    def session(
        self,
        *,
        meta: Mapping[str, Any] | None = None,
        sampling_handler: SamplingHandler | None = None,
        grace: float = 2.0,
    ) -> ToolSession:
        """Give one rollout's MCP session, an async context manager.

        Args:
            meta: Sent as `_meta` with every call.
            sampling_handler: Answers what tools ask the model (`ctx.sample`); without one such requests fail.
            grace: Seconds that closing the session may take.
        """
        return ToolSession(self, dict(meta or {}), sampling_handler, grace)

    def _new_client(self, backend: _Backend, sampling_handler: SamplingHandler | None) -> Any:
        """A client for a session of its own, not yet connected."""
        direct = self._direct.get(backend.prefix)
        if direct is None:
            return _client(backend, sampling_handler)
        return direct.session(None if sampling_handler is None else _sampling_callback(sampling_handler))

    async def _start(self, backend: _Backend) -> list[Any]:
        from pydantic import ValidationError

        _contain_exits(backend.source)
        try:
            client = _client(backend, None)
        except ValidationError as exc:
            # Without pydantic's own text: it shows the values, and those of `env` and `headers` are secrets.
            found = {f"{error['loc'][-1]}: {error['msg']}" for error in exc.errors(include_url=False)}
            raise RepositoryError(f"{backend.label} is not configured right: {'; '.join(sorted(found))}") from None
        except Exception as exc:
            raise self._start_failure(backend, exc) from exc
        self._own.append(client)
        try:
            with anyio.fail_after(self._start_timeout):
                await client.__aenter__()
                tools: list[Any] = await client.list_tools()
                return tools
        except TimeoutError as exc:
            seconds = f"{self._start_timeout:g} s"
            raise RepositoryError(f"{backend.label} did not start within {seconds}") from exc
        except Exception as exc:
            raise self._start_failure(backend, exc) from exc

    def _start_failure(self, backend: _Backend, exc: Exception) -> RepositoryError:
        # fastmcp wraps what stopped the server in a RuntimeError of its own.
        cause = exc.__cause__ if isinstance(exc, RuntimeError) and exc.__cause__ is not None else exc
        while isinstance(members := getattr(cause, "exceptions", None), (tuple, list)) and members:
            cause = members[0]
        place = locate(exc, self._root) if self._root is not None else None
        text = redact_urls(describe(cause))
        if place is not None:
            return RepositoryError(f"{place}: {text}\n    {place.text}\nThat is why {backend.label} did not start.")
        return RepositoryError(f"{backend.label} did not start: {text}")

    def _add_tools(self, backend: _Backend, tools: Iterable[Any]) -> None:
        for tool in tools:
            plain = tool.model_dump(mode="json", by_alias=True)
            function = convert_tool(plain, backend.prefix)
            name = function["function"]["name"]
            if name in self._routes:
                other = self._routes[name].backend.label
                raise RepositoryError(f"two tools are called {name!r}, one of {other} and one of {backend.label}")
            self._routes[name] = _Route(backend, plain["name"], function["function"]["parameters"])
            self.tools.append(function)

    async def _shut_down(self) -> None:
        # Rollouts' sessions end before the session that holds the lifespan.
        await self._wait_closed(self._closing, self._grace)
        await self._wait_closed([self._close(client) for client in self._own], self._grace)
        self._own.clear()

    def _close(self, client: Any) -> asyncio.Task[None]:
        """Start closing a client. A task of its own, because a tool's blocked thread can hold it up for good."""
        task = asyncio.ensure_future(_close_client(client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _wait_closed(self, tasks: Iterable[asyncio.Task[None]], grace: float) -> bool:
        waiting = list(tasks)
        if waiting:
            with anyio.CancelScope(shield=True):
                _, late = await asyncio.wait(waiting, timeout=grace)
            if late:
                self.clean = False
                return False
        return True

    def _invalid(self, name: str, arguments: dict[str, Any]) -> list[Any]:
        """Give what in the arguments doesn't fit the tool's schema, the first errors only."""
        import jsonschema  # type: ignore[import-untyped]
        import referencing

        if name not in self._validators:
            schema = self._routes[name].schema
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            try:
                kind.check_schema(schema)
            except jsonschema.SchemaError:
                self._validators[name] = None
            else:
                # A registry of its own: the default one would fetch a remote $ref.
                self._validators[name] = kind(schema, registry=referencing.Registry())
        validator = self._validators[name]
        if validator is None:
            return []
        try:
            return [error for error, _ in zip(validator.iter_errors(arguments), range(5), strict=False)]
        except (referencing.exceptions.Unresolvable, re.error, RecursionError):
            return []  # the schema itself is at fault, so it says nothing about the arguments


class ToolSession:
    """One rollout's MCP session, from `ToolHost.session`. It is opened by the first tool call.

    Attributes:
        clean: False after the exit when the session could not be closed in time: a tool's thread is still blocked.
    """

    def __init__(
        self, host: ToolHost, meta: dict[str, Any], sampling_handler: SamplingHandler | None, grace: float
    ) -> None:
        self.clean = True
        self._host = host
        self._meta = meta
        self._sampling_handler = sampling_handler
        self._grace = grace
        self._clients: dict[str, Any] = {}
        self._opening = asyncio.Lock()
        self._closing: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for prefix in list(self._clients):
            self._drop(prefix, self._clients[prefix])
        self.clean = await self._host._wait_closed(self._closing, self._grace)

    async def call(self, name: str, arguments: str | dict[str, Any], *, timeout: float) -> CallOutcome:  # noqa: ASYNC109
        """Call a tool. Whatever the tool does becomes an outcome; calls at the same time run concurrently.

        Args:
            name: The tool, as in `ToolHost.tools`.
            arguments: The JSON text the model wrote, where an empty text counts as `{}`; or the object.
            timeout: Seconds the call may take, the opening of the session included. The tool is told to stop where
                the MCP SDK can do that (2.x), else it ends with the session at the latest.

        Returns:
            The outcome. Its `error` is `schema` when the server refused the arguments because of the tool's schema:
            a server may accept more than the schema says, such as "5" for a number, as it does in production.
        """
        route = self._host._routes.get(name)
        if route is None:
            return CallOutcome(_unknown(name, self._host._routes), "unknown_tool")
        try:
            values = _parse(arguments)
        except ToolError as exc:
            return CallOutcome(f"Error: {exc}", "bad_json")
        with self._host._limit(timeout):
            try:
                client = await self._connect(route.backend)
            except Exception as exc:  # noqa: BLE001 - the connection's failure, of whatever transport
                text = redact_urls(describe(exc))
                return CallOutcome(f"Error: no connection to the tool server: {text}", "session")
            try:
                if isinstance(client, DirectSession):
                    answer = await client.call_tool(route.name, values, dict(self._meta))
                else:
                    found = await client.call_tool_mcp(route.name, values, meta=dict(self._meta) or None)
                    answer = found.model_dump(mode="json", by_alias=True)
            except Exception as exc:  # noqa: BLE001 - the server's failure, of whatever transport
                return await self._failed(name, route, client, values, exc)
            return self._outcome(name, values, answer)
        text = f"Error: tool {name!r} did not answer within {timeout:g} seconds"
        current = self._clients.get(route.backend.prefix)
        if current is not None and not await _alive(current):
            self._drop(route.backend.prefix, current)
            return CallOutcome(f"{text}, and the connection to it was lost", "session")
        return CallOutcome(text, "timeout")

    async def _connect(self, backend: _Backend) -> Any:
        async with self._opening:
            if backend.prefix not in self._clients:
                client = self._host._new_client(backend, self._sampling_handler)
                try:
                    await client.__aenter__()
                except BaseException:
                    self._closing.append(self._host._close(client))
                    raise
                self._clients[backend.prefix] = client
            return self._clients[backend.prefix]

    def _drop(self, prefix: str, client: Any) -> None:
        """Close a session, so that the next call opens a new one; once, whoever sees first that it is broken."""
        if self._clients.get(prefix) is client:
            del self._clients[prefix]
            self._closing.append(self._host._close(client))

    def _outcome(self, name: str, arguments: dict[str, Any], result: dict[str, Any]) -> CallOutcome:
        text, content = convert_result(result)
        if not result.get("isError"):
            return CallOutcome(text, None, content)
        if refused := self._refused(name, arguments, text):
            return CallOutcome(refused, "schema", content)
        return CallOutcome(_error_text(text), "exception", content)

    async def _failed(
        self, name: str, route: _Route, client: Any, arguments: dict[str, Any], exc: Exception
    ) -> CallOutcome:
        text = clean(str(exc) or type(exc).__name__)
        # An answer that breaks the protocol and a connection that broke look alike; a ping tells them apart.
        if not await _alive(client):
            self._drop(route.backend.prefix, client)
            lost = "Error: the connection to the tool server was lost"
            return CallOutcome(f"{lost}: {redact_urls(text)}", "session")
        if refused := self._refused(name, arguments, text):
            return CallOutcome(refused, "schema")
        return CallOutcome(_error_text(text), "exception")

    def _refused(self, name: str, arguments: dict[str, Any], text: str) -> str | None:
        """Say what is wrong with the arguments if that is why the server answered with an error, else None."""
        errors = self._host._invalid(name, arguments)
        if not _REFUSAL.search(text) and all(_may_be_coerced(error) for error in errors):
            return None
        if not errors:
            return _error_text(text)
        return clean(f"Error: invalid arguments for tool {name!r}: {'; '.join(_problem(error) for error in errors)}")


_REFUSAL = re.compile(r"Input validation error|\d+ validation errors? for (call\[|\w+Arguments\b)")
"""How servers begin when they refuse arguments: the SDKs' low-level servers, FastMCP, the Python SDK."""


def read_config(path: Path) -> dict[str, Any]:
    """Read an `mcp.json`: `{"mcpServers": {name: {"command", "args", "env", "cwd"} or {"url", "headers"}}}`.

    Args:
        path: The file.

    Returns:
        Its content, for `ToolHost`.

    Raises:
        RepositoryError: The file can't be read, isn't JSON, or names no servers.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise RepositoryError(f"{path}: can't be read: {exc.strerror or exc}") from exc
    except json.JSONDecodeError as exc:
        raise RepositoryError(f"{path}:{exc.lineno}: is not JSON: {exc.msg} (column {exc.colno})") from exc
    except ValueError as exc:
        raise RepositoryError(f"{path}: is not JSON: {exc}") from exc
    servers = config.get("mcpServers") if isinstance(config, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise RepositoryError(f'{path}: has no servers; write {{"mcpServers": {{"name": {{"url": "http://…"}}}}}}')
    for name, server in servers.items():
        entry = server if isinstance(server, dict) else {}
        url, command = entry.get("url"), entry.get("command")
        if isinstance(url, str) == isinstance(command, str):
            raise RepositoryError(f'{path}: server {name!r} needs either a "url" or a "command"')
        if isinstance(url, str):
            try:
                http_url(url)
            except UrlError as exc:
                raise RepositoryError(f"{path}: server {name!r}: its url {exc}") from None
    return dict(config)


def _backends(source: Any) -> list[_Backend]:
    if isinstance(source, str):
        try:
            http_url(source)
        except UrlError as exc:
            raise RepositoryError(f"{redact_urls(source)}: the URL of an MCP server {exc}") from None
        return [_Backend(source, "", f"the MCP server at {redact_urls(source)}")]
    if isinstance(source, dict):
        servers = source["mcpServers"]
        # A client for each server, not fastmcp's router for all: behind the router a rollout has no session of its own.
        return [
            _Backend({"mcpServers": {name: entry}}, f"{name}_" if len(servers) > 1 else "", f"the MCP server {name!r}")
            for name, entry in servers.items()
        ]
    return [_Backend(source, "", f"the MCP server {getattr(source, 'name', type(source).__name__)!r}")]


def _client(backend: _Backend, sampling_handler: SamplingHandler | None) -> Any:
    from fastmcp import Client

    options: dict[str, Any] = {}
    if sampling_handler is not None:
        options["sampling_handler"] = _sampling_callback(sampling_handler)
    if "mode" in inspect.signature(Client.__init__).parameters:
        # Since protocol 2026-07-28 there are no sessions; what a server keeps per session would be lost at every call.
        options["mode"] = "legacy"
    return Client(backend.source, **options)


async def _close_client(client: Any) -> None:
    try:
        # Ends the session and, for a stdio server, its process, which the end of the session alone leaves running.
        await client.close()
    except Exception as exc:  # noqa: BLE001 - a server's shutdown code, or the transport
        _log.warning("an MCP session did not end well: %s", describe(exc))


async def _alive(client: Any) -> bool:
    with anyio.move_on_after(_PING_SECONDS):
        try:
            await client.ping()
        except Exception as exc:  # noqa: BLE001 - any failure but "method not found" means that nobody answers
            return getattr(getattr(exc, "error", None), "code", None) == -32601
        return True
    return False


def _contain_exits(server: Any) -> None:
    """Turn what a tool may raise beside an Exception into a tool error; a SystemExit would end the event loop.

    The SDK 1.x has no public place for that: there such a tool ends its worker.
    """
    from fastmcp import FastMCP
    from fastmcp.exceptions import ToolError as FastMCPToolError
    from fastmcp.server.middleware import Middleware

    if isinstance(server, FastMCP):

        class ContainExits(Middleware):
            # Not on_call_tool, because what finds the hooks to call costs more than all else here.
            async def __call__(self, context: Any, call_next: Any) -> Any:
                try:
                    return await call_next(context)
                except BaseException as exc:
                    if context.method != "tools/call" or not _must_be_contained(exc):
                        raise
                    raise FastMCPToolError(f"the tool raised {describe(exc)}") from exc

        setattr(ContainExits, TOOL_CALLS_ONLY, True)
        server.add_middleware(ContainExits())
        return
    chain = getattr(server, "middleware", None)
    if isinstance(chain, list):

        async def contain_exits(context: Any, call_next: Any) -> Any:
            try:
                return await call_next(context)
            except BaseException as exc:
                if context.method != "tools/call" or not _must_be_contained(exc):
                    raise
                text = f"the tool raised {describe(exc)}"
                return {"content": [{"type": "text", "text": text}], "isError": True}

        chain.append(contain_exits)


def _must_be_contained(exc: BaseException) -> bool:
    if isinstance(exc, asyncio.CancelledError):
        # One that nobody asked for escaped from something the tool awaits. Python 3.10 can't tell, so it passes there.
        cancelling = getattr(asyncio.current_task(), "cancelling", None)
        return cancelling is not None and cancelling() == 0
    return not isinstance(exc, (Exception, GeneratorExit))


def _sampling_callback(handler: SamplingHandler) -> Callable[..., Awaitable[str]]:
    async def answer(messages: list[Any], params: Any, context: Any) -> str:
        plain = params.model_dump(mode="json", by_alias=True)
        chat: list[Message] = []
        if plain.get("systemPrompt"):
            chat.append({"role": "system", "content": plain["systemPrompt"]})
        for message in messages:
            given = message.model_dump(mode="json", by_alias=True)
            chat.append({"role": given["role"], "content": _chat_content(given["content"])})
        options = {
            "temperature": plain.get("temperature"),
            "max_tokens": plain.get("maxTokens"),
            "stop": plain.get("stopSequences"),
        }
        reply = await handler(chat, {key: value for key, value in options.items() if value is not None})
        content = reply.get("content") or ""
        return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)

    return answer


def _chat_content(content: Any) -> str | list[dict[str, Any]]:
    blocks = content if isinstance(content, list) else [content]
    if all(block["type"] == "text" for block in blocks):
        return clean("\n".join(block["text"] for block in blocks))
    return [_chat_part(block) for block in blocks]


def _chat_part(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": clean(block["text"])}
    if block["type"] == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}
    if block["type"] == "audio":
        form = block["mimeType"].rpartition("/")[2]
        return {"type": "input_audio", "input_audio": {"data": block["data"], "format": form}}
    raise ValueError(f"content of type {block['type']!r} can't be sent to the model")


def _parse(arguments: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    if not arguments.strip():
        return {}
    try:
        values = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise ToolError(f"the arguments are not valid JSON: {exc}", kind="bad_json") from exc
    if not isinstance(values, dict):
        kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        found = kinds.get(type(values), "a number")
        raise ToolError(f"the arguments must be a JSON object, and not {found}", kind="bad_json")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


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


def _may_be_coerced(error: Any) -> bool:
    """Whether a lenient server may accept this: a text for a number and the like."""
    return error.validator == "type" and isinstance(error.instance, (str, int, float))


def _problem(error: Any) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    text = " ".join(_leaves(error))
    text = text if len(text) <= 300 else text[:299] + "…"
    return f"{where[1:]}: {text}" if where.startswith(".") else f"{where}: {text}" if where else text


def _leaves(error: Any) -> Iterator[str]:
    yield error.message
    if error.validator in ("anyOf", "oneOf") and error.context:
        yield f"({', or '.join(inner.message for inner in error.context[:4])})"
