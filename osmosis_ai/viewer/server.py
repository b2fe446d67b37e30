"""Serve the viewer until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from osmosis_ai.masking import Masker
from osmosis_ai.rollout.server.serve import make_server
from osmosis_ai.viewer.app import build_app
from osmosis_ai.viewer.security import Guard, OneToken
from osmosis_ai.viewer.stores import Stores

__all__ = ["make_viewer", "serve_viewer"]


def make_viewer(
    stores: Stores, listener: socket.socket, host: str, masker: Masker | None = None
) -> tuple[uvicorn.Server, str]:
    """Create a viewer's server for this socket, and the token that its first URL must contain."""
    # The function is first called when the server, made below, answers requests.
    app = build_app(stores, lambda: server.should_exit, masker)
    access = OneToken(app)
    guard = Guard(access, host=host, port=listener.getsockname()[1], lifespan=app)
    # Only critical errors, because a page that fails shows its own error.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    server = make_server(guard, "critical", log_config=None, server_header=False)
    return server, access.token


def serve_viewer(
    stores: Stores, listener: socket.socket, host: str, masker: Masker, ready: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM, which is raised again at the end.

    Calls `ready` with the token as soon as pages can be opened.
    """
    server, token = make_viewer(stores, listener, host, masker)

    async def serve() -> None:
        # The socket is already listening, so requests that arrive before the server runs just wait.
        ready(token)
        await server.serve(sockets=[listener])

    asyncio.run(serve())
