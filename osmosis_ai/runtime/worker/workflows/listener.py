"""The HTTP server on loopback through which rollouts reach us: their servers' callbacks, and their model calls.

Each rollout has a bearer of its own, so none can write into another's.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import anyio
import msgspec
from aiohttp import web

from osmosis_ai.records import JsonObject
from osmosis_ai.runtime.worker.workflows.callbacks import Callbacks, RefusedReportError

__all__ = ["Hosted", "Listener", "ModelCalls", "openai_error"]

MAX_BODY_BYTES = 64 * 1024 * 1024
BODY_SECONDS = 30.0
CLOSE_SECONDS = 1.0
KEPT_ENDED = 10_000
"""Rollouts that are remembered after their end, so that what is late is told from what is wrong."""

ModelCalls: TypeAlias = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
"""Answers a rollout's chat-completions request."""

_encode = msgspec.json.Encoder().encode


def openai_error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> web.Response:
    """Return an error in OpenAI's form."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": kind}}
    return web.Response(status=status, body=_encode(body), content_type="application/json", headers=headers)


class Hosted:
    """A rollout that is hosted. `url` is the base of its routes, `key` its bearer."""

    def __init__(self, rollout_id: str, url: str, model_calls: ModelCalls) -> None:
        self.url = url
        self.key = secrets.token_urlsafe(32)
        self.callbacks = Callbacks(rollout_id)
        self.model_calls = model_calls
        self.calls: set[anyio.CancelScope] = set()

    def end(self) -> None:
        """Cut off the open model calls."""
        for scope in self.calls:
            scope.cancel()


class Listener:
    """Listens on loopback between `start` and `aclose`, for the rollouts that are hosted at the time.

    A body may have up to `max_body` bytes, and take up to `body_seconds` to arrive.
    """

    def __init__(self, *, max_body: int = MAX_BODY_BYTES, body_seconds: float = BODY_SECONDS) -> None:
        self._max_body = max_body
        self._body_seconds = body_seconds
        self._hosted: dict[str, Hosted] = {}
        self._by_key: dict[str, str] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=self._max_body)
        rollout = "/v1/rollouts/{rollout}"
        app.router.add_post(f"{rollout}/completion", self._completion)
        app.router.add_post(f"{rollout}/grader", self._grading)
        # The oldest SDK appends to whatever base it is given, and names the rollout in a header.
        for path in (f"{rollout}/chat/completions", "/v1/chat/completions", "/chat/completions"):
            app.router.add_post(path, self._chat)
        # A call whose client has gone isn't finished for nobody.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def aclose(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextmanager
    def host(self, rollout_id: str, model_calls: ModelCalls) -> Iterator[Hosted]:
        """Host a rollout for the block. At its end, its open model calls are cut off, and later ones are refused."""
        hosted = Hosted(rollout_id, f"{self._url}/rollouts/{rollout_id}", model_calls)
        self._hosted[rollout_id] = hosted
        self._by_key[hosted.key] = rollout_id
        try:
            yield hosted
        finally:
            del self._hosted[rollout_id], self._by_key[hosted.key]
            hosted.end()
            self._ended[rollout_id] = hosted.key
            while len(self._ended) > KEPT_ENDED:
                self._ended.popitem(last=False)

    async def _completion(self, request: web.Request) -> web.Response:
        return await self._callback(request, lambda callbacks, body: callbacks.completed(body))

    async def _grading(self, request: web.Request) -> web.Response:
        return await self._callback(request, lambda callbacks, body: callbacks.graded(body))

    async def _callback(self, request: web.Request, take: Callable[[Callbacks, bytes], None]) -> web.Response:
        rollout_id = request.match_info["rollout"]
        hosted = self._hosted.get(rollout_id)
        key = self._ended.get(rollout_id) if hosted is None else hosted.key
        if key is None:
            return _refusal(404, f"there is no rollout {rollout_id!r}")
        if not _holds(request, key):
            return _refusal(401, "the bearer isn't this rollout's")
        if hosted is None:
            return web.json_response({})
        body = await self._body(request)
        if body is None:
            return _refusal(408, "the body took too long")
        try:
            take(hosted.callbacks, body)
        except RefusedReportError as error:
            return _refusal(422, str(error))
        return web.json_response({})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        bearer = _bearer(request)
        rollout_id = request.match_info.get("rollout") or request.headers.get("x-rollout-id") or None
        if rollout_id is None:
            rollout_id = self._by_key.get(bearer)
            if rollout_id is None:
                return openai_error(401, "the bearer is no rollout's", "invalid_api_key")
        hosted = self._hosted.get(rollout_id)
        key = self._ended.get(rollout_id) if hosted is None else hosted.key
        if key is None:
            return openai_error(404, f"there is no rollout {rollout_id!r}", "unknown_rollout")
        if not _holds(request, key):
            return openai_error(401, "the bearer isn't this rollout's", "invalid_api_key")
        if hosted is None:
            # A status that clients don't retry.
            return openai_error(410, f"the rollout {rollout_id!r} has ended", "rollout_ended")
        body = await self._body(request)
        if body is None:
            return openai_error(408, "the body took too long", "timeout")
        with anyio.CancelScope() as scope:
            hosted.calls.add(scope)
            try:
                return await hosted.model_calls(request, body)
            finally:
                hosted.calls.discard(scope)
        # The rollout has ended meanwhile. The client may have a part of the answer, so only the connection's end tells.
        if request.transport is not None:
            request.transport.abort()
        return openai_error(410, f"the rollout {rollout_id!r} has ended", "rollout_ended")

    async def _body(self, request: web.Request) -> bytes | None:
        with anyio.move_on_after(self._body_seconds):
            return await request.read()
        return None


def _bearer(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _holds(request: web.Request, key: str) -> bool:
    # aiohttp decodes bytes of a header that aren't UTF-8 to surrogates.
    return hmac.compare_digest(_bearer(request).encode("utf-8", "surrogateescape"), key.encode())


def _refusal(status: int, message: str) -> web.Response:
    body: JsonObject = {"detail": message}
    return web.json_response(body, status=status)
