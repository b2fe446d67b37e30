"""The platform's client: find the server, authenticate, send requests."""

from __future__ import annotations

import http.client
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import msgspec

from osmosis_ai import __version__
from osmosis_ai.errors import OsmosisError
from osmosis_ai.folders import replaced_file
from osmosis_ai.platform.home import Home
from osmosis_ai.records import JsonObject
from osmosis_ai.urls import UrlError, http_url, is_loopback, show_url

__all__ = ["Client", "ClientError", "Credentials", "Server", "find_server", "quoted"]

URL_VARIABLE, TOKEN_VARIABLE = "OSMOSIS_PLATFORM_URL", "OSMOSIS_TOKEN"
TOKEN_URL_VARIABLE, INSECURE_VARIABLE = "OSMOSIS_TOKEN_PLATFORM_URL", "OSMOSIS_ALLOW_INSECURE_PLATFORM_URL"
SECONDS = 30.0
"""Time limit for an answer, unless a request has its own."""
START = "start one with `osmosis platform up`, or name one with --platform URL"

_CODES = {
    400: "VALIDATION",
    401: "AUTH_REQUIRED",
    404: "NOT_FOUND",
    409: "CONFLICT",
    413: "VALIDATION",
    426: "UPGRADE_REQUIRED",
    429: "RATE_LIMITED",
}


