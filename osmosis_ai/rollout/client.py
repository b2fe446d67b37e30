"""The trainer, as a loop and the server see it: model calls, and the delivery of results."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from osmosis_ai.errors import (
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisTimeoutError,
    OsmosisTransportError,
    OsmosisValidationError,
)
from osmosis_ai.rollout.core.base import CompletionsResult, refuse_bytes
from osmosis_ai.rollout.core.schemas import CompletionsRequest, RolloutRequest, RolloutResponse
from osmosis_ai.rollout.settings import ClientSettings, client_settings

__all__ = ["TrainerClient", "TrainerPool", "encode", "encode_messages"]

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30.0
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_ERROR_TEXT = 500
LARGE_BODY = 1024 * 1024

_DEFAULTS = {
    name: field.default
    for name, field in CompletionsRequest.model_fields.items()
    if not field.is_required() and field.default is not None
}


def encode(value: Any) -> bytes:
    """Anything that goes over the wire as JSON; NaN and infinities become null, as JSON has none.

    Raises:
        OsmosisRolloutError: It holds something that JSON doesn't know.
    """
    try:
        try:
            return msgspec.json.encode(value)
        except UnicodeEncodeError:
            # A lone surrogate, from a tool that read bytes: nobody takes it, not even escaped.
            return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise OsmosisRolloutError(f"it can't be written as JSON: {error}") from error


def encode_messages(messages: Sequence[Any], start: int = 0) -> bytes:
    """Messages of a conversation as JSON, without the bytes that `encode` would turn into base64.

    Args:
        messages: The messages.
        start: The place of the first of them in the conversation.

    Raises:
        OsmosisRolloutError: One of them can't be written as JSON, or holds bytes.
    """
    refuse_bytes(messages, start)
    return encode(messages)


class TrainerPool:
    """The connections to trainers of one process: one pooled session, which opens with the first request.

    Redirects are not followed, so that a key never reaches a host that wasn't named. Proxy variables are not read.

    Args:
        settings: Timeouts, retries and the pool's size; from the environment when not given.
    """

    def __init__(self, settings: ClientSettings | None = None) -> None:
        self.settings = settings or client_settings()
        self._session: aiohttp.ClientSession | None = None

    def client(self, request: RolloutRequest) -> TrainerClient:
        """The trainer of a rollout."""
        return TrainerClient(self, request.server_url, request.rollout_id, request.api_key)

    def session(self) -> aiohttp.ClientSession:
        """The session; must be asked for inside the event loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.settings.max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": "application/json", "Accept": "application/json"},
                # No total: waiting for a free connection of the pool isn't the trainer's time.
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_TIMEOUT, sock_read=self.settings.timeout_seconds
                ),
            )
        return self._session

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> TrainerPool:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class TrainerClient:
    """The trainer of one rollout.

    Answers of 5xx, timeouts and transport errors are tried again, with exponential backoff and full jitter; answers of
    4xx are not.

    Args:
        pool: The process's connections.
        server_url: The trainer's address.
        rollout_id: The rollout.
        api_key: The bearer key for the trainer. Never shown.
    """

    def __init__(self, pool: TrainerPool, server_url: str, rollout_id: str, api_key: str | None = None) -> None:
        self._pool = pool
        self._base = server_url.rstrip("/")
        self._rollout_id = rollout_id
        self._api_key = api_key
        self._rng = random.Random()  # noqa: S311  jitter, not a secret

    def __repr__(self) -> str:
        return f"TrainerClient(server_url={self._base!r}, rollout_id={self._rollout_id!r})"

    async def chat_completions(self, messages: list[dict[str, Any]], **params: Any) -> CompletionsResult:
        """Ask the trainer for the next message.

        Args:
            messages: The whole conversation so far.
            params: Sampling parameters, over the protocol's defaults; None leaves one out.

        Raises:
            OsmosisValidationError: The trainer refused (4xx).
            OsmosisServerError: It failed (5xx), or its answer isn't a completion.
            OsmosisTimeoutError: It didn't answer in time.
            OsmosisTransportError: It can't be reached, or dropped the connection.
            OsmosisRolloutError: The messages or parameters can't be written as JSON.
        """
        refuse_bytes(messages)
        chosen = {name: value for name, value in {**_DEFAULTS, **params}.items() if value is not None}
        try:
            body = encode({**chosen, "messages": messages, "rollout_id": self._rollout_id})
        except OsmosisRolloutError as error:
            raise OsmosisRolloutError(f"the model call can't be sent: {error}") from error
        url = f"{self._base}/v1/chat/completions"
        raw = await self._post(url, body, self._pool.settings.max_retries)
        return _result(raw, url)

    async def complete_rollout(self, response: RolloutResponse) -> None:
        """Deliver a finished rollout.

        Raises:
            OsmosisRolloutError: The trainer didn't take it, in as many attempts as the settings allow.
        """
        body = encode(response.model_dump())
        retries = self._pool.settings.complete_rollout_retries
        await self._post(f"{self._base}/v1/rollout/completed", body, retries)

    async def _post(self, url: str, body: bytes, retries: int) -> bytes:
        attempts = 0
        while True:
            attempts += 1
            try:
                return await self._post_once(url, body)
            except OsmosisValidationError:
                raise
            except OsmosisRolloutError as error:
                if attempts > retries:
                    if attempts == 1:
                        raise
                    raise _after(error, attempts) from error
                delay = self._delay(attempts)
                logger.info("rollout %r: %s; trying again in %.1f s", self._rollout_id, error, delay)
            await asyncio.sleep(delay)

    def _delay(self, attempts: int) -> float:
        # Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
        settings = self._pool.settings
        return self._rng.uniform(
            0, min(settings.retry_max_delay, settings.retry_base_delay * 2.0 ** min(attempts - 1, 30))
        )

    async def _post_once(self, url: str, body: bytes) -> bytes:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        # aiohttp writes bytes at once, and warns about it when they are many.
        data = body if len(body) < LARGE_BODY else io.BytesIO(body)
        try:
            async with self._pool.session().post(
                URL(url), data=data, headers=headers, allow_redirects=False
            ) as response:
                raw = await _read(response, url)
                status, location = response.status, response.headers.get("Location", "nowhere")
        except asyncio.TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise OsmosisTimeoutError(f"{url} doesn't accept the connection in time") from error
            seconds = self._pool.settings.timeout_seconds
            raise OsmosisTimeoutError(f"{url} gave no answer within {seconds:g} s") from error
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or error.os_error
            raise OsmosisTransportError(f"nothing answers at {url}: {reason}") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = self._mask(" ".join(str(error).split()))[:200] or type(error).__name__
            raise OsmosisTransportError(f"{url} dropped the connection: {reason}") from error
        except ValueError as error:
            # A key or an address that HTTP can't carry; the text of the error would show the key.
            raise OsmosisValidationError(f"the request to {url} can't be written as HTTP") from error
        if 200 <= status < 300:
            return raw
        if 300 <= status < 400:
            said = f"a redirect to {location}, which is not followed, so that no key is sent there"
        else:
            said = raw.decode("utf-8", "replace")
        # The key is masked before the text is cut, so that no half of it survives.
        message = f"{url} answered {status}: {self._say(said)}"
        if status >= 500:
            raise OsmosisServerError(message, status)
        raise OsmosisValidationError(message, status)

    def _mask(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text

    def _say(self, text: str) -> str:
        text = " ".join(self._mask(text).split())
        return text if len(text) <= MAX_ERROR_TEXT else text[:MAX_ERROR_TEXT] + "…"


async def _read(response: aiohttp.ClientResponse, url: str) -> bytes:
    chunks = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            response.close()
            # Asking again would only bring as much again.
            raise OsmosisValidationError(f"{url} answered with more than {MAX_REPLY_BYTES} bytes", response.status)
        chunks.append(chunk)
    return b"".join(chunks)


def _result(raw: bytes, url: str) -> CompletionsResult:
    try:
        reply = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OsmosisServerError(f"{url} answered with broken JSON: {error}", 200) from error
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(reply, dict) or not isinstance(choice, dict) or not isinstance(message, dict):
        raise OsmosisServerError(f"{url} answered with a reply that has no `choices[0].message`", 200)
    message.setdefault("role", "assistant")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise OsmosisServerError(f"{url} answered with `tool_calls` that aren't a list of objects", 200)
    usage = reply.get("usage")
    finish_reason = choice.get("finish_reason")
    return CompletionsResult(
        message=message,
        token_ids=choice.get("token_ids", reply.get("token_ids")),
        logprobs=choice.get("logprobs", reply.get("logprobs")),
        usage=usage if isinstance(usage, dict) else {},
        finish_reason=finish_reason if isinstance(finish_reason, str) else "tool_calls" if calls else "stop",
    )


def _after(error: OsmosisRolloutError, attempts: int) -> OsmosisRolloutError:
    message = f"{error} (after {attempts} attempts)"
    return (
        OsmosisServerError(message, error.status_code)
        if isinstance(error, OsmosisServerError)
        else type(error)(message)
    )
