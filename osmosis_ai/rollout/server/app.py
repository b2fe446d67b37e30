"""The remote rollout protocol as an ASGI application."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import time
from collections.abc import AsyncIterator, Container, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import msgspec
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from osmosis_ai.errors import OsmosisError
from osmosis_ai.rollout.core.base import RolloutAgentLoop
from osmosis_ai.rollout.core.schemas import RolloutRequest
from osmosis_ai.rollout.runner import InProcessRunner, RolloutRunner
from osmosis_ai.rollout.server.rollouts import Rollouts, UnavailableError
from osmosis_ai.rollout.settings import ClientSettings, ServerSettings, client_settings, server_settings
from osmosis_ai.urls import is_loopback

__all__ = ["API_KEY_VARIABLE", "DEBUG_DIR_VARIABLE", "MAX_BODY_BYTES", "build_app", "create_app", "debug_folder"]

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "OSMOSIS_ROLLOUT_API_KEY"
TRAINER_KEY_VARIABLE = "OSMOSIS_ROLLOUT_TRAINER_API_KEY"
ALLOWED_HOSTS_VARIABLE = "OSMOSIS_ROLLOUT_SERVER_ALLOWED_HOSTS"
DEBUG_DIR_VARIABLE = "ROLLOUT_DEBUG_DIR"
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DRAINED_BYTES = 32 * 1024 * 1024
BODY_TIMEOUT = 60.0
"""Seconds that a client has to send a request's body."""


class _RefusedError(Exception):
    """A refused request, with the status and detail of its answer."""

    def __init__(self, status_code: int, detail: object, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status_code = status_code
        self.detail = detail
        self.headers = headers


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
    # Only where none but trainers choose the address that gets it.
    trainer_key = os.environ.get(TRAINER_KEY_VARIABLE, "").strip() or None if api_key is not None else None
    rollouts = Rollouts(runner, settings, client, folder, trainer_key)
    # A header can't carry the spaces or the line break around a key.
    key = None if api_key is None else api_key.strip().encode()
    allowed = frozenset(name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with rollouts.serving():
            if notice:
                logger.warning(notice)
            yield

    async def init(http: Request) -> Response:
        _check_sender(http, allowed, key)
        # Check the key first: without it, not even the body is read.
        _authorize(http, key)
        request = _parse(await _body(http))
        try:
            return Response(await rollouts.accept(request), 202, media_type="application/json")
        except UnavailableError as error:
            raise _RefusedError(503, str(error)) from error
        except OsmosisError as error:
            raise _RefusedError(500, str(error)) from error

    async def health(http: Request) -> Response:
        _check_sender(http, allowed, key)
        return _health(rollouts, runner.name)

    async def platform_health(http: Request) -> Response:
        _check_sender(http, allowed, key)
        if key is None:
            raise _RefusedError(404, "this server has no key to check")
        _authorize(http, key)
        return _health(rollouts, runner.name)

    return Starlette(
        routes=[
            Route("/v1/rollout/init", init, methods=["POST"]),
            Route("/health", health),
            Route("/platform/health", platform_health),
        ],
        exception_handlers={HTTPException: _refused, _RefusedError: _refused},
        lifespan=lifespan,
    )


def debug_folder(debug_dir: str | Path | None) -> Path | None:
    """Return a folder for one server's debug files, named after the time, in `debug_dir` or `ROLLOUT_DEBUG_DIR`."""
    above = debug_dir or os.environ.get(DEBUG_DIR_VARIABLE)
    return Path(above).absolute() / time.strftime("%Y%m%d_%H%M%S") if above else None


def _check_sender(http: Request, allowed: Container[str], key: bytes | None) -> None:
    """Refuse requests of web pages, which the user's browser sends to this server without being asked."""
    host = http.headers.get("host", "")
    name = _host_name(host)
    server, _ = http.scope.get("server") or ("", None)
    # A page can give its own name this machine's address (DNS rebinding); it has no key, though.
    if (allowed or (key is None and is_loopback(server))) and not (name in allowed or is_loopback(name)):
        message = f"this server isn't called {name[:100]!r}; if it is, add that to {ALLOWED_HOSTS_VARIABLE}"
        raise _RefusedError(421, message)
    if (origin := http.headers.get("origin")) is not None and origin.partition("://")[2] != host:
        raise _RefusedError(403, "requests of web pages are refused: the header Origin names another host")
    sent = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # A page may send a few other types to any server.
    if http.method == "POST" and sent != "application/json":
        raise _RefusedError(415, "the body must be JSON: send it with the header Content-Type: application/json")


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _authorize(http: Request, key: bytes | None) -> None:
    if key is None:
        return
    scheme, _, sent = http.headers.get("authorization", "").partition(" ")
    # Compare even if the scheme is wrong, so that timing reveals nothing. Header bytes arrive as latin-1.
    is_right = hmac.compare_digest(sent.strip().encode("latin-1"), key)
    if scheme.lower() != "bearer" or not is_right:
        message = "the API key is missing or wrong: send it as `Authorization: Bearer <key>`"
        raise _RefusedError(401, message, headers={"WWW-Authenticate": "Bearer"})


async def _body(http: Request) -> bytes:
    announced = http.headers.get("content-length", "")
    size = int(announced) if announced.isascii() and announced.isdigit() else 0
    chunks: list[bytes] = []
    received = 0
    try:
        with anyio.fail_after(BODY_TIMEOUT):
            async for chunk in http.stream():
                received += len(chunk)
                size = max(size, received)
                if size <= MAX_BODY_BYTES:
                    chunks.append(chunk)
                # Keep reading for a while, because most clients read the answer only after sending everything.
                elif received > MAX_DRAINED_BYTES:
                    break
    except TimeoutError as error:
        raise _RefusedError(408, f"the body didn't arrive within {BODY_TIMEOUT:g} s") from error
    except ClientDisconnect as error:
        # Nobody reads this answer, but raising keeps the rollout from starting.
        raise _RefusedError(400, "the client disconnected before it had sent the whole body") from error
    if size > MAX_BODY_BYTES:
        raise _RefusedError(413, f"the body is over {MAX_BODY_BYTES} bytes", headers={"Connection": "close"})
    return b"".join(chunks)


def _parse(body: bytes) -> RolloutRequest:
    try:
        return RolloutRequest.model_validate_json(body)
    except ValidationError as error:
        # Without the input, which may contain the trainer's key.
        found = error.errors(include_url=False, include_input=False, include_context=False)
        if found[0]["type"] == "json_invalid":
            raise _RefusedError(400, f"the body isn't JSON: {found[0]['msg']}") from error
        # Drop the prefix that pydantic adds to a validator's message.
        raise _RefusedError(422, [{**one, "msg": one["msg"].removeprefix("Value error, ")} for one in found]) from error


def _health(rollouts: Rollouts, name: str) -> Response:
    status = {"status": "stopping" if rollouts.is_stopping else "healthy", "agent_loop": name}
    return _json({**status, **msgspec.to_builtins(rollouts.figures)})


async def _refused(_: Request, error: Exception) -> Response:
    # Registered for two kinds: our own, and Starlette's for unknown paths and methods.
    assert isinstance(error, (_RefusedError, HTTPException))
    return _json({"detail": error.detail}, error.status_code, error.headers)


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
