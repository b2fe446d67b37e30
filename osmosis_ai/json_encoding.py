"""Encode values as JSON for the wire."""

from __future__ import annotations

import json

import msgspec

__all__ = ["encode_json"]


def encode_json(value: object) -> bytes:
    """Encode a value as JSON; raise ValueError if JSON can't hold it. NaN and infinities become null."""
    try:
        try:
            return msgspec.json.encode(value)
        except UnicodeEncodeError:
            # A lone surrogate, from a tool that read bytes: endpoints refuse it, even escaped.
            return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
