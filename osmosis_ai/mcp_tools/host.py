"""Run the MCP server for a worker's life, and open one session for each rollout.

Servers are reached by `fastmcp.Client`, so any kind works: one in this process, a URL, an `mcp.json`.
"""

from __future__ import annotations

import asyncio
import json
import re
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import anyio

from osmosis_ai.errors import RepositoryError
from osmosis_ai.mcp_tools.clients import Closer, McpSession, SamplingHandler, StreamSession
from osmosis_ai.mcp_tools.direct import TOOL_CALLS_ONLY, DirectServer, direct_server
from osmosis_ai.mcp_tools.session import Limit, ToolSession, note_raised
from osmosis_ai.mcp_tools.table import Backend, ToolTable
from osmosis_ai.records import JsonObject, Tool
from osmosis_ai.tracebacks import describe, locate
from osmosis_ai.urls import UrlError, http_url, redact_urls

__all__ = ["ToolHost", "read_config"]

END_SECONDS = 15.0
"""How long a server's command may take to end a second time."""
STDERR_LINES = 10


class ToolHost:
    """A repository's tools: an async context manager that runs the server for a worker's life.

    It keeps its own session open, so that the lifespan of a `fastmcp.FastMCP` server runs once, not once per rollout.
    (The SDK's own servers run theirs for every session, by design. fastmcp 2.14 ends a lifespan by cancelling it, so
    only code in a `finally` runs at its end.)

    Args:
        source: A server object, an http(s) URL, or the content of an `mcp.json` (see `read_config`).
        root: The repository's root folder, for the user's file and line in errors of the server and of tools.
        start_timeout: Seconds a server may take to start and list its tools.
        grace: Seconds the server may take to shut down.
        limit: Makes the scope that cancels a call after a number of seconds.
    """

    def __init__(
        self,
        source: object,
        *,
        root: Path | None = None,
        start_timeout: float = 60.0,
        grace: float = 5.0,
        limit: Limit = anyio.move_on_after,
    ) -> None:
        self._backends = _backends(source)
        self._root = root
        self._start_timeout = start_timeout
        self._grace = grace
        self._limit = limit
        self._table = ToolTable()
        self._own: list[StreamSession] = []
        self._direct: dict[str, DirectServer] = {}
        self._closer = Closer()

    @property
    def tools(self) -> list[Tool]:
        """The tools as the model sees them, in the server's order; may be empty."""
        return self._table.tools

    @property
    def clean(self) -> bool:
        """False once the server or a session could not be closed in time. The process should then be replaced."""
        return self._closer.clean

    async def __aenter__(self) -> ToolHost:
        try:
            for backend in self._backends:
                tools = await self._start(backend)
                self._table.add(backend, tools)
                direct = await direct_server(backend.source, tools)
                if direct is not None:
                    self._direct[backend.prefix] = direct
        except BaseException:
            await self._shut_down()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._shut_down()

    def session(
        self, *, meta: JsonObject | None = None, sampling_handler: SamplingHandler | None = None, grace: float = 2.0
    ) -> ToolSession:
        """Return one rollout's MCP session, an async context manager.

        Args:
            meta: Sent as `_meta` with every call.
            sampling_handler: Answers tools' requests to the model (`ctx.sample`); without one they fail.
            grace: Seconds that closing the session may take.
        """
        own = (self._table, self._open, self._closer, self._limit, self._root)
        return ToolSession(*own, meta=dict(meta or {}), sampling_handler=sampling_handler, grace=grace)

    def _open(self, backend: Backend, sampling: SamplingHandler | None) -> McpSession:
        direct = self._direct.get(backend.prefix)
        return StreamSession(backend.source, sampling) if direct is None else direct.session(sampling)

    async def _start(self, backend: Backend) -> list[JsonObject]:
        from pydantic import ValidationError

        _contain_exits(backend.source)
        try:
            session = StreamSession(backend.source, None)
        except ValidationError as exc:
            # Without pydantic's own text, which shows values: those of `env` and `headers` are secrets.
            found = {f"{error['loc'][-1]}: {error['msg']}" for error in exc.errors(include_url=False)}
            raise RepositoryError(f"{backend.label} is not configured right: {'; '.join(sorted(found))}") from None
        except Exception as exc:
            raise self._start_failure(backend, exc) from exc
        self._own.append(session)
        try:
            with anyio.fail_after(self._start_timeout):
                await session.__aenter__()
                return await session.list_tools()
        except TimeoutError as exc:
            raise RepositoryError(f"{backend.label} did not start within {self._start_timeout:g} s") from exc
        except Exception as exc:
            failure = self._start_failure(backend, exc)
            ended = await _how_it_ended(backend.source)
            raise RepositoryError(f"{failure}{ended}") from exc

    def _start_failure(self, backend: Backend, exc: Exception) -> RepositoryError:
        # fastmcp wraps the server's exception in its own RuntimeError.
        cause = exc.__cause__ if isinstance(exc, RuntimeError) and exc.__cause__ is not None else exc
        while isinstance(members := getattr(cause, "exceptions", None), (tuple, list)) and members:
            cause = members[0]
        place = locate(exc, self._root) if self._root is not None else None
        text = redact_urls(describe(cause))
        if place is not None:
            return RepositoryError(f"{place}: {text}\n    {place.text}\nThat is why {backend.label} did not start.")
        return RepositoryError(f"{backend.label} did not start: {text}")

    async def _shut_down(self) -> None:
        # Rollouts' sessions end before the session that holds the lifespan.
        await self._closer.wait(self._grace)
        await self._closer.wait(self._grace, [self._closer.close(session) for session in self._own])
        self._own.clear()


