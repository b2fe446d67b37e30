"""Control access to the pages: only this user's browser, at this server's own address, from its own pages.

The server refuses other names for its address (DNS rebinding), requests from other sites (`Sec-Fetch-Site`, `Origin`),
and requests without the token, because other users of the machine can reach loopback too. The first URL holds the
token, later a cookie. No page loads anything from elsewhere, sends anything elsewhere, or runs a script other than the
viewer's own file.

`Access` decides which tokens and cookies are valid: `osmosis view` has one token, a platform has users.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection, Sequence
from html import escape
from typing import Protocol
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osmosis_ai.urls import is_loopback

__all__ = ["POLICY", "Access", "Guard", "OneToken"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`, because a form would then send `Origin: null`.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_OWN_SITES = {"same-origin", "none", ""}


class Access(Protocol):
    """Decides who may see which pages.

    Attributes:
        hint: What to do without a valid cookie, for the error page.
    """

    hint: str

    async def enter(self, token: str, cookies: Sequence[str]) -> str | None:
        """Return the cookie for a URL's token, given the browser's cookies; None if the token isn't valid."""
        ...

    async def admit(self, cookies: Sequence[str]) -> ASGIApp | None:
        """Return the pages for a browser with these cookies, or None if none is valid."""
        ...


class OneToken:
    """Shows an application to anyone with the one token, which also serves as the cookie."""

    hint = "open the URL that `osmosis view` printed: it holds the token of this server"

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self._app = app

    async def enter(self, token: str, cookies: Sequence[str]) -> str | None:
        """Return the token itself, if it is correct."""
        return self.token if self._is_right(token) else None

    async def admit(self, cookies: Sequence[str]) -> ASGIApp | None:
        """Return the application, if one of the cookies is the token."""
        return self._app if any(map(self._is_right, cookies)) else None

    def _is_right(self, given: str) -> bool:
        # As bytes, because `compare_digest` refuses text that isn't ASCII.
        return hmac.compare_digest(given.encode(), self.token.encode())


class Guard:
    """Passes only authorized requests to the pages, and adds protective headers to every response.

    Args:
        access: Decides who may see which pages.
        host: The address that the server listens on.
        port: The port that the server listens on.
        cookie: The prefix of the cookie's name.
        lifespan: The application to start and end with the server.
        addresses: Hosts, with ports, of proxies in front of the server.
    """

    def __init__(
        self,
        access: Access,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        cookie: str = "osmosis-view",
        lifespan: ASGIApp | None = None,
        addresses: Collection[str] = (),
    ) -> None:
        self._access = access
        self._port = port
        # With the port, because browsers share a host's cookies among its ports.
        self._cookie = f"{cookie}-{port}"
        self._lifespan = lifespan
        self._addresses = frozenset(addresses)
        self._remote = not is_loopback(host)
        self._names = {"localhost", host.lower()}
        if self._remote:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            if self._lifespan is not None:
                await self._lifespan(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = await self._answer(scope)
        await answer(scope, receive, protected)

    async def _answer(self, scope: Scope) -> ASGIApp:
        """Return the pages that a request may see, or the response that refuses it."""
        headers = Headers(scope=scope)
        host = headers.getlist("host")
        if len(host) != 1 or not self._is_own(host[0]):
            return PlainTextResponse("this server has another name: open the URL that it printed", 421)
        own_site = headers.get("sec-fetch-site", "") in _OWN_SITES
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host[0]:
            return PlainTextResponse("requests from other sites are refused", 403)
        # Every browser sends the header with a POST.
        if scope["method"] not in ("GET", "HEAD") and origin is None:
            return PlainTextResponse("only the viewer's own pages may write", 403)
        cookies = [each[self._cookie] for each in map(cookie_parser, headers.getlist("cookie")) if self._cookie in each]
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and scope["method"] == "GET":
            cookie = await self._access.enter(given[0], cookies)
            if cookie is None:
                return PlainTextResponse("this token isn't valid: open the URL that was printed", 403)
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # Exactly one slash: a URL that starts with two names another host.
            path = quote("/" + scope["path"].lstrip("/\\")) + (f"?{rest}" if rest else "")
            return self._welcome(path, cookie, own_site=own_site, secure=scope["scheme"] == "https")
        if not own_site:
            return PlainTextResponse("requests from other sites are refused: open the URL that was printed", 403)
        pages = await self._access.admit(cookies)
        return pages or PlainTextResponse(self._access.hint, 403)

    def _welcome(self, path: str, cookie: str, *, own_site: bool, secure: bool) -> Response:
        """Answer a request that has the token: set the cookie, and go to the page's URL without the token."""
        answer: Response
        if own_site:
            answer = RedirectResponse(path, 303)
        else:
            # A refresh, because browsers don't send a strict cookie after a redirect that another site started, such as
            # the file that opened the browser.
            answer = HTMLResponse(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(path)}">')
        answer.set_cookie(self._cookie, cookie, httponly=True, samesite="strict", secure=secure)
        return answer

    def _is_own(self, host: str) -> bool:
        """Return True if a Host header names this server by a name that no other site can use."""
        if host.lower() in self._addresses:
            return True
        name, port = _split(host)
        if port != self._port:
            return False
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # DNS rebinding needs a name: an address in a Host header is always what the user typed.
        return self._remote or address.is_loopback


def _split(host: str) -> tuple[str, int]:
    """Split a Host header into its name in lower case and its port; the port is -1 if the header is invalid."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return "", -1
    if parts.netloc != host or "@" in host:
        return "", -1
    return (parts.hostname or ""), 80 if port is None else port