class ClientError(OsmosisError):
    """A platform command failed. `code` identifies the error for programs; `details` has further fields for them."""

    def __init__(self, message: str, code: str = "VALIDATION", details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.details = dict(details or {})


class Server(NamedTuple):
    """A platform's URL and the token for it. `source` says where the token came from."""

    url: str
    token: str | None
    source: str


class Credentials:
    """The tokens of logins by URL, in a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, str]:
        """Return the tokens by URL; raise ClientError if the file can't be read."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise ClientError(f"{self.path} can't be read: {error}", "CREDENTIALS_UNREADABLE") from None

    def set(self, url: str, token: str | None) -> None:
        """Store the token for a URL, or remove it if None."""
        known = {**self.read(), **({} if token is None else {url: token})}
        if token is None:
            known.pop(url, None)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replaced_file(self.path, private=True) as file:
                file.write(msgspec.json.encode(known))
        except OSError as error:
            raise ClientError(f"{self.path} can't be written: {error.strerror}", "CREDENTIALS_UNWRITABLE") from None


def find_server(given: str | None, environ: Mapping[str, str], home: Home, credentials: Credentials) -> Server:
    """Return the platform to use: `--platform`, else `OSMOSIS_PLATFORM_URL`, else the one running on this machine.

    Raises:
        ClientError: There is none, or its URL or token can't be used.
    """
    local = home.read_info()
    named = given or environ.get(URL_VARIABLE)
    if named:
        url = _checked(named, environ)
    elif local is not None:
        url = local.url
    else:
        raise ClientError(f"no platform is running on this machine: {START}", "PLATFORM_ERROR")
    if token := environ.get(TOKEN_VARIABLE):
        meant = environ.get(TOKEN_URL_VARIABLE)
        # Keeps a token for one platform from being sent to another that --platform or a variable names.
        if named and meant is not None and meant.rstrip("/") != url:
            raise ClientError(
                f"{TOKEN_VARIABLE} is for {show_url(meant)}, as {TOKEN_URL_VARIABLE} says, and not for {url}",
                "AUTH_REQUIRED",
            )
        return Server(url, token, TOKEN_VARIABLE)
    if token := credentials.read().get(url):
        return Server(url, token, "login")
    if local is not None and local.url == url:
        return Server(url, home.read_token(), "local")
    return Server(url, None, "none")


def _checked(text: str, environ: Mapping[str, str]) -> str:
    try:
        url = http_url(text, bare=True)
    except UrlError as error:
        raise ClientError(f"the platform's address {error}") from None
    if url.scheme == "http" and not is_loopback(url.host or "") and environ.get(INSECURE_VARIABLE) != "1":
        raise ClientError(
            f"{url.host} is another machine, and http:// would send the token unencrypted: use https://, or set "
            f"{INSECURE_VARIABLE}=1"
        )
    return str(url).rstrip("/")


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect, because that would send the token to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


class Client:
    """Sends requests to a platform, for one workspace if `headers` name it."""

    def __init__(self, server: Server, headers: Mapping[str, str]) -> None:
        self.server = server
        self._headers = {
            "User-Agent": f"osmosis-cli/{__version__}",
            "X-Osmosis-CLI-Version": __version__,
            "Accept": "application/json",
            **headers,
        }
        # The environment's proxies are for the internet, not for a server of one's own.
        proxies = ProxyHandler({}) if is_loopback(urlsplit(server.url).hostname or "") else ProxyHandler()
        self._opener = build_opener(proxies, _NoRedirects())

    def get(self, path: str, **query: object) -> JsonObject:
        """GET a path with a query, and return the answer's JSON object; raise ClientError."""
        given = {name: str(value) for name, value in query.items() if value is not None}
        return self._send("GET", f"{path}?{urlencode(given)}" if given else path, None)

    def post(
        self, path: str, body: object, *, seconds: float = SECONDS, key: str | None = None, anonymous: bool = False
    ) -> JsonObject:
        """POST a JSON object, and return the answer's; raise ClientError.

        Args:
            path: The path of the API.
            body: The object to send.
            seconds: How long to wait for the answer.
            key: An idempotency key, which makes the request safe to repeat.
            anonymous: True to send no token.
        """
        more = {} if key is None else {"Idempotency-Key": key}
        return self._send("POST", path, body, seconds=seconds, more=more, anonymous=anonymous)

    def delete(self, path: str, body: object = None) -> JsonObject:
        """DELETE a path, and return the answer's JSON object; raise ClientError."""
        return self._send("DELETE", path, body)

    def pages(self, path: str, name: str, *, limit: int | None, **query: object) -> tuple[list[JsonObject], JsonObject]:
        """Return a list's first `limit` items, or all of them, and its last page."""
        items: list[JsonObject] = []
        while True:
            page = self.get(path, **query, limit=50 if limit is None else limit, offset=len(items))
            items += page[name]
            if limit is not None or page["next_offset"] is None:
                return items, page

    def events(self, path: str, since: int) -> Iterator[tuple[str, str, JsonObject]]:
        """Yield the id, kind and data of each server-sent event; raise ClientError."""
        request = self._request("GET", path, None, {"Last-Event-ID": str(since), "Accept": "text/event-stream"})
        with self._open(request, SECONDS * 2) as answer:
            fields: dict[str, str] = {}
            try:
                for line in answer:
                    name, _, value = line.decode("utf-8").rstrip("\n").partition(": ")
                    if name:
                        fields[name] = value
                    # An empty line ends an event; one after a comment ends nothing.
                    elif "data" in fields:
                        yield fields.get("id", ""), fields.get("event", ""), json.loads(fields["data"])
                        fields = {}
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error

    def upload(self, url: str, file: IO[bytes], size: int, headers: Mapping[str, str]) -> None:
        """PUT a file of `size` bytes to a signed URL; raise ClientError."""
        request = Request(url, file, {**headers, "Content-Length": str(size)}, method="PUT")  # noqa: S310 - checked
        with self._open(request, 3600):
            pass

    def download(self, url: str, target: Path) -> None:
        """Download a signed URL into a file; raise ClientError."""
        with self._open(Request(url), 3600) as answer, replaced_file(target) as file:  # noqa: S310 - as above
            shutil.copyfileobj(answer, file, 1 << 20)

    def _send(
        self,
        method: str,
        path: str,
        body: object,
        *,
        seconds: float = SECONDS,
        more: Mapping[str, str] | None = None,
        anonymous: bool = False,
    ) -> JsonObject:
        request = self._request(method, path, body, more or {}, anonymous=anonymous)
        with self._open(request, seconds) as answer:
            try:
                text = answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error
        try:
            # A success without content has no body.
            return msgspec.json.decode(text or b"{}", type=dict)
        except msgspec.DecodeError:
            raise ClientError(f"{self.server.url} doesn't answer like a platform", "PLATFORM_ERROR") from None

    def _request(
        self, method: str, path: str, body: object, more: Mapping[str, str], *, anonymous: bool = False
    ) -> Request:
        headers = {**self._headers, **more}
        if not anonymous:
            if self.server.token is None:
                raise ClientError(f"no token for {self.server.url}: run `osmosis auth login`", "AUTH_REQUIRED")
            headers["Authorization"] = f"Bearer {self.server.token}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), "application/json"
        return Request(f"{self.server.url}{path}", data, headers, method=method)  # noqa: S310 - http or https

    def _open(self, request: Request, seconds: float) -> http.client.HTTPResponse:
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=seconds)
        except HTTPError as error:
            with error:
                raise self._refused(error.code, error.read()) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        return answer

    def _refused(self, status: int, body: bytes) -> ClientError:
        try:
            found = msgspec.json.decode(body, type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError):
            # An error page of a proxy, for example.
            found = {}
        # Scripts read these codes; the platform's own code is in the details.
        code = _CODES.get(status, "PLATFORM_ERROR")
        message = str(found.get("error") or found.get("message") or f"the platform answered with status {status}")
        issues = found.get("issues")
        for issue in issues if isinstance(issues, list) else []:
            key, said = str(issue.get("key", "")), str(issue.get("message", ""))
            message += f"\n  - {key}: {said}" if key else f"\n  - {said}"
        if status == 401:
            message += ": set OSMOSIS_TOKEN, or run `osmosis auth login`" if "OSMOSIS_TOKEN" not in message else ""
        details = {**found, "platform_code": found.get("code"), "field": found.get("field"), "status_code": status}
        return ClientError(message, code, details)

    def _unreachable(self, error: Exception) -> ClientError:
        reason = getattr(error, "reason", None) or error
        said = os.strerror(reason.errno) if isinstance(reason, OSError) and reason.errno else str(reason)
        return ClientError(f"no platform answers at {self.server.url} ({said}): {START}", "PLATFORM_ERROR")


def quoted(name: str) -> str:
    """Return a name percent-encoded as one segment of a path."""
    return quote(name, safe="")
