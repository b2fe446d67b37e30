"""Serve an agent loop or workflows to a trainer: the protocols as ASGI applications, and a server for them.

Each name is loaded on first use, so that a server of one kind doesn't load the other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from osmosis_ai.rollout.server.app import build_app, create_app
    from osmosis_ai.rollout.server.auth import ControllerAuth
    from osmosis_ai.rollout.server.serve import serve_agent_loop
    from osmosis_ai.rollout.server.workflows import create_rollout_server

__all__ = ["ControllerAuth", "build_app", "create_app", "create_rollout_server", "serve_agent_loop"]

_HOMES = {
    "ControllerAuth": "auth",
    "build_app": "app",
    "create_app": "app",
    "create_rollout_server": "workflows",
    "serve_agent_loop": "serve",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
