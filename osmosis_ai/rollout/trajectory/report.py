"""Reports on a rollout's model calls, which a controller sends in its answer to a callback."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from pydantic import BaseModel, Field, ValidationError

__all__ = ["LlmCallMetrics", "SampleReport", "TrajectoryReport", "report_from_response"]

logger = logging.getLogger(__name__)


class LlmCallMetrics(BaseModel):
    """Measurements of one model call. `model_name` is the model that answered."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    model_name: str | None = None
    extra: dict[str, Any] | None = None


class SampleReport(BaseModel):
    """The model calls of one sample, in order, and their totals."""

    model_name: str | None = None
    llm_call_metrics: list[LlmCallMetrics] = Field(default_factory=list)
    final_metrics: dict[str, Any] | None = None


class TrajectoryReport(BaseModel):
    """The model calls of a rollout, by sample."""

    model_name: str | None = None
    samples: dict[str, SampleReport] = Field(default_factory=dict)


class Response(Protocol):
    """An HTTP client's answer."""

    def json(self) -> Any:
        """Decode the body."""
        ...


def report_from_response(response: Response) -> TrajectoryReport | None:
    """Return the report in the answer to a callback, or None if it is missing or unreadable."""
    try:
        body = response.json()
    except Exception:  # noqa: BLE001  each client has its own error for a body that isn't JSON
        return None
    found = body.get("trajectory") if isinstance(body, dict) else None
    if found is None:
        return None
    try:
        return TrajectoryReport.model_validate(found)
    except ValidationError as error:
        logger.warning("the controller's trajectory report is left out, because it can't be read: %s", error)
        return None
