"""Test doubles for repositories and agent loops: real servers on loopback, nothing patched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osmosis_ai.testing.endpoint import (
        Gate,
        Reply,
        Request,
        ScriptedEndpoint,
        broken_json,
        by_turn,
        drop,
        hang,
        raw_json,
        status,
        text,
        tool_call,
        tool_calls,
    )
    from osmosis_ai.testing.pool import FakePool

__all__ = [
    "FakePool",
    "Gate",
    "Reply",
    "Request",
    "ScriptedEndpoint",
    "broken_json",
    "by_turn",
    "drop",
    "hang",
    "raw_json",
    "status",
    "text",
    "tool_call",
    "tool_calls",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: running `python -m osmosis_ai.testing.endpoint` must not import that module twice.
    if name == "FakePool":
        from osmosis_ai.testing.pool import FakePool

        return FakePool
    if name in __all__:
        from osmosis_ai.testing import endpoint

        return getattr(endpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
