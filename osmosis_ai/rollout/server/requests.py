"""Read, check and refuse HTTP requests; shared by the rollout servers."""

from __future__ import annotations

import hmac
from collections.abc import Container, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import anyio
import msgspec
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from osmosis_ai.urls import is_loopback

__all__ = [
    "ALLOWED_HOSTS_VARIABLE",
    "MAX_BODY_BYTES",
    "RefusedError",
    "authorize",
    "check_sender",
    "json_response",
    "named_hosts",
    "parse",
    "read_body",
    "refused",
]

ALLOWED_HOSTS_VARIABLE = "OSMOSIS_ROLLOUT_SERVER_ALLOWED_HOSTS"
MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT = 60.0
"""Seconds that a client has to send a request's body."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class RefusedError(Exception):
    """A refused request, with the status and detail of its answer."""

    def __init__(self, status_code: int, detail: object, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status_code = status_code
        self.detail = detail
        self.headers = headers


def check_sender(http: Request, allowed: Container[str], key: bytes | None) -> None:
    """Refuse requests from web pages, which can make the user's browser send them to this server."""
    host = http.headers.get("host", "")
    name = _host_name(host)
    server, _ = http.scope.get("server") or ("", None)
    # A page can point its own host name at this machine (DNS rebinding), but it doesn't know the key.
    if (allowed or (key is None and is_loopback(server))) and not (name in allowed or is_loopback(name)):
        message = f"this server isn't called {name[:100]!r}; if it is, add that to {ALLOWED_HOSTS_VARIABLE}"
        raise RefusedError(421, message)
    _check_origin(http)


def named_hosts(text: str) -> frozenset[str]:
    """Return the host names in a list with commas."""
    return frozenset(name.strip().lower() for name in text.split(",") if name.strip())


def _check_origin(http: Request) -> None:
    """Refuse a request that only a web page sends: from another origin, or with a type that pages may send anywhere."""
    host = http.headers.get("host", "")
    if (origin := http.headers.get("origin")) is not None and origin.partition("://")[2] != host:
        raise RefusedError(403, "requests of web pages are refused: the header Origin names another host")
    sent = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if http.method == "POST" and sent != "application/json":
        raise RefusedError(415, "the body must be JSON: send it with the header Content-Type: application/json")


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def authorize(http: Request, key: bytes | None) -> None:
    """Refuse a request without the server's bearer key, if it has one."""
    if key is None:
        return
    scheme, _, sent = http.headers.get("authorization", "").partition(" ")
    # Compare even if the scheme is wrong, so that timing reveals nothing. Header bytes arrive as latin-1.
    is_right = hmac.compare_digest(sent.strip().encode("latin-1"), key)
    if scheme.lower() != "bearer" or not is_right:
        message = "the API key is missing or wrong: send it as `Authorization: Bearer <key>`"
        raise RefusedError(401, message, headers={"WWW-Authenticate": "Bearer"})


async def read_body(http: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """Read a body of at most `limit` bytes."""
    announced = http.headers.get("content-length", "")
    size = int(announced) if announced.isascii() and announced.isdigit() else 0
    chunks: list[bytes] = []
    received = 0
    try:
        with anyio.fail_after(BODY_TIMEOUT):
            async for chunk in http.stream():
                received += len(chunk)
                size = max(size, received)
                if size <= limit:
                    chunks.append(chunk)
                # Keep reading for a while, because most clients read the answer only after sending everything.
                elif received > 4 * limit:
                    break
    except TimeoutError as error:
        raise RefusedError(408, f"the body didn't arrive within {BODY_TIMEOUT:g} s") from error
    except ClientDisconnect as error:
        # The client is gone, but raising keeps the rollout from starting.
        raise RefusedError(400, "the client disconnected before it had sent the whole body") from error
    if size > limit:
        raise RefusedError(413, f"the body is over {limit} bytes", headers={"Connection": "close"})
    return b"".join(chunks)


def parse(kind: type[ModelT], body: bytes, *, malformed: int = 400) -> ModelT:
    """Parse a body as a message of the protocol; `malformed` is the status for a body that isn't JSON."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # Without the input, which may contain the trainer's key.
        found = error.errors(include_url=False, include_input=False, include_context=False)
        if found[0]["type"] == "json_invalid":
            raise RefusedError(malformed, f"the body isn't JSON: {found[0]['msg']}") from error
        # Drop the prefix that pydantic adds to a validator's message.
        raise RefusedError(422, [{**one, "msg": one["msg"].removeprefix("Value error, ")} for one in found]) from error


async def refused(_: Request, error: Exception) -> Response:
    """Answer a refused request, in the form `{"detail": …}`."""
    # Registered for two kinds: our own, and Starlette's for unknown paths and methods.
    assert isinstance(error, (RefusedError, HTTPException))
    return json_response({"detail": error.detail}, error.status_code, error.headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
