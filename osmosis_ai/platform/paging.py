"""Pages of lists, times and cursors in the API's format."""

from __future__ import annotations

import time
from collections.abc import Mapping

from osmosis_ai.platform.errors import invalid
from osmosis_ai.records import JsonObject
from osmosis_ai.text import iso_time

__all__ = ["MAX_PAGE", "Window", "iso", "now", "number", "page", "window"]

MAX_PAGE = 50
"""The API's limit, which released clients rely on."""

Window = tuple[int, int]
"""The limit and offset of a page."""


def window(query: Mapping[str, str]) -> Window:
    """Return the page that a query asks for."""
    return number(query, "limit", MAX_PAGE, least=1, most=MAX_PAGE), number(query, "offset", 0)


def number(query: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
    """Return an integer of a query string; raise ApiError if it is outside `least` to `most`."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or not least <= int(text) <= most:
        raise invalid(f"{name} is {text[:40]!r}; it must be a number from {least} to {most}", name)
    return int(text)


def page(name: str, items: list[JsonObject], total: int, window: Window, **more: object) -> JsonObject:
    """Return a page of a list."""
    end = window[1] + len(items)
    return {
        name: items,
        "total_count": total,
        "has_more": end < total,
        "next_offset": end if end < total else None,
        **more,
    }


def iso(seconds: float | None) -> str | None:
    """Format seconds since the epoch as ISO 8601; None stays None."""
    if seconds is None:
        return None
    return iso_time(seconds).replace("+00:00", "Z")


def now() -> float:
    """Return the current time in seconds since the epoch."""
    return time.time()
