"""Serve an application from a script or a command: the socket, the key, the server."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osmosis_ai.collector import calm_collector
from osmosis_ai.errors import UsageError
from osmosis_ai.rollout.core.base import RolloutAgentLoop
from osmosis_ai.rollout.server.app import API_KEY_VARIABLE, create_app
from osmosis_ai.rollout.validator import validate_agent_loop
from osmosis_ai.urls import is_loopback

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

__all__ = [
    "address_of",
    "choose_api_key",
    "make_server",
    "open_socket",
    "serve_agent_loop",
]

BACKLOG = 2048
CLOSE_TIMEOUT = 10
"""Seconds that open connections have to close when the server stops, before it stops its rollouts."""


def serve_agent_loop(
    agent_loop: RolloutAgentLoop | type[RolloutAgentLoop],
    host: str = "127.0.0.1",
    port: int = 9000,
    *,
    validate: bool = True,
    log_level: str = "info",
    api_key: str | None = None,
    local_debug: bool = False,
    skip_register: bool = True,
    max_concurrent: int | None = None,
    record_ttl_seconds: float | None = None,
    request_timeout_seconds: float | None = None,
    shutdown_grace_seconds: float | None = None,
    debug_dir: str | Path | None = None,
    undelivered_dir: str | Path | None = None,
    allow_rewrites: bool = False,
) -> None:
    """Serve an agent loop in this process until it is told to stop; `osmosis serve` uses worker processes instead.

    Example:
        serve_agent_loop(MyLoop, port=9000)

    Args:
        agent_loop: The agent loop, or its class.
        host: The address to listen on; `0.0.0.0` makes the server reachable from other machines.
        port: The port, 0 for a free one.
        validate: Check the loop first.
        log_level: uvicorn's: `debug`, `info`, `warning`, `error`.
        api_key: The key that trainers must send. Default: `OSMOSIS_ROLLOUT_API_KEY`, else a generated key that is
            printed.
        local_debug: Serve without a key, on loopback only.
        skip_register: No effect yet: platform registration isn't available.
        max_concurrent, record_ttl_seconds, request_timeout_seconds, shutdown_grace_seconds, debug_dir,
        undelivered_dir, allow_rewrites: As for `create_app`.

    Raises:
        AgentLoopError: The loop isn't valid.
        UsageError: The address can't be used, or a setting is invalid.
    """
    if validate:
        validate_agent_loop(agent_loop).raise_if_invalid()
    key, is_new = choose_api_key(api_key, local=local_debug, host=host)
    app = create_app(
        agent_loop,
        max_concurrent=max_concurrent,
        record_ttl_seconds=record_ttl_seconds,
        request_timeout_seconds=request_timeout_seconds,
        shutdown_grace_seconds=shutdown_grace_seconds,
        api_key=key,
        debug_dir=debug_dir,
        undelivered_dir=undelivered_dir,
        allow_rewrites=allow_rewrites,
    )
    listener = open_socket(host, port)
    print(f"serving the agent loop at {address_of(listener)}", file=sys.stderr)
    if is_new:
        print(f"API key (generated for this start; set {API_KEY_VARIABLE} to use a fixed one): {key}", file=sys.stderr)
    make_server(app, log_level).run([listener])


def choose_api_key(given: str | None, *, local: bool, host: str) -> tuple[str | None, bool]:
    """Return the server's key, and True if it was generated now and has to be shown once.

    It is the given key, else `OSMOSIS_ROLLOUT_API_KEY`, else a new one; None if the server is local.

    Raises:
        UsageError: The server is local but the host isn't loopback, or the key is empty.
    """
    if local:
        if not is_loopback(host):
            raise UsageError(f"without a key the server listens on loopback only, not on {host}: use 127.0.0.1")
        return None, False
    if given is not None and not given.strip():
        raise UsageError("the API key is empty")
    # A variable filled from a file often ends with the file's line break, which no header can carry.
    found = (given or os.environ.get(API_KEY_VARIABLE, "")).strip()
    return (found, False) if found else (secrets.token_urlsafe(32), True)


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket before anything starts; raises UsageError if the address can't be used."""
    if not 0 <= port <= 65535:
        # getaddrinfo would silently use the port modulo 65536.
        raise UsageError(f"can't listen on port {port} of {host}: ports go from 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        # Name the protocol, because asyncio sets TCP_NODELAY only if it is named: without it, an answer of two writes
        # would wait 40 ms for the client's delayed acknowledgement.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        try:
            # On Windows, the option would let another program take the port.
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    # `getaddrinfo` raises UnicodeError for a name that no host can have.
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"can't listen on port {port} of {host}: {reason}; choose another port or host") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: ASGIApp, log_level: str, *, signals: bool = True, **options: Any) -> uvicorn.Server:
    """Create a loaded server that needs only sockets; the options are uvicorn's.

    Without `signals`, it leaves them to the program that it runs in.
    """
    import uvicorn

    class WithoutSignals(uvicorn.Server):
        def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
            return nullcontext()

    from osmosis_ai.rollout.server.connections import BoundedProtocol, connection_limit, raise_descriptor_limit

    raise_descriptor_limit()
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        # asyncio accepts as many connections at a time, some turns before the protocol can count them.
        backlog=min(BACKLOG, connection_limit() // 8),
        log_level=log_level,
        access_log=log_level in ("debug", "trace"),
        # With uvicorn's default, an application whose start-up fails may be served all the same.
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=CLOSE_TIMEOUT,
        **options,
    )
    config.load()
    # Collect now, because requests would wait for the collector.
    gc.collect()
    calm_collector()
    return uvicorn.Server(config) if signals else WithoutSignals(config)
