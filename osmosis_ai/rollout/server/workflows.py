"""Serve workflows and graders through the rollout protocol (`create_rollout_server`)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from osmosis_ai.records import JsonObject
from osmosis_ai.rollout.backend.base import ExecutionBackend
from osmosis_ai.rollout.context import RolloutContext
from osmosis_ai.rollout.server.bodies import result_body, reward_of
from osmosis_ai.rollout.server.callbacks import CallbackClient
from osmosis_ai.rollout.server.registry import Registry, ServedRollout
from osmosis_ai.rollout.server.reports import Reports, execute
from osmosis_ai.rollout.server.requests import (
    ALLOWED_HOSTS_VARIABLE,
    RefusedError,
    authorize,
    check_sender,
    json_response,
    named_hosts,
    parse,
    read_body,
    refused,
)
from osmosis_ai.rollout.server.tools import HostedTools, ToolClient
from osmosis_ai.rollout.trajectory.save import save_trajectory
from osmosis_ai.rollout.types import (
    POLLING_LEASE_HEADER,
    CancelRolloutsRequest,
    ExecutionRequest,
    ExecutionResult,
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutStatus,
)
from osmosis_ai.rollout.vocabulary import INSTANCE_VARIABLE, category_of

__all__ = ["DEFAULT_AGENT_TIMEOUT_SEC", "DEFAULT_GRADER_TIMEOUT_SEC", "create_rollout_server"]

logger = logging.getLogger(__name__)

DEFAULT_AGENT_TIMEOUT_SEC = 450.0
DEFAULT_GRADER_TIMEOUT_SEC = 150.0
"""Both are in seconds, and the defaults of `osmosis eval` too."""
INSTANCE_HEADER = "x-osmosis-rollout-instance-id"
MAX_BODY_BYTES = 64 * 1024 * 1024
RETRY_AFTER = "5"
"""Seconds after which a controller may retry while the backend is full."""

DRAIN_SECONDS = 10.0
"""Seconds that running rollouts have to finish when the server stops; then they are cancelled."""

_CANCELLED = ExecutionResult(status=RolloutStatus.CANCELLED, err_message="cancelled")

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[Any]]


def create_rollout_server(
    *,
    backend: ExecutionBackend,
    lifespan: Lifespan | None = None,
    configure_logging: bool = True,
    result_wait_timeout_sec: float = 30.0,
    polling_lease_timeout_sec: float = 120.0,
    result_retention_sec: float = 900.0,
    api_key: str | None = None,
) -> Starlette:
    """Create an ASGI application that runs rollouts for a controller: an evaluation or a trainer.

    A rollout without time limits of its own gets 450 s for its workflow and 150 s for its grader.

    Example:
        app = create_rollout_server(backend=LocalBackend(workflow=MyWorkflow, grader=MyGrader))
        uvicorn.run(app, port=int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000")))

    Args:
        backend: Runs the rollouts.
        lifespan: The application's own start-up and shutdown; its resources outlive all rollouts.
        configure_logging: Log at level INFO if the process has no logging handlers.
        result_wait_timeout_sec: Seconds after which a poll is answered with the current status.
        polling_lease_timeout_sec: Seconds without a poll after which a rollout is cancelled; more than
            `result_wait_timeout_sec`.
        result_retention_sec: Seconds for which a result is kept.
        api_key: The bearer key that controllers must send; None for none.

    Raises:
        ValueError: A time isn't usable, or the key is empty.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty: pass a key, or None for a server without one")
    if not 0 < result_wait_timeout_sec < polling_lease_timeout_sec < math.inf:
        raise ValueError("result_wait_timeout_sec must be positive, and polling_lease_timeout_sec finite and longer")
    if not 0 <= result_retention_sec < math.inf:
        raise ValueError("result_retention_sec must be finite and not negative")
    if configure_logging and not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    registry = Registry(lease=polling_lease_timeout_sec, retention=result_retention_sec)
    served = _Server(backend, registry, result_wait_timeout_sec, polling_lease_timeout_sec)
    # A header can't carry the spaces or the line break around a key.
    key = None if api_key is None else api_key.strip().encode()
    allowed = named_hosts(os.environ.get(ALLOWED_HOSTS_VARIABLE, ""))

    @asynccontextmanager
    async def whole_life(app: Starlette) -> AsyncIterator[None]:
        async with lifespan(app) if lifespan is not None else nullcontext():
            try:
                yield
            finally:
                await served.aclose()

    def route(path: str, answer: Callable[[Request], Any], method: str) -> Route:
        async def checked(http: Request) -> Response:
            # Both come before the handler, which reads the body.
            check_sender(http, allowed, key)
            authorize(http, key)
            response: Response = await answer(http)
            return response

        return Route(path, checked, methods=[method])

    return Starlette(
        routes=[
            route("/health", served.health, "GET"),
            route("/rollout", served.accept, "POST"),
            route("/rollout/{rollout_id}/result", served.result, "GET"),
            route("/rollout/{rollout_id}/status", served.status, "GET"),
            route("/rollout/cancel", served.cancel, "POST"),
            route("/drain", served.drain, "POST"),
        ],
        exception_handlers={HTTPException: refused, RefusedError: refused},
        lifespan=whole_life,
    )


class _Server:
    """Answers requests, and runs the rollouts."""

    def __init__(self, backend: ExecutionBackend, registry: Registry, wait: float, lease: float) -> None:
        self._backend = backend
        self._registry = registry
        self._wait = wait
        self._lease = lease
        self._callbacks = CallbackClient()
        self._tools = ToolClient()
        self._process_id = secrets.token_hex(16)
        # By this its driver recognises it, should another server have taken the port.
        self._instance_id = os.environ.get(INSTANCE_VARIABLE)
        self._is_accepting = True
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def health(self, http: Request) -> Response:
        figures = {
            **self._backend.health(),
            "instance_id": self._instance_id or self._process_id,
            "process_id": self._process_id,
            "lifecycle": self._lifecycle(),
        }
        return json_response(figures, headers={INSTANCE_HEADER: self._instance_id} if self._instance_id else None)

    async def accept(self, http: Request) -> Response:
        request = parse(RolloutInitRequest, await read_body(http, MAX_BODY_BYTES), malformed=422)
        if not self._is_accepting:
            raise RefusedError(503, "the rollout server accepts no more rollouts: it is stopping")
        if not self._backend.has_capacity():
            raise RefusedError(429, "the rollout queue is full; retry later", {"Retry-After": RETRY_AFTER})
        rollout = ServedRollout(request)
        if not self._registry.add(rollout):
            raise RefusedError(409, f"a rollout {rollout.id!r} already exists")
        rollout.task = asyncio.create_task(self._run(rollout))
        self._tasks.add(rollout.task)
        rollout.task.add_done_callback(lambda task: self._ended(rollout, task))
        response = RolloutInitResponse(
            rollout_id=rollout.id,
            status=rollout.status,
            polling_lease_token=rollout.token,
            result_wait_timeout_sec=self._wait,
            polling_lease_timeout_sec=self._lease,
        )
        return json_response(response.model_dump(), 202)

    async def result(self, http: Request) -> Response:
        token = http.headers.get(POLLING_LEASE_HEADER)
        if not token:
            raise RefusedError(422, f"the header {POLLING_LEASE_HEADER} is missing: send the rollout's lease token")
        rollout = self._registry.get(http.path_params["rollout_id"])
        if rollout is None:
            raise RefusedError(404, "unknown rollout_id")
        if not self._registry.check(rollout, token):
            raise RefusedError(403, "invalid polling lease")
        # From now on the controller gets no callbacks, even if it gave their URLs.
        rollout.is_polled = True
        if rollout.result is None:
            self._registry.renew(rollout)
            await rollout.change(self._wait)
        if rollout.result is None:
            status = {"rollout_id": rollout.id, "status": rollout.status, "sample": None}
            return json_response({**status, "err_message": None, "err_category": None})
        self._registry.keep(rollout, delivered=True)
        return Response(result_body(rollout.id, rollout.result), media_type="application/json")

    async def status(self, http: Request) -> Response:
        rollout_id = http.path_params["rollout_id"]
        known = {"rollout_id": rollout_id, "status": RolloutStatus.UNKNOWN, "reward": None, "err_message": None}
        if (state := self._backend.rollout_status(rollout_id)) is not None:
            return json_response({**known, **state})
        rollout = self._registry.get(rollout_id)
        if rollout is not None:
            known["status"] = rollout.status
            if rollout.result is not None:
                known |= {"reward": reward_of(rollout.result), "err_message": rollout.result.err_message}
        return json_response(known)

    async def cancel(self, http: Request) -> Response:
        request = parse(CancelRolloutsRequest, await read_body(http), malformed=422)
        chosen = self._registry.selected(request.ids, request.prefix)
        return json_response({"dispositions": {rollout_id: self._cancel(rollout_id) for rollout_id in chosen}})

    async def drain(self, http: Request) -> Response:
        self._is_accepting = False
        return json_response(self._lifecycle())

    async def aclose(self) -> None:
        """Stop accepting rollouts, give running ones a bounded time, then cancel them."""
        self._is_accepting = False
        if self._tasks:
            logger.info("waiting for %d rollouts", len(self._tasks))
            await asyncio.wait(self._tasks, timeout=DRAIN_SECONDS)
        # Callbacks of cancelled rollouts would retry for longer than the server may take to stop.
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_SECONDS)
        self._registry.close()
        await self._callbacks.aclose()
        await self._tools.aclose()
        await self._backend.shutdown()

    def _lifecycle(self) -> JsonObject:
        return {"accepting_rollouts": self._is_accepting, "active_rollouts": len(self._tasks)}

    def _cancel(self, rollout_id: str) -> str:
        rollout = self._registry.get(rollout_id)
        if rollout is None or rollout.result is not None or rollout.task is None:
            return "not_found"
        if rollout.disposition is None:
            is_queued = rollout.status is RolloutStatus.QUEUED
            rollout.disposition = "cancelled_queued" if is_queued else "cancelled_running"
            theirs = self._backend.cancel_rollouts(ids=[rollout_id]).get(rollout_id, "")
            if theirs.startswith("cancelled"):
                # The backend ends `execute`; cancelling it as well would disturb its cleanup.
                rollout.disposition = theirs
            else:
                rollout.task.cancel()
        return rollout.disposition

    def _ended(self, rollout: ServedRollout, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # A task that is cancelled before it starts runs nothing.
        if rollout.finish(_CANCELLED):
            self._registry.keep(rollout)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("rollout %s ended with an error", rollout.id, exc_info=error)

    async def _run(self, rollout: ServedRollout) -> None:
        request = rollout.request
        reports = Reports(rollout, self._callbacks)
        key = request.llm_api_key or request.controller_api_key
        context = RolloutContext(
            chat_completions_url=request.chat_completions_url,
            api_key=key,
            rollout_id=rollout.id,
            tools=None
            if request.tools_url is None
            else HostedTools(request.tools, request.tools_url, key, self._tools),
            on_status=rollout.set_status,
        )
        rollout.set_status(RolloutStatus.RUNNING)
        try:
            with context:
                await execute(self._backend, _execution_request(rollout), reports)
        except asyncio.CancelledError:
            # Not raised again, because the result must still be kept and reported.
            reports.fail(_CANCELLED)
        except Exception as error:
            logger.exception("rollout %s crashed", rollout.id)
            message = str(error) or "Internal server error"
            category = category_of(error)
            crash = ExecutionResult(status=RolloutStatus.FAILURE, err_message=message, err_category=category)
            reports.fail(crash)
        result = reports.result
        # Before the callbacks, so that a polling controller needn't wait for them.
        rollout.finish(result)
        self._registry.keep(rollout)
        if not self._is_closing:
            await reports.send_missing()
        await self._save(rollout, result, reports)
        if not rollout.is_leased:
            self._registry.keep(rollout, delivered=True)
        logger.info("rollout %s: %s", rollout.id, result.status)

    async def _save(self, rollout: ServedRollout, result: ExecutionResult, reports: Reports) -> None:
        request = rollout.request
        await save_trajectory(
            rollout_id=rollout.id,
            result=result,
            request_label=request.label,
            request_metadata=request.metadata,
            request_extra_fields=request.extra_fields,
            report=reports.trajectory,
            diagnostics=result.extra_fields,
        )


def _execution_request(rollout: ServedRollout) -> ExecutionRequest:
    request = rollout.request
    agent, grader = request.agent_timeout_sec, request.grader_timeout_sec
    return ExecutionRequest(
        id=rollout.id,
        prompt=request.initial_messages,
        label=request.label,
        metadata=request.metadata,
        agent_timeout_sec=DEFAULT_AGENT_TIMEOUT_SEC if agent is None else agent,
        grader_timeout_sec=DEFAULT_GRADER_TIMEOUT_SEC if grader is None else grader,
        grade=request.wants_grade,
    )
