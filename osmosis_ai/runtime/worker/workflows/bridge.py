"""The model endpoint of a rollout: OpenAI's chat completions, answered by the run's own model.

The bridge ignores the model that a request names, and passes every other field on to the run's model. Errors have the
form and the status that the model's endpoint would have returned.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

import anyio
import msgspec
from aiohttp import web

from osmosis_ai.bounds import MAX_DEPTH, message_problem, too_deep
from osmosis_ai.errors import ModelError
from osmosis_ai.failures import FailureKind
from osmosis_ai.models.base import Listen
from osmosis_ai.records import Completion, JsonObject, Message, Record, Tool
from osmosis_ai.runtime.worker.workflows.listener import openai_error
from osmosis_ai.tasks import task_group

__all__ = ["Bridge", "ChatCall", "Complete", "RefusedCallError"]

HEARTBEAT_SECONDS = 15.0
SAMPLE_HEADER = "x-sample-id"

_OF_PROTOCOL = frozenset({"messages", "model", "multi_turn_mode", "n", "stream", "stream_options", "tools"})
# Fields that LiteLLM would interpret itself: where to send the request, with which key, how often.
_OF_LITELLM = frozenset(
    {
        "allowed_openai_params", "api_base", "api_key", "api_version", "base_url", "client", "custom_llm_provider",
        "default_headers", "deployment_id", "drop_params", "extra_headers", "fallbacks", "headers", "max_retries",
        "mock_response", "model_list", "num_retries", "organization", "request_timeout", "retry_strategy",
        "shared_session", "ssl_verify", "timeout",
    }
)  # fmt: skip

_STATUS: dict[FailureKind, int] = {
    "auth": 401,
    "bad_request": 400,
    "not_found": 404,
    "overloaded": 503,
    "quota": 429,
    "rate_limit": 429,
    "solution": 400,
    "timeout": 504,
    "unknown_model": 404,
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
# The run's model client has already retried; this header keeps the openai package from retrying again.
_FINAL = {"x-should-retry": "false"}

_encode = msgspec.json.Encoder().encode


class ChatCall(Record, frozen=True):
    """One model call of a rollout. `params` holds the request's other fields; `sample` names the call's sample."""

    messages: list[Message]
    tools: list[Tool]
    params: JsonObject
    sample: str | None = None


class RefusedCallError(Exception):
    """The rollout may not make this call, for example because of a limit. `code` identifies the reason for programs."""

    def __init__(self, message: str, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


Complete: TypeAlias = Callable[[ChatCall, Listen | None], Awaitable[Completion]]
"""Calls the run's model, and passes on the reply's chunks; raises ModelError or RefusedCallError."""


class Bridge:
    """Answers one rollout's model calls. A streamed answer gets a comment every `heartbeat` seconds until it starts."""

    def __init__(self, complete: Complete, *, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self._complete = complete
        self._heartbeat = heartbeat

    async def answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Answer a chat-completions request."""
        sample = request.headers.get(SAMPLE_HEADER)
        try:
            call, asked = _read(body, sample)
        except RefusedCallError as error:
            return _refused(error)
        # SDKs that name the sample expect a stream unless the request says otherwise.
        if asked.get("stream", sample is not None):
            return await self._stream(request, call, asked)
        try:
            completion = await self._complete(call, None)
        except RefusedCallError as error:
            return _refused(error)
        except ModelError as error:
            return _failed(error)
        return web.Response(body=_encode(_reply(completion, asked)), content_type="application/json")

    async def _stream(self, request: web.Request, call: ChatCall, asked: JsonObject) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def beat() -> None:
            while True:
                await anyio.sleep(self._heartbeat)
                await _send(request, response, b": ping\n\n")

        head = _head(asked, "chat.completion.chunk")
        last: JsonObject | None = None

        async def listen(choice: JsonObject) -> None:
            nonlocal last
            if choice.get("finish_reason"):
                # Sent at the end, with the usage.
                last = {**choice, "index": 0}
            else:
                # If the client is gone, this call is about to be cancelled; that isn't a model failure.
                with suppress(ConnectionError):
                    await _send_chunk(request, response, {**head, "choices": [{**choice, "index": 0}]})

        try:
            async with task_group() as group:
                group.start_soon(beat)
                completion = await self._complete(call, listen)
                group.cancel_scope.cancel()
        except (RefusedCallError, ModelError) as error:
            plain = _failed(error) if isinstance(error, ModelError) else _refused(error)
            # Before the first heartbeat, the HTTP status can still report the error.
            if not response.prepared or not isinstance(plain.body, bytes):
                return plain
            await _send(request, response, b"data: " + plain.body + b"\n\ndata: [DONE]\n\n")
        else:
            for chunk in _chunks(completion, asked, head, last):
                await _send_chunk(request, response, chunk)
            await _send(request, response, b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _send_chunk(request: web.Request, response: web.StreamResponse, chunk: JsonObject) -> None:
    await _send(request, response, b"data: " + _encode(chunk) + b"\n\n")


async def _send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    if not response.prepared:
        await response.prepare(request)
    await response.write(data)


def _read(body: bytes, sample: str | None) -> tuple[ChatCall, JsonObject]:
    """Parse a request; return the call, and the whole request. Raises RefusedCallError."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the body isn't JSON: {error}") from error
    if not isinstance(asked, dict):
        raise _bad("the body isn't a JSON object")
    if too_deep(asked):
        raise _bad(f"the body is nested more than {MAX_DEPTH} levels deep")
    messages, tools = asked.get("messages"), asked.get("tools") or []
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise _bad("`messages` isn't a list of messages")
    for place, message in enumerate(messages):
        if (problem := message_problem(message)) is not None:
            raise _bad(f"message {place} {problem}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _bad("`tools` isn't a list of tools")
    if asked.get("n") not in (None, 1):
        raise _bad("`n` must be 1: ask once for each reply, so that each becomes a turn of the rollout")
    params = {name: value for name, value in asked.items() if name not in _OF_PROTOCOL and value is not None}
    if orders := _OF_LITELLM & params.keys():
        raise _bad(f"`{min(orders)}` isn't a field of chat completions")
    return ChatCall(messages, tools, params, sample), asked


def _bad(message: str) -> RefusedCallError:
    return RefusedCallError(message, "invalid_request_error")


def _refused(error: RefusedCallError) -> web.Response:
    return openai_error(error.status, str(error), error.code, _FINAL)


def _failed(error: ModelError) -> web.Response:
    status = error.status if error.status is not None and 400 <= error.status < 600 else _STATUS.get(error.kind, 502)
    kind = _TYPES.get(status, "rate_limit_error" if status == 429 else "api_error")
    headers = dict(_FINAL)
    if error.retry_after is not None:
        headers["Retry-After"] = f"{error.retry_after:g}"
    return openai_error(status, str(error), kind, headers)


def _head(asked: JsonObject, kind: str) -> JsonObject:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.get("model"),
    }


