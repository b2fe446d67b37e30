"""Constants of the protocol between rollout servers and their drivers: statuses, errors, headers, variables."""

from __future__ import annotations

from enum import Enum

__all__ = [
    "API_KEY_VARIABLE",
    "ARTIFACT_ROOT_VARIABLE",
    "INSTANCE_VARIABLE",
    "NOT_GRADED",
    "POLLING_LEASE_HEADER",
    "PORT_VARIABLE",
    "GraderStatus",
    "MultiTurnMode",
    "RolloutErrorCategory",
    "RolloutStatus",
    "category_of",
]

POLLING_LEASE_HEADER = "X-Osmosis-Rollout-Lease"

API_KEY_VARIABLE = "OSMOSIS_ROLLOUT_API_KEY"
"""Environment variable with the key that a rollout server requires."""
PORT_VARIABLE = "_OSMOSIS_ROLLOUT_PORT"
"""Environment variable with the port that a rollout server must listen on."""
INSTANCE_VARIABLE = "_OSMOSIS_ROLLOUT_INSTANCE_ID"
"""Environment variable with the `instance_id` that a rollout server must report in its health."""
ARTIFACT_ROOT_VARIABLE = "_OSMOSIS_ROLLOUT_ARTIFACT_ROOT"
"""Environment variable with the folder that holds one subfolder per rollout."""

NOT_GRADED = "the rollout isn't graded"
"""Prefix of the message with which our own server reports that it called no grader."""


class _Word(str, Enum):
    """A string enum that equals and prints as its value, like `enum.StrEnum`, which Python 3.10 lacks."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class RolloutStatus(_Word):
    """The state or outcome of a rollout: COMPLETED and ERROR for agent loops, the others for workflows."""

    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    PENDING = "pending"
    QUEUED = "queued"
    RUNNING = "running"
    GRADING = "grading"
    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_terminal(self) -> bool:
        """True if a rollout of this status has ended."""
        return self not in (self.PENDING, self.QUEUED, self.RUNNING, self.GRADING, self.UNKNOWN)


class GraderStatus(_Word):
    """The outcome of grading."""

    PENDING = "pending"
    SUCCESS = "success"
    FAILURE = "failure"


class RolloutErrorCategory(_Word):
    """The cause of a failed rollout."""

    TIMEOUT = "timeout"
    LEASE_EXPIRED = "lease_expired"
    VALIDATION_ERROR = "validation_error"
    HTTP_ERROR = "http_error"
    AGENT_ERROR = "agent_error"
    INTERNAL_ERROR = "internal_error"


class MultiTurnMode(_Word):
    """How a conversation of several turns becomes samples; for workflows written for SDK 0.2."""

    MULTI_SAMPLE = "multi_sample"
    SINGLE_SAMPLE = "single_sample"


def category_of(error: BaseException) -> RolloutErrorCategory:
    """Return the category of an exception that a workflow or a grader raised."""
    # On Python 3.10, asyncio.TimeoutError isn't the built-in TimeoutError.
    import asyncio

    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return RolloutErrorCategory.TIMEOUT
    if isinstance(error, (ValueError, TypeError, AssertionError)):
        return RolloutErrorCategory.VALIDATION_ERROR
    return RolloutErrorCategory.AGENT_ERROR
