"""Backends run workflows and graders; `LocalBackend` runs them in this process."""

from __future__ import annotations

from osmosis_ai.rollout.backend.base import ExecutionBackend, ResultCallback
from osmosis_ai.rollout.backend.local.backend import LocalBackend

__all__ = ["ExecutionBackend", "LocalBackend", "ResultCallback"]
