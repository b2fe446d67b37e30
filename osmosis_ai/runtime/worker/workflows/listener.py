"""The HTTP server on loopback that receives the callbacks, model calls and tool calls of rollouts.

Each rollout has its own bearer key, so none can write into another's record.
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

from osmosis_ai.bounds import MAX_DEPTH, too_deep
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.runtime.worker.workflows.callbacks import Callbacks, RefusedReportError

__all__ = ["Hosted", "Listener", "ModelCalls", "ToolCalls", "openai_error"]

MAX_BODY_BYTES = 64 * 1024 * 1024
BODY_SECONDS = 30.0
CLOSE_SECONDS = 1.0
KEPT_ENDED = 10_000
"""Number of ended rollouts to remember, so that a late request isn't taken for a wrong one."""

ModelCalls: TypeAlias = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
"""Answers a rollout's chat-completions request."""
ToolCalls: TypeAlias = Callable[[str, JsonObject], Awaitable[str]]
"""Calls a tool in the rollout's session, and returns its result for the model."""

_CODES = {401: "invalid_api_key", 404: "unknown_rollout", 408: "timeout", 410: "rollout_ended"}

_encode = msgspec.json.Encoder().encode


class _RefusedError(Exception):
    """A refused request, with the status of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_SLOW = _RefusedError(408, "the body took too long")


def openai_error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> web.Response:
    """Return an error in OpenAI's form."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": kind}}
    return web.Response(status=status, body=_encode(body), content_type="application/json", headers=headers)


class _ToolRequest(Record, frozen=True):
    """The body of a tool call."""

    name: str
    arguments: JsonObject = {}


class Hosted:
    """A hosted rollout. `url` is the base of its routes, `key` its bearer key."""

    def __init__(
        self,
        rollout_id: str,
        url: str,
        model_calls: ModelCalls,
        tool_calls: ToolCalls | None,
        acknowledgement: Callable[[], JsonObject],
    ) -> None:
        self.url = url
        self.key = secrets.token_urlsafe(32)
        self.callbacks = Callbacks(rollout_id)
        self.model_calls = model_calls
        self.tool_calls = tool_calls
        self.acknowledgement = acknowledgement
        self.calls: set[anyio.CancelScope] = set()

    def end(self) -> None:
        """Cancel the open model and tool calls."""
        for scope in self.calls:
            scope.cancel()


class Listener:
    """Listens on loopback between `start` and `aclose`, for the rollouts hosted at that time.

    A body may have up to `max_body` bytes, and take up to `body_seconds` seconds to arrive.
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
        app.router.add_post(f"{rollout}/tools/call", self._tool)
        # The oldest SDK appends its path to any base URL, and names the rollout in a header.
        for path in (f"{rollout}/chat/completions", "/v1/chat/completions", "/chat/completions"):
            app.router.add_post(path, self._chat)
        # Cancel a call whose client has disconnected, instead of finishing it for no one.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def aclose(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextmanager
    def host(
        self,
        rollout_id: str,
        model_calls: ModelCalls,
        tool_calls: ToolCalls | None = None,
        acknowledgement: Callable[[], JsonObject] = dict,
    ) -> Iterator[Hosted]:
        """Host a rollout during the block. When the block ends, cancel its open calls and refuse later ones.

        Args:
            rollout_id: The rollout's id.
            model_calls: Answers the rollout's model calls.
            tool_calls: Calls a tool; None for a rollout without tools.
            acknowledgement: Returns the answer to an accepted callback.
        """
        url = f"{self._url}/rollouts/{rollout_id}"
        hosted = Hosted(rollout_id, url, model_calls, tool_calls, acknowledgement)
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
        try:
            hosted = self._find(request, request.match_info["rollout"])
        except _RefusedError as error:
            return _refusal(error)
        if hosted is None:
            return web.json_response({})
        body = await self._body(request)
        if body is None:
            return _refusal(_SLOW)
        try:
            take(hosted.callbacks, body)
        except RefusedReportError as error:
            return _refusal(_RefusedError(422, str(error)))
        return web.Response(body=_encode(hosted.acknowledgement()), content_type="application/json")

    async def _tool(self, request: web.Request) -> web.StreamResponse:
        rollout_id = request.match_info["rollout"]
        try:
            hosted = self._find(request, rollout_id)
        except _RefusedError as error:
            return _refusal(error)
        if hosted is None:
            return _refusal(_RefusedError(410, f"the rollout {rollout_id!r} has ended"))
        call_tool = hosted.tool_calls
        if call_tool is None:
            return _refusal(_RefusedError(404, "the rollout has no tools"))
        body = await self._body(request)
        if body is None:
            return _refusal(_SLOW)
        try:
            call = msgspec.json.decode(body, type=_ToolRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _refusal(_RefusedError(422, f"the body isn't a tool call: {error}"))
        if too_deep(call.arguments):
            return _refusal(_RefusedError(422, f"the arguments are nested more than {MAX_DEPTH} levels deep"))

        async def answer() -> web.Response:
            body = _encode({"content": await call_tool(call.name, call.arguments)})
            return web.Response(body=body, content_type="application/json")

        return await self._while_hosted(hosted, request, answer())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        bearer = _bearer(request)
        rollout_id = request.match_info.get("rollout") or request.headers.get("x-rollout-id") or None
        if rollout_id is None:
            rollout_id = self._by_key.get(bearer)
            if rollout_id is None:
                return openai_error(401, "the bearer key isn't any rollout's", "invalid_api_key")
        try:
            hosted = self._find(request, rollout_id)
        except _RefusedError as error:
            return openai_error(error.status, str(error), _CODES[error.status])
        if hosted is None:
            # Clients don't retry this status.
            return openai_error(410, f"the rollout {rollout_id!r} has ended", _CODES[410])
        body = await self._body(request)
        if body is None:
            return openai_error(_SLOW.status, str(_SLOW), _CODES[_SLOW.status])
        return await self._while_hosted(hosted, request, hosted.model_calls(request, body))

    def _find(self, request: web.Request, rollout_id: str) -> Hosted | None:
        """Return the rollout, or None if it has ended; raise _RefusedError if the id is unknown or the key wrong."""
        hosted = self._hosted.get(rollout_id)
        key = self._ended.get(rollout_id) if hosted is None else hosted.key
        if key is None:
            raise _RefusedError(404, f"there is no rollout {rollout_id!r}")
        if not _holds(request, key):
            raise _RefusedError(401, "the bearer key isn't this rollout's")
        return hosted

    async def _while_hosted(
        self, hosted: Hosted, request: web.Request, answer: Awaitable[web.StreamResponse]
    ) -> web.StreamResponse:
        with anyio.CancelScope() as scope:
            hosted.calls.add(scope)
            try:
                return await answer
            finally:
                hosted.calls.discard(scope)
        # The rollout ended meanwhile. The client may already have part of the answer, so only closing the connection
        # can
        # signal the failure.
        if request.transport is not None:
            request.transport.abort()
        return openai_error(410, "the rollout has ended", _CODES[410])

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


def _refusal(error: _RefusedError) -> web.Response:
    return web.json_response({"detail": str(error)}, status=error.status)
