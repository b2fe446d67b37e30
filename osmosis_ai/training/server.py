"""The runtime's side of the trainer contract: an HTTP server on loopback."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from osmosis_ai.errors import OsmosisError
from osmosis_ai.rollout.server.serve import make_server
from osmosis_ai.tasks import task_group
from osmosis_ai.training.contract import (
    Batch,
    BatchRequest,
    Checkpoint,
    Evaluation,
    EvaluationRequest,
    Ready,
    StepMetrics,
)

__all__ = ["Answers", "serve_trainer"]

MAX_BODY_BYTES = 16 * 1024 * 1024
"""A trainer's requests hold rows, metrics and paths, but no model."""
Asked = TypeVar("Asked")


class Answers(NamedTuple):
    """A handler for each kind of trainer request. An OsmosisError becomes a 500 answer, which ends the trainer."""

    batch: Callable[[BatchRequest], Awaitable[Batch]]
    evaluation: Callable[[EvaluationRequest], Awaitable[Evaluation]]
    metrics: Callable[[StepMetrics], Awaitable[None]]
    checkpoint: Callable[[Checkpoint], Awaitable[None]]
    ready: Callable[[Ready], Awaitable[None]]


@asynccontextmanager
async def serve_trainer(answers: Answers, token: str, listener: socket.socket) -> AsyncIterator[None]:
    """Answer a trainer's requests on `listener` during the block."""
    app = Starlette(
        routes=[
            Route("/v1/batches", _endpoint(BatchRequest, answers.batch, token), methods=["POST"]),
            Route("/v1/evaluations", _endpoint(EvaluationRequest, answers.evaluation, token), methods=["POST"]),
            Route("/v1/metrics", _endpoint(StepMetrics, answers.metrics, token), methods=["POST"]),
            Route("/v1/checkpoints", _endpoint(Checkpoint, answers.checkpoint, token), methods=["POST"]),
            Route("/v1/ready", _endpoint(Ready, answers.ready, token), methods=["POST"]),
        ]
    )
    server = make_server(app, "critical", signals=False, log_config=None, server_header=False)
    async with task_group() as group:
        group.start_soon(server.serve, [listener])
        try:
            yield
        finally:
            server.should_exit = True
            # The trainer has ended, so don't wait for its connections to close.
            group.cancel_scope.cancel()


def _endpoint(
    kind: type[Asked], answer: Callable[[Asked], Awaitable[Any]], token: str
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        # Other users of the machine can reach loopback too.
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return _failed(401, "the token is missing or wrong")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _failed(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
        try:
            asked = msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _failed(400, f"{request.url.path}: {error}")
        try:
            done = await answer(asked)
        except OsmosisError as error:
            return _failed(500, str(error))
        return Response(msgspec.json.encode({} if done is None else done), media_type="application/json")

    return endpoint


def _failed(status: int, message: str) -> Response:
    return Response(msgspec.json.encode({"error": {"message": message}}), status, media_type="application/json")
