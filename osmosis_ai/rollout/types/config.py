"""Configuration of workflows and graders, to be subclassed with fields of their own."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AgentWorkflowConfig", "BaseConfig", "ConcurrencyConfig", "GraderConfig"]


class ConcurrencyConfig(BaseModel):
    """Limits on concurrent rollouts.

    Attributes:
        max_concurrent: Maximum number of workflows that run at a time; None for no limit.
    """

    max_concurrent: int | None = Field(default=None, ge=1)


class BaseConfig(BaseModel):
    """Base of all configurations. Unknown fields are kept, and assignments are validated."""

    model_config = ConfigDict(extra="allow", validate_assignment=True, arbitrary_types_allowed=True)

    name: str
    description: str | None = None


class AgentWorkflowConfig(BaseConfig):
    """Configuration of a workflow. Each rollout gets a deep copy."""

    concurrency: ConcurrencyConfig = Field(default_factory=ConcurrencyConfig)


class GraderConfig(BaseConfig):
    """Configuration of a grader. All rollouts share it; its `concurrency` has no effect."""

    concurrency: ConcurrencyConfig = Field(default_factory=ConcurrencyConfig)
