"""Serve an agent loop to a trainer: the protocol as an ASGI application, and a server for it."""

from __future__ import annotations

from osmosis_ai.rollout.server.app import build_app, create_app
from osmosis_ai.rollout.server.serve import serve_agent_loop

__all__ = ["build_app", "create_app", "serve_agent_loop"]
