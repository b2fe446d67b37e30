"""Errors of the API's requests, and their HTTP answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from osmosis_ai.errors import OsmosisError
from osmosis_ai.records import JsonValue

__all__ = ["ApiError", "conflict", "invalid", "not_found"]


class ApiError(OsmosisError):
    """A request failed. The user sees the message.

    Args:
        status: The HTTP status.
        message: What is wrong, and what to do.
        code: Identifies the error for programs.
        more: Further members of the body, such as `field` and `issues`.
    """

    def __init__(self, status: int, message: str, code: str, more: Mapping[str, JsonValue] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.more = dict(more or {})


def invalid(message: str, field: str | None = None, issues: Sequence[Mapping[str, JsonValue]] = ()) -> ApiError:
    """Make the error of a request with invalid content."""
    more: dict[str, JsonValue] = {} if field is None else {"field": field}
    if issues:
        more["issues"] = [dict(issue) for issue in issues]
    return ApiError(400, message, "VALIDATION", more)


def not_found(message: str) -> ApiError:
    """Make the error of a request about something that doesn't exist."""
    return ApiError(404, message, "NOT_FOUND")


def conflict(message: str, more: Mapping[str, JsonValue] | None = None) -> ApiError:
    """Make the error of a request that conflicts with the current state."""
    return ApiError(409, message, "CONFLICT", more)