def read_config(path: Path) -> JsonObject:
    """Read an `mcp.json`: `{"mcpServers": {name: {"command", "args", "env", "cwd"} or {"url", "headers"}}}`.

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


def _backends(source: object) -> list[Backend]:
    if isinstance(source, str):
        try:
            http_url(source)
        except UrlError as exc:
            raise RepositoryError(f"{redact_urls(source)}: the URL of an MCP server {exc}") from None
        return [Backend(source, "", f"the MCP server at {redact_urls(source)}")]
    if isinstance(source, dict):
        servers = source["mcpServers"]
        # One client per server instead of fastmcp's router for all, behind which rollouts would share a session.
        return [
            Backend({"mcpServers": {name: entry}}, f"{name}_" if len(servers) > 1 else "", f"the MCP server {name!r}")
            for name, entry in servers.items()
        ]
    return [Backend(source, "", f"the MCP server {getattr(source, 'name', type(source).__name__)!r}")]


async def _how_it_ended(source: object) -> str:
    """Run the command of a server that did not start once more, and describe its end if it ends by itself."""
    from mcp.client.stdio import get_default_environment

    (server,) = source["mcpServers"].values() if isinstance(source, dict) else ({},)
    if "command" not in server:
        return ""
    command = [server["command"], *server.get("args", ())]
    environ = {**get_default_environment(), **server.get("env", {})}
    try:
        # With an open stdin, because a server that runs ends when its stdin does.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, cwd=server.get("cwd"), env=environ
        )
    except OSError:
        return ""
    said = b""
    with anyio.move_on_after(END_SECONDS) as scope:
        assert process.stderr is not None
        said = await process.stderr.read()
        await process.wait()
    if scope.cancelled_caught:
        process.kill()
        return ""
    lines = said.decode("utf-8", "replace").splitlines()[-STDERR_LINES:]
    return "\n".join([f"\nIts process ended at once, with exit code {process.returncode}.", *lines, *_no_run(command)])


def _no_run(command: list[str]) -> list[str]:
    """Say so if the command is a Python file that never starts a server."""
    for file in (Path(word) for word in command if word.endswith(".py")):
        if file.is_file() and not re.search(r"\brun(_\w+)?\(", file.read_text(encoding="utf-8", errors="replace")):
            return [f'{file} does not run its server; end it with: if __name__ == "__main__": mcp.run()']
    return []


class _McpRequest(Protocol):
    @property
    def method(self) -> str | None: ...
    @property
    def message(self) -> Any: ...


_Next: TypeAlias = Callable[[Any], Awaitable[object]]


def _contain_exits(server: object) -> None:
    """Turn a tool's BaseException into a tool error: a SystemExit would end the event loop. Note each tool's exception.

    The SDK 1.x has no public hook for that; with it, such a tool ends its worker. Only a FastMCP server's middleware
    sees exceptions; the SDK's own servers turn them into results before.
    """
    from fastmcp import FastMCP
    from fastmcp.exceptions import ToolError as FastMCPToolError
    from fastmcp.server.middleware import Middleware

    chain = getattr(server, "middleware", None)
    # In one process, several hosts may open the same server.
    if isinstance(chain, list) and any(hasattr(each, TOOL_CALLS_ONLY) for each in chain):
        return
    if isinstance(server, FastMCP):

        class ContainExits(Middleware):
            # Not on_call_tool: finding the hooks to call would cost more than everything else here.
            async def __call__(self, context: _McpRequest, call_next: _Next) -> object:
                try:
                    return await call_next(context)
                except BaseException as exc:
                    if context.method != "tools/call":
                        raise
                    note_raised(context.message.name, context.message.arguments, exc)
                    if not _must_be_contained(exc):
                        raise
                    raise FastMCPToolError(f"the tool raised {describe(exc)}") from exc

        setattr(ContainExits, TOOL_CALLS_ONLY, True)
        server.add_middleware(ContainExits())
        return
    if isinstance(chain, list):

        async def contain_exits(context: _McpRequest, call_next: _Next) -> object:
            try:
                return await call_next(context)
            except BaseException as exc:
                if context.method != "tools/call" or not _must_be_contained(exc):
                    raise
                text = f"the tool raised {describe(exc)}"
                return {"content": [{"type": "text", "text": text}], "isError": True}

        setattr(contain_exits, TOOL_CALLS_ONLY, True)
        chain.append(contain_exits)


def _must_be_contained(exc: BaseException) -> bool:
    if isinstance(exc, asyncio.CancelledError):
        # If nobody cancelled this task, the error escaped from something the tool awaits. Python 3.10 can't tell.
        cancelling = getattr(asyncio.current_task(), "cancelling", None)
        return cancelling is not None and cancelling() == 0
    return not isinstance(exc, (Exception, GeneratorExit))