def _reply(completion: Completion, asked: JsonObject) -> JsonObject:
    message = {"content": None, **completion.message}
    choice = {"index": 0, "message": message, "finish_reason": completion.finish_reason, **_token_data(completion)}
    reply = {**_head(asked, "chat.completion"), "choices": [choice], "usage": _usage(completion)}
    if completion.token_ids is not None and completion.token_ids.prompt_token_ids is not None:
        reply["prompt_token_ids"] = completion.token_ids.prompt_token_ids
    return reply


def _chunks(completion: Completion, asked: JsonObject, head: JsonObject, last: JsonObject | None) -> list[JsonObject]:
    """Return the rest of a stream: the last chunk with the usage, or the whole reply if it wasn't streamed."""
    usage = _usage(completion)
    chunks: list[JsonObject] = []
    if last is None:
        last = {"index": 0, "delta": {}, "finish_reason": completion.finish_reason}
        first = {"index": 0, "delta": _delta(completion), "finish_reason": None, **_token_data(completion)}
        chunks.append({**head, "choices": [first]})
    chunks.append({**head, "choices": [last], "usage": usage})
    options = asked.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage})
    return chunks


def _delta(completion: Completion) -> JsonObject:
    delta = dict(completion.message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    return delta


def _token_data(completion: Completion) -> JsonObject:
    data: JsonObject = {"logprobs": None if completion.logprobs is None else _form(completion)}
    if completion.token_ids is not None and completion.token_ids.token_ids is not None:
        data["token_ids"] = completion.token_ids.token_ids
    return data


def _form(completion: Completion) -> JsonObject:
    """Return the log probabilities in OpenAI's form, which has every field."""
    assert completion.logprobs is not None
    return {
        name: None
        if tokens is None
        else [
            {
                "token": each.token,
                "logprob": each.logprob,
                "bytes": each.bytes,
                "top_logprobs": [
                    {"token": top.token, "logprob": top.logprob, "bytes": top.bytes} for top in each.top_logprobs
                ],
            }
            for each in tokens
        ]
        for name, tokens in (("content", completion.logprobs.content), ("refusal", completion.logprobs.refusal))
    }


def _usage(completion: Completion) -> JsonObject:
    usage = completion.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
