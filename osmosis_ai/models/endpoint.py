"""A user's own endpoint (vLLM, SGLang, Ollama, …), spoken to directly: one request is one `POST /chat/completions`."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from osmosis_ai.errors import ModelError
from osmosis_ai.models.base import describe_error, error_kind, mask, parse_reply, retry_after
from osmosis_ai.records import Completion, Message, ModelSpec, Tool

__all__ = ["OpenAICompatibleModel"]

MAX_REPLY_BYTES = 64 * 1024 * 1024
LARGE_BODY = 1024 * 1024
CONNECT_TIMEOUT = 30.0
MODELS_TIMEOUT = 5.0


class OpenAICompatibleModel:
    """A model behind an OpenAI-compatible endpoint, over one pooled session that opens with the first request.

    Redirects are not followed, so that a key never reaches a host that wasn't named. Proxy variables are not read.

    Args:
        spec: `base_url` without a slash at its end; `params` go into every request.
        max_reply_bytes: A longer reply is an error.
    """

    def __init__(self, spec: ModelSpec, *, max_reply_bytes: int = MAX_REPLY_BYTES) -> None:
        if spec.base_url is None:
            raise ValueError("an OpenAI-compatible model needs a base_url")
        self._spec = spec
        self._base_url = spec.base_url.rstrip("/")
        self.url = f"{self._base_url}/chat/completions"
        self._target = URL(self.url)
        self._max_reply_bytes = max_reply_bytes
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, messages: list[Message], tools: list[Tool], params: dict[str, Any]) -> Completion:
        """One request.

        Raises:
            ModelError: It failed. The message names the URL, the status and what the endpoint said, without the key.
        """
        body = {**self._spec.params, **params, "model": self._spec.model, "messages": messages}
        if tools:
            body["tools"] = tools
        if None in body.values():
            body = {name: value for name, value in body.items() if value is not None}
        reply = await self._post(self._encode(body))
        return parse_reply(reply, source=self.url, position=len(messages), key=self._spec.api_key)

    async def served_models(self) -> list[str]:
        """The model names the endpoint lists at `/models`; empty when it doesn't say."""
        try:
            timeout = aiohttp.ClientTimeout(total=MODELS_TIMEOUT)
            address = URL(f"{self._base_url}/models")
            async with self._open().get(address, timeout=timeout, allow_redirects=False) as response:
                reply = msgspec.json.decode(await self._read(response))
        except (aiohttp.ClientError, asyncio.TimeoutError, ModelError, msgspec.DecodeError, UnicodeDecodeError):
            # Only asked to make an error message more helpful.
            return []
        items = reply.get("data") if isinstance(reply, dict) else None
        names = [item.get("id") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
        return [name for name in names if isinstance(name, str)]

    async def aclose(self) -> None:
        """Close the session and its connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept": "application/json"}
            if self._spec.api_key:
                headers["Authorization"] = f"Bearer {self._spec.api_key}"
            total = self._spec.request_timeout
            self._session = aiohttp.ClientSession(
                # How many requests run at a time is the limiter's business.
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=total, sock_connect=min(total, CONNECT_TIMEOUT)),
            )
        return self._session

    def _encode(self, body: dict[str, Any]) -> bytes:
        try:
            return msgspec.json.encode(body)
        except UnicodeEncodeError:
            # A lone surrogate, from a tool that read bytes: no endpoint takes it, not even escaped.
            return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        except TypeError as error:
            raise ModelError(
                f"the request to {self.url} can't be written as JSON: {error}", kind="bad_request"
            ) from error

    async def _post(self, body: bytes) -> Any:
        # aiohttp writes bytes at once, and warns about it when they are many.
        data = body if len(body) < LARGE_BODY else io.BytesIO(body)
        try:
            async with self._open().post(self._target, data=data, allow_redirects=False) as response:
                raw = await self._read(response)
                if response.status != 200:
                    raise self._http_error(response, raw)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise self._transport_error(error) from error
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if raw.lstrip()[:1] == b"<":
                what = "an HTML page instead of JSON; the API's address usually ends in /v1"
            elif raw.startswith(b"data:"):
                what = "an event stream instead of one reply"
            elif not raw.strip():
                what = "an empty body"
            else:
                what = f"broken JSON ({error})"
            raise ModelError(f"{self.url} answered with {what}", kind="bad_reply", status=200) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks = []
        size = 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._max_reply_bytes:
                response.close()
                raise ModelError(
                    f"{self.url} answered with more than {self._max_reply_bytes} bytes",
                    kind="bad_reply",
                    status=response.status,
                )
            chunks.append(chunk)
        return b"".join(chunks)

    def _http_error(self, response: aiohttp.ClientResponse, raw: bytes) -> ModelError:
        status = response.status
        said, code = describe_error(raw, self._spec.api_key)
        kind = error_kind(status)
        if 300 <= status < 400:
            location = mask(response.headers.get("Location", "nowhere"), self._spec.api_key)
            said = f"a redirect to {location}, which is not followed, so that no key is sent there"
        elif status < 400:
            kind = "bad_reply"
        elif code == "insufficient_quota":
            # A 429 by status, but the account is empty: waiting doesn't help.
            kind = "quota"
        return ModelError(
            f"{self.url} answered {status}: {said}", kind=kind, status=status, retry_after=retry_after(response.headers)
        )

    def _transport_error(self, error: Exception) -> ModelError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return ModelError(f"{self.url} doesn't accept the connection in time", kind="timeout")
        if isinstance(error, asyncio.TimeoutError):
            return ModelError(f"{self.url} gave no answer within {self._spec.request_timeout:g} s", kind="timeout")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return ModelError(
                f"{self.url} has a certificate that can't be trusted: {error.certificate_error}", kind="refused"
            )
        if isinstance(error, aiohttp.ClientSSLError):
            return ModelError(f"{self.url} doesn't speak TLS as expected: {error.os_error}", kind="refused")
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return ModelError(
                f"the host of {self.url} can't be found: {error.os_error.strerror or error.os_error}", kind="refused"
            )
        if isinstance(error, aiohttp.ClientConnectorError):
            return ModelError(
                f"nothing answers at {self.url}: {error.os_error.strerror or error.os_error}", kind="refused"
            )
        if isinstance(error, aiohttp.ClientResponseError):
            return ModelError(f"{self.url} answered with something that isn't HTTP: {error.message}", kind="bad_reply")
        return ModelError(f"{self.url} dropped the connection: {_one_line(error)}", kind="dropped")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
