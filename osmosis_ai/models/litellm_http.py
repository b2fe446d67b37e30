"""Bound what LiteLLM's HTTP clients do: they follow no redirect, and read replies up to a size.

LiteLLM keeps its clients in a cache, where each one gets the event hooks of this module as it enters. The openai
package, which some providers are called with, sends through `litellm.aclient_session`. Imported only after LiteLLM.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import litellm
from litellm.caching.llm_caching_handler import LLMClientCache
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler, get_async_httpx_client

from osmosis_ai.http import MAX_REPLY_BYTES, HttpError

__all__ = ["bound_clients"]

PIECE = 256 * 1024
"""Bytes to decompress at a time, so that a gzip bomb is counted before it is in memory as a whole."""


def bound_clients() -> None:
    """Bound every client that LiteLLM uses from now on."""
    litellm.in_memory_llm_clients_cache = _Clients()
    litellm.aclient_session = _Session()
    for handler in (litellm.module_level_aclient, litellm.module_level_client):
        _bound(handler)


class _Clients(LLMClientCache):
    # The options differ between LiteLLM's versions.
    def set_cache(self, key: str, value: object, **options: Any) -> None:  # type: ignore[override]
        _bound(value)
        super().set_cache(key, value, **options)


class _Session(httpx.AsyncClient):
    """Sends with LiteLLM's own client for the running event loop, because a connection can't move to another one."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        sent: httpx.Response = await get_async_httpx_client("openai").client.send(request, **options)
        return sent

    async def aclose(self) -> None:
        """Do nothing: every client of the openai package closes this one, which the others go on using."""


def _bound(handler: object) -> None:
    if isinstance(handler, AsyncHTTPHandler):
        # The handler recreates its client after some errors, with its own hooks.
        handler.event_hooks = handler.client.event_hooks = {"request": [_ask_async], "response": [_check_async]}
    elif isinstance(handler, HTTPHandler):
        handler.client.event_hooks = {"request": [_ask], "response": [_check]}


def _ask(request: httpx.Request) -> None:
    # The only coding that `_Reader` decompresses in pieces.
    request.headers["Accept-Encoding"] = "gzip"


def _check(response: httpx.Response) -> None:
    # Some providers take the key in the query.
    url, status = f"{response.request.url.copy_with(query=None)}", response.status_code
    if response.has_redirect_location:
        where = f"a redirect to {response.headers['Location']}, which is not followed, so that no key is sent there"
        raise HttpError("redirect", f"{url} answered {status}: {where}", status)
    # Removed, because httpx would decompress what `_Reader` has decompressed already.
    coding = response.headers.pop("Content-Encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "x-gzip"):
        raise HttpError("not_http", f"{url} answered in the coding {coding[:40]!r}, which it wasn't asked for", status)
    # httpx would decompress each piece whole, whatever its size.
    response.stream = _Reply(response.stream, _Reader(url, status, is_gzip="gzip" in coding))


async def _ask_async(request: httpx.Request) -> None:
    _ask(request)


async def _check_async(response: httpx.Response) -> None:
    _check(response)


class _Reader:
    """Decompresses the pieces of one reply, and counts them."""

    def __init__(self, url: str, status: int, *, is_gzip: bool) -> None:
        self._url = url
        self._status = status
        self._gzip = zlib.decompressobj(zlib.MAX_WBITS | 16) if is_gzip else None
        self._left = MAX_REPLY_BYTES

    def read(self, piece: bytes) -> Iterator[bytes]:
        for plain in (piece,) if self._gzip is None else self._plain(piece):
            self._left -= len(plain)
            if self._left < 0:
                message = f"{self._url} answered with more than {MAX_REPLY_BYTES} bytes"
                raise HttpError("too_long", message, self._status)
            yield plain

    def _plain(self, piece: bytes) -> Iterator[bytes]:
        assert self._gzip is not None
        try:
            # Bytes after the end of the gzip stream are ignored.
            while piece and not self._gzip.eof:
                yield self._gzip.decompress(piece, PIECE)
                piece = self._gzip.unconsumed_tail
        except zlib.error as error:
            raise HttpError("not_http", f"{self._url} answered with broken gzip: {error}", self._status) from error


class _Reply(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A reply's bytes as `_Reader` gives them, from a stream of either kind."""

    def __init__(self, inner: Any, reader: _Reader) -> None:
        self._inner = inner
        self._reader = reader

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            for plain in self._reader.read(piece):
                yield plain

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._inner:
            yield from self._reader.read(piece)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def close(self) -> None:
        self._inner.close()
