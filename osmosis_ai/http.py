"""The HTTP client for JSON endpoints, models and trainers alike, over one pooled session.

The client doesn't follow redirects, so a key never reaches a host the user didn't name. It ignores proxy variables.
Callers translate `HttpError` and unsuccessful answers into their own errors.
"""

from __future__ import annotations

import asyncio
import email.utils
import io
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple, TypeAlias

import aiohttp
import msgspec
from yarl import URL

from osmosis_ai.errors import OsmosisError
from osmosis_ai.masking import mask
from osmosis_ai.records import JsonValue

__all__ = ["Answer", "HttpClient", "HttpError", "describe_error", "retry_after"]

CONNECT_TIMEOUT = 30.0
LARGE_BODY = 1024 * 1024
MAX_ERROR_TEXT = 500
MAX_REPLY_BYTES = 64 * 1024 * 1024

HttpProblem: TypeAlias = Literal[
    "timeout", "refused", "dropped", "not_http", "redirect", "too_long", "unsendable", "bad_json"
]


class HttpError(OsmosisError):
    """A request got no usable answer. The message names the address.

    Attributes:
        problem: `refused` (nothing answers, or its certificate isn't trusted), `timeout`, `dropped` (the connection
            ended early), `not_http`, `redirect` (of LiteLLM's clients; `HttpClient` returns it as an answer),
            `too_long`, `bad_json`, or `unsendable` (HTTP can't carry the request).
        status: The HTTP status, if there was an answer.
    """

    def __init__(self, problem: HttpProblem, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.status = status


class Answer(NamedTuple):
    """A complete answer, of any status."""

    url: URL | str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> JsonValue:
        """Decode the body; raise HttpError if it isn't JSON."""
        try:
            decoded: JsonValue = msgspec.json.decode(self.body)
            return decoded
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            found = f"broken JSON ({error})" if self.body.strip() else "an empty body"
            if self.body.lstrip()[:1] == b"<":
                found = "an HTML page instead of JSON; the API's address usually ends in /v1"
            elif self.body.startswith(b"data:"):
                found = "an event stream instead of one reply"
            raise HttpError("bad_json", f"{self.url} answered with {found}", self.status) from error

    def describe(self, key: str | None) -> tuple[str, str | None]:
        """Describe an unsuccessful answer without the key; also return the error's code, if it has one."""
        said, code = describe_error(self.body, key)
        if 300 <= self.status < 400:
            location = mask(self.headers.get("Location", "nowhere"), key)
            said = f"a redirect to {location}, which is not followed, so that no key is sent there"
        return f"{self.url} answered {self.status}: {said}", code


class HttpClient:
    """One pooled session, which opens with the first request and reopens after `aclose`.

    Args:
        seconds: Time limit of a request, in seconds.
        per_read: Apply `seconds` to each wait for the next bytes instead of to the whole request, so that waiting for a
            free connection doesn't count against the endpoint.
        connections: Maximum number of connections; 0 for no limit.
        key: Bearer key of every request that doesn't bring its own.
        max_reply_bytes: A longer answer is an error.
    """

    def __init__(
        self,
        seconds: float,
        *,
        per_read: bool = False,
        connections: int = 0,
        key: str | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        self._seconds = seconds
        self._timeout = (
            aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=seconds)
            if per_read
            else aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_TIMEOUT))
        )
        self._connections = connections
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **_bearer(key)}
        self._max_reply_bytes = max_reply_bytes
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, url: URL | str, body: bytes, *, key: str | None = None, seconds: float | None = None
    ) -> Answer:
        """Send a body from `wire_json.encode_json`; raise HttpError if no answer arrives, within `seconds` if given
        instead of the client's time limit.
        """
        # aiohttp writes bytes in one go, and warns if they are large.
        data = body if len(body) < LARGE_BODY else io.BytesIO(body)
        headers = _bearer(key) if key else None
        timeout = self._timeout if seconds is None else aiohttp.ClientTimeout(total=seconds)
        sent = self._open().post(url, data=data, headers=headers, timeout=timeout, allow_redirects=False)
        return await self._answer(url, sent, self._seconds if seconds is None else seconds)

    async def lines(self, url: URL | str, body: bytes, take: Callable[[bytes], Awaitable[None]]) -> Answer:
        """Send a body from `encode_json` and pass on the lines of an event stream as they come, if that is the answer.

        Returns:
            The answer, with an empty body if it was an event stream.

        Raises:
            HttpError: No complete answer arrived.
        """
        try:
            async with self._open().post(url, data=body, allow_redirects=False) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    return Answer(url, response.status, response.headers, await self._read(url, response))
                line, size = b"", 0
                async for chunk in response.content.iter_any():
                    size += len(chunk)
                    if size > self._max_reply_bytes:
                        response.close()
                        message = f"{url} answered with more than {self._max_reply_bytes} bytes"
                        raise HttpError("too_long", message, response.status)
                    *whole, line = (line + chunk).split(b"\n")
                    for each in whole:
                        await take(each)
                if line:
                    await take(line)
                return Answer(url, response.status, response.headers, b"")
        except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as error:
            raise _failure(url, self._seconds, error) from error

    async def get(self, url: URL | str, *, seconds: float, headers: Mapping[str, str] | None = None) -> Answer:
        """Get a resource; raise HttpError if no answer arrives within `seconds`."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        sent = self._open().get(url, headers=headers, timeout=timeout, allow_redirects=False)
        return await self._answer(url, sent, seconds)

    async def _answer(
        self, url: URL | str, sent: AbstractAsyncContextManager[aiohttp.ClientResponse], seconds: float
    ) -> Answer:
        try:
            async with sent as response:
                return Answer(url, response.status, response.headers, await self._read(url, response))
        except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as error:
            raise _failure(url, seconds, error) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections),
                # No cookies: one rollout's must not follow another's requests.
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=self._timeout,
            )
        return self._session

    async def _read(self, url: URL | str, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        # Counted while reading: a broken endpoint may stream without end.
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > self._max_reply_bytes:
                response.close()
                message = f"{url} answered with more than {self._max_reply_bytes} bytes"
                raise HttpError("too_long", message, response.status)
        return b"".join(chunks)


def describe_error(body: bytes, *keys: str | None) -> tuple[str, str | None]:
    """Return an endpoint's error as a short text without the keys, and the error's code if there is one.

    Understands `{"error": {"message", "code"}}`, `{"error": …}`, `{"message": …}` and `{"detail": …}`; of an HTML page
    it says only that.
    """
    text = body.decode("utf-8", "replace")
    code: object = None
    try:
        reply = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        if text.lstrip()[:1] == "<":
            return "an HTML page", None
    else:
        if isinstance(reply, dict):
            error = reply.get("error") or reply.get("message") or reply.get("detail") or reply
            if isinstance(error, dict):
                code = error.get("code") or error.get("type")
                error = error.get("message") or error
            text = error if isinstance(error, str) else msgspec.json.encode(error).decode()
    # Masked once it is read, because a mask may break JSON, and before it is cut, so that no half of a key survives.
    for key in keys:
        text = mask(text, key)
    text = " ".join(text.split())
    if len(text) > MAX_ERROR_TEXT:
        text = text[:MAX_ERROR_TEXT] + "…"
    return text or "no message", code if isinstance(code, str) else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds an endpoint asks to wait: `retry-after-ms`, or `Retry-After` as seconds or date (RFC 9110)."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "")
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
            except ValueError:
                continue
        # Also skips infinity, and NaN, which compares as false.
        if seconds < float("inf"):
            return max(0.0, seconds)
    return None


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _failure(url: URL | str, seconds: float, error: Exception) -> HttpError:
    # Subclasses before their bases: most of these derive from OSError or from another class below.
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return HttpError("timeout", f"{url} doesn't accept the connection in time")
    if isinstance(error, asyncio.TimeoutError):
        return HttpError("timeout", f"{url} gave no answer within {seconds:g} s")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return HttpError("refused", f"{url} has a certificate that can't be trusted: {error.certificate_error}")
    if isinstance(error, aiohttp.ClientSSLError):
        return HttpError("refused", f"{url} doesn't speak TLS as expected: {error.os_error}")
    if isinstance(error, aiohttp.ClientConnectorError):
        is_unknown = isinstance(error, aiohttp.ClientConnectorDNSError)
        what = f"the host of {url} can't be found" if is_unknown else f"nothing answers at {url}"
        return HttpError("refused", f"{what}: {error.os_error.strerror or error.os_error}")
    if isinstance(error, aiohttp.ClientResponseError):
        return HttpError("not_http", f"{url} answered with something that isn't HTTP: {error.message}")
    if isinstance(error, (aiohttp.ClientError, OSError)):
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return HttpError("dropped", f"{url} dropped the connection: {reason}")
    # HTTP can't carry the key or the address. The error's own text is left out, because it would show the key.
    return HttpError("unsendable", f"the request to {url} can't be written as HTTP")
