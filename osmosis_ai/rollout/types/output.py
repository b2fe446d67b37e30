"""The result of a workflow's `run`."""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AgentWorkflowOutput", "Messages", "output_of"]

Messages: TypeAlias = list[dict[str, Any]]
"""A message history."""


class AgentWorkflowOutput(BaseModel):
    """A message history and measurements. Unknown fields, NaN and infinities are refused.

    Attributes:
        messages: The message history; None for a rollout without a sample.
        metrics: Numbers to keep with the sample.
        info: Reserved; graders don't receive it.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, revalidate_instances="always")

    messages: Messages | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    info: dict[str, Any] = Field(default_factory=dict)


def output_of(value: object) -> AgentWorkflowOutput:
    """Validate a value that `run` returned; raises TypeError, or pydantic's ValidationError, which is a ValueError."""
    if isinstance(value, AgentWorkflowOutput):
        return AgentWorkflowOutput.model_validate(value)
    if isinstance(value, list):
        return AgentWorkflowOutput(messages=value)
    kind = type(value).__name__
    raise TypeError(f"run() must return an AgentWorkflowOutput, a list of messages, or None, not {kind}")
