"""Who may see the pages: requests of this browser's user, to this server's own address, from its own pages.

The server refuses other names for its address (DNS rebinding), other sites (`Sec-Fetch-Site`, `Origin`), and whoever
doesn't have the token, which the opened URL holds and a cookie after that: other users of the machine reach loopback
too. No page loads or sends anything elsewhere, or runs a script that isn't the viewer's own file.

`Access` says which tokens and cookies are valid: `osmosis view` has one token, a platform has users.
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
    # Not `no-referrer`, with which a form's request says that it comes from nowhere.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_OWN_SITES = {"same-origin", "none", ""}


class Access(Protocol):
    """Who may see which pages.

    Attributes:
        hint: What someone can do who has no valid cookie.
    """

    hint: str

    async def enter(self, token: str, cookies: Sequence[str]) -> str | None:
        """Return the cookie for the token of a URL, opened in a browser with these cookies; None if it isn't valid."""
        ...

    async def admit(self, cookies: Sequence[str]) -> ASGIApp | None:
        """Return the pages for a browser with these cookies, None if none of them is valid."""
        ...


class OneToken:
    """Shows an application to whoever has the one token, which is the cookie too."""

    hint = "open the URL that `osmosis view` printed: it holds the token of this server"

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self._app = app

    async def enter(self, token: str, cookies: Sequence[str]) -> str | None:
        """Return the token itself, if it is the right one."""
        return self.token if self._is_right(token) else None

    async def admit(self, cookies: Sequence[str]) -> ASGIApp | None:
        """Return the application, if one of the cookies is the token."""
        return self._app if any(map(self._is_right, cookies)) else None

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


class Guard:
    """Lets only authorized requests pass to the pages, and adds the headers that protect every response.

    Args:
        access: Who may see which pages.
        host: The address that the server listens on.
        port: Its port.
        cookie: The first part of the cookie's name.
        lifespan: The application that starts and ends with the server.
        addresses: Hosts, with their ports, by which a proxy in front of the server is reached.
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
        """Return the pages that a request may see, or the answer to one that may see none."""
        headers = Headers(scope=scope)
        host = headers.getlist("host")
        if len(host) != 1 or not self._is_own(host[0]):
            return PlainTextResponse("this server has another name: open the URL that it printed", 421)
        own_site = headers.get("sec-fetch-site", "") in _OWN_SITES
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host[0]:
            return PlainTextResponse("requests from other sites are refused", 403)
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
            # One slash: two would begin the name of another host.
            path = quote("/" + scope["path"].lstrip("/\\")) + (f"?{rest}" if rest else "")
            return self._welcome(path, cookie, own_site=own_site, secure=scope["scheme"] == "https")
        if not own_site:
            return PlainTextResponse("requests from other sites are refused: open the URL that was printed", 403)
        pages = await self._access.admit(cookies)
        return pages or PlainTextResponse(self._access.hint, 403)

    def _welcome(self, path: str, cookie: str, *, own_site: bool, secure: bool) -> Response:
        """Answer a request that holds the token with the cookie, and lead to the page without the token."""
        answer: Response
        if own_site:
            answer = RedirectResponse(path, 303)
        else:
            # After a redirect from another site, such as the file that opened the browser, a strict cookie isn't sent.
            answer = HTMLResponse(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(path)}">')
        answer.set_cookie(self._cookie, cookie, httponly=True, samesite="strict", secure=secure)
        return answer

    def _is_own(self, host: str) -> bool:
        """Return True if a Host header names this server by a name that no other site can have."""
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
    """Split a Host header into its lower-case name and its port; port -1 if it isn't one."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return "", -1
    if parts.netloc != host or "@" in host:
        return "", -1
    return (parts.hostname or ""), 80 if port is None else port
