"""Requests of the API: authorize the user, find the workspace, decode the body. Every route goes through here."""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from osmosis_ai.errors import OsmosisError, StoreError
from osmosis_ai.platform.accounts import Accounts, Holder, Workspace
from osmosis_ai.platform.errors import ApiError, invalid
from osmosis_ai.records import JsonObject

__all__ = ["MAX_BODY", "Call", "answer", "answer_stranger", "error_response", "json_response", "read_body", "same"]

MAX_BODY = 1 << 20
MAX_STRANGER_BODY = 4096
"""Bytes of a body, and of one that comes without a token."""
IDENTITY, REMOTE, PATH = "X-Osmosis-Git", "X-Osmosis-Remote", "X-Osmosis-Path"

T = TypeVar("T")
_logger = logging.getLogger("osmosis.platform")


class Call(NamedTuple):
    """An authorized request."""

    holder: Holder
    accounts: Accounts
    request: Request
    body: bytes

    @property
    def workspace(self) -> Workspace:
        """The workspace of the request; raises ApiError."""
        headers = self.request.headers
        path = headers.get(PATH)
        # Percent-encoded, because headers can't hold non-Latin characters.
        found = None if path is None else os.fsdecode(unquote_to_bytes(path))
        return self.accounts.workspace(headers.get(IDENTITY), headers.get(REMOTE), found)

    @property
    def query(self) -> dict[str, str]:
        """The query string."""
        return dict(self.request.query_params)

    @property
    def origin(self) -> str:
        """The origin at which the client reaches the server."""
        return str(self.request.base_url).rstrip("/")

    def named(self, name: str = "name") -> str:
        """Return a parameter of the path."""
        return str(self.request.path_params[name])

    def read(self, kind: type[T]) -> T:
        """Return the decoded body; raise ApiError if it doesn't match the type."""
        return decoded(self.body, kind)


Handler = Callable[[Call], "JsonObject | Response"]


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a body; raise an ApiError that names the wrong field."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".") or None
        raise invalid(f"{message}{f' at {field}' if field else ''}", field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body isn't JSON: {error}") from None


async def answer(
    request: Request, accounts: Accounts, handler: Handler, status: int = 200, max_body: int = MAX_BODY
) -> Response:
    """Authorize a request, then call its handler in a thread, because database queries block."""
    try:
        holder = await anyio.to_thread.run_sync(accounts.holder, request.headers.get("authorization"))
        # Only once the token is known, so that a stranger can't make the server read a large body.
        body = await read_body(request, max_body)
        found = await anyio.to_thread.run_sync(handler, Call(holder, accounts, request, body))
        return found if isinstance(found, Response) else json_response(found, status)
    # Nobody reads this answer; it keeps an ordinary event out of the log of errors.
    except ClientDisconnect:
        return Response(status_code=400)
    except Exception as error:  # noqa: BLE001 - every request has an answer
        return error_response(error)


async def answer_stranger(request: Request, kind: type[T], handler: Callable[[T], JsonObject]) -> Response:
    """Answer a request that needs no authorization, such as a login."""
    try:
        asked = decoded(await read_body(request, MAX_STRANGER_BODY), kind)
        return json_response(await anyio.to_thread.run_sync(handler, asked))
    except ClientDisconnect:
        return Response(status_code=400)
    except Exception as error:  # noqa: BLE001 - every request has an answer
        return error_response(error)


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body of at most `limit` bytes; raise ApiError if it is larger."""
    body = bytearray()
    # In parts, because a Content-Length may be missing.
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise ApiError(413, f"the body is larger than {limit:,} bytes", "TOO_LARGE")
    return bytes(body)


def same(expected: str, given: str) -> bool:
    """Compare two strings in constant time."""
    return hmac.compare_digest(expected.encode("utf-8"), given.encode("utf-8", "surrogatepass"))


def json_response(content: JsonObject, status: int = 200) -> Response:
    """Make a response."""
    # Released clients read the first; the second keeps answers, some with tokens, out of caches.
    headers = {"X-Osmosis-Version-Status": "current", "Cache-Control": "no-store"}
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: Exception) -> Response:
    """Make the response for an error. Details of an internal error go only to the server's log."""
    if isinstance(error, ApiError):
        body: dict[str, Any] = {"error": str(error), "code": error.code, **error.more}
        return json_response(body, error.status)
    if isinstance(error, StoreError):
        # SQLite's words: "database or disk is full".
        full = "full" in str(error)
        return json_response({"error": str(error), "code": "STORAGE_FULL" if full else "STORAGE"}, 507 if full else 503)
    if isinstance(error, OsmosisError):
        return json_response({"error": str(error), "code": "VALIDATION"}, 400)
    _logger.error("a request failed", exc_info=error)
    return json_response({"error": "the platform failed; see `osmosis platform logs`", "code": "INTERNAL"}, 500)
