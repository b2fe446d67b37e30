"""JSON that is sent to, or comes from, a program that isn't this one: a model, a tool, an endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

__all__ = ["decode_json", "encode_json"]


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


def decode_json(
    text: str,
    *,
    parse_float: Callable[[str], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """Decode JSON as `json.loads` does, which reads more than msgspec: NaN, and numbers of any size.

    Raises:
        ValueError: It isn't JSON, has a number with too many digits, or is nested too deep.
    """
    try:
        return json.loads(text, parse_float=parse_float, parse_constant=parse_constant)
    except RecursionError as error:
        raise ValueError(f"nested too deep ({error})") from error
