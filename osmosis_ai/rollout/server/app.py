"""The remote rollout protocol as an ASGI application."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from osmosis_ai.errors import OsmosisError
from osmosis_ai.rollout.core.base import RolloutAgentLoop
from osmosis_ai.rollout.core.schemas import RolloutRequest
from osmosis_ai.rollout.runner import InProcessRunner, RolloutRunner
from osmosis_ai.rollout.server.requests import (
    RefusedError,
    authorize,
    check_sender,
    json_response,
    named_hosts,
    parse,
    read_body,
    refused,
)
from osmosis_ai.rollout.server.rollouts import Rollouts, UnavailableError
from osmosis_ai.rollout.server.workflows import create_rollout_server
from osmosis_ai.rollout.settings import ClientSettings, ServerSettings, client_settings, server_settings
from osmosis_ai.rollout.vocabulary import API_KEY_VARIABLE

__all__ = ["API_KEY_VARIABLE", "DEBUG_DIR_VARIABLE", "build_app", "create_app", "create_rollout_server", "debug_folder"]

logger = logging.getLogger(__name__)

TRAINER_KEY_VARIABLE = "OSMOSIS_ROLLOUT_TRAINER_API_KEY"
DEBUG_DIR_VARIABLE = "ROLLOUT_DEBUG_DIR"


def create_app(
    agent_loop: RolloutAgentLoop | type[RolloutAgentLoop],
    *,
    max_concurrent: int | None = None,
    record_ttl_seconds: float | None = None,
    request_timeout_seconds: float | None = None,
    shutdown_grace_seconds: float | None = None,
    api_key: str | None = None,
    debug_dir: str | Path | None = None,
    undelivered_dir: str | Path | None = None,
    allow_rewrites: bool = False,
) -> Starlette:
    """Create an ASGI application that serves an agent loop to a trainer; run it with any ASGI server.

    The loop runs in the importing process, on the server's event loop: a loop that blocks also blocks the server.
    `osmosis serve` runs loops in worker processes. Creating the application neither checks nor starts the loop.

    Example:
        app = create_app(MyLoop)  # in server.py; then: uvicorn server:app

    Args:
        agent_loop: The agent loop, or its class.
        max_concurrent: Maximum number of running rollouts; further ones wait. Default: the environment, else 100.
        record_ttl_seconds: Time for which a finished rollout is remembered, so that a repeated request starts nothing.
            Default: the environment, else 3600.
        request_timeout_seconds: Time limit for one rollout. Default: the environment, else 1800.
        shutdown_grace_seconds: Time that running rollouts have to finish when the server stops. Default: the
            environment, else 30.
        api_key: The key that trainers must send. Default: `OSMOSIS_ROLLOUT_API_KEY`. Without a key, anyone who reaches
            the server can start rollouts.
        debug_dir: A folder for the files of `ctx.log_event`, which go into a subfolder named after the time. Default:
            `ROLLOUT_DEBUG_DIR`, else no files.
        undelivered_dir: A folder for results that the trainer doesn't accept. Default: `.osmosis/undelivered`.
        allow_rewrites: True to let a loop change messages it has sent.

    Raises:
        UsageError: A setting is invalid.
        ValueError: The key is empty.
    """
    settings = server_settings(
        max_concurrent_rollouts=max_concurrent,
        record_ttl_seconds=record_ttl_seconds,
        request_timeout_seconds=request_timeout_seconds,
        shutdown_grace_seconds=shutdown_grace_seconds,
    )
    client = client_settings()
    runner = InProcessRunner(
        agent_loop,
        timeout=settings.request_timeout_seconds,
        debug_dir=debug_folder(debug_dir),
        allow_rewrites=allow_rewrites,
        client=client,
    )
    return build_app(
        runner,
        settings=settings,
        client=client,
        api_key=os.environ.get(API_KEY_VARIABLE, "").strip() or None if api_key is None else api_key,
        undelivered=Path(undelivered_dir) if undelivered_dir is not None else None,
        notice=(
            f"the agent loop {runner.name!r} runs in this server's own process and blocks it whenever it blocks. "
            "`osmosis serve` runs it in workers."
        ),
    )


def build_app(
    runner: RolloutRunner,
    *,
    settings: ServerSettings,
    client: ClientSettings,
    api_key: str | None = None,
    undelivered: Path | None = None,
    notice: str | None = None,
) -> Starlette:
    """Create the application for a runner, which starts and closes with it; raises ValueError if the key is empty.

    Args:
        runner: Runs the rollouts.
        settings: Limits and times. The runner enforces the time limit of a rollout.
        client: Settings for delivering results.
        api_key: The key that trainers must send, None for no check.
        undelivered: The folder for results that the trainer doesn't accept.
        notice: A warning to log when the application starts.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty: pass a key, or None for a server without one")
    folder = undelivered or Path(".osmosis", "undelivered").absolute()
    # The request chooses the address that gets this key, so use it only if requests are authenticated.
    trainer_key = os.environ.get(TRAINER_KEY_VARIABLE, "").strip() or None if api_key is not None else None
    rollouts = Rollouts(runner, settings, client, folder, trainer_key)
    # A header can't carry the spaces or the line break around a key.
    key = None if api_key is None else api_key.strip().encode()
    allowed = named_hosts(settings.allowed_hosts)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with rollouts.serving():
            if notice:
                logger.warning(notice)
            yield

    async def init(http: Request) -> Response:
        check_sender(http, allowed, key)
        # Check the key first: without it, not even the body is read.
        authorize(http, key)
        request = parse(RolloutRequest, await read_body(http))
        try:
            return Response(await rollouts.accept(request), 202, media_type="application/json")
        except UnavailableError as error:
            raise RefusedError(503, str(error)) from error
        except OsmosisError as error:
            raise RefusedError(500, str(error)) from error

    # Open, as the protocol wants it: it shows a name and counts.
    async def health(http: Request) -> Response:
        check_sender(http, allowed, key)
        return _health(rollouts, runner.name)

    async def platform_health(http: Request) -> Response:
        check_sender(http, allowed, key)
        if key is None:
            raise RefusedError(404, "this server has no key to check")
        authorize(http, key)
        return _health(rollouts, runner.name)

    return Starlette(
        routes=[
            Route("/v1/rollout/init", init, methods=["POST"]),
            Route("/health", health),
            Route("/platform/health", platform_health),
        ],
        exception_handlers={HTTPException: refused, RefusedError: refused},
        lifespan=lifespan,
    )


def debug_folder(debug_dir: str | Path | None) -> Path | None:
    """Return a folder for one server's debug files, named after the time, in `debug_dir` or `ROLLOUT_DEBUG_DIR`."""
    above = debug_dir or os.environ.get(DEBUG_DIR_VARIABLE)
    return Path(above).absolute() / time.strftime("%Y%m%d_%H%M%S") if above else None


def _health(rollouts: Rollouts, name: str) -> Response:
    status = {"status": "stopping" if rollouts.is_stopping else "healthy", "agent_loop": name}
    return json_response({**status, **msgspec.to_builtins(rollouts.figures)})
