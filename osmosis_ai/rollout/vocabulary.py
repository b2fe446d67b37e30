"""The words between rollout servers and who drives them: statuses, error categories, headers, variables."""

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
"""Names the key that a rollout server asks for."""
PORT_VARIABLE = "_OSMOSIS_ROLLOUT_PORT"
"""Names the port that a rollout server is to listen on."""
INSTANCE_VARIABLE = "_OSMOSIS_ROLLOUT_INSTANCE_ID"
"""Names what a rollout server's health calls `instance_id`."""
ARTIFACT_ROOT_VARIABLE = "_OSMOSIS_ROLLOUT_ARTIFACT_ROOT"
"""Names the folder with one subfolder per rollout."""

NOT_GRADED = "the rollout isn't graded"
"""How the message of our own server begins if no grader was called."""


class _Word(str, Enum):
    """A word that equals its text and prints as it, like the standard library's StrEnum, which Python 3.10 lacks."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class RolloutStatus(_Word):
    """The state or outcome of a rollout: COMPLETED and ERROR of agent loops, the others of workflows."""

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
    # On Python 3.10 asyncio's is a class of its own.
    import asyncio

    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return RolloutErrorCategory.TIMEOUT
    if isinstance(error, (ValueError, TypeError, AssertionError)):
        return RolloutErrorCategory.VALIDATION_ERROR
    return RolloutErrorCategory.AGENT_ERROR
