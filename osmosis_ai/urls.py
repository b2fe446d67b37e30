"""Check URLs from users, and show them without the secrets they may hold."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from yarl import URL

__all__ = ["UrlError", "has_scheme", "http_url", "is_loopback", "redact_urls", "show_url"]

UrlProblem: TypeAlias = Literal["malformed", "scheme", "credentials", "query"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_IN_TEXT = re.compile(r"https?://[^\s'\"]+")


class UrlError(ValueError):
    """A text isn't a usable URL. The message completes "the address …" and never repeats the text."""

    def __init__(self, problem: UrlProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


def has_scheme(text: str) -> bool:
    """Return True if a text begins like a URL, not like a path."""
    return _SCHEME.match(text) is not None


def http_url(text: str, *, bare: bool = False) -> URL:
    """Parse an http or https URL as the HTTP client will.

    Args:
        text: The URL.
        bare: Refuse a user, password, query or fragment: paths are appended to it, and keys are sent in a header.

    Raises:
        UrlError: The text isn't such a URL.
    """
    if bare and "@" in _authority(text):
        raise UrlError("credentials", "holds a user name or password")
    if bare and ("?" in text or "#" in text):
        raise UrlError("query", "holds a query or fragment")
    if any(character <= " " or character == "\x7f" for character in text):
        raise UrlError("malformed", "holds spaces or control characters")
    # Imported late: most commands check no URL.
    from yarl import URL

    try:
        url = URL(text)
        usable = bool(url.raw_host) and url.explicit_port != 0
    except ValueError:  # a UnicodeError too, from a host name that IDNA can't encode
        usable = False
    if not usable:
        raise UrlError("malformed", "must be an http:// or https:// address with a host")
    if url.scheme not in ("http", "https"):
        raise UrlError("scheme", "must begin with http:// or https://")
    return url


def is_loopback(host: str) -> bool:
    """Return True if a host name or address means this machine, which no other one can reach by it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def show_url(url: str) -> str:
    """Return a URL without its possibly secret parts: user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    authority = _authority(url)
    port = authority.rpartition("]")[2].partition(":")[2]
    if "@" in authority:
        rest = rest[authority.rindex("@") + 1 :]
    elif "@" in rest and port and not port.isdecimal():
        # The password holds an unescaped / ? or #, so it extends to the last @.
        rest = rest.rpartition("@")[2]
    return f"{scheme}://{re.split(r'[?#]', rest, maxsplit=1)[0]}"


def redact_urls(text: str) -> str:
    """Return a text with every http URL in it as `show_url` shows it."""
    return _IN_TEXT.sub(lambda found: show_url(found[0]), text)


def _authority(url: str) -> str:
    return re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0]
