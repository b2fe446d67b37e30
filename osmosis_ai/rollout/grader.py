"""The base class of graders, `Grader`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osmosis_ai.rollout.context import GraderContext
    from osmosis_ai.rollout.types import GraderConfig

__all__ = ["Grader"]


class Grader(ABC):
    """Scores what a workflow did. Each rollout creates its own instance.

    Example:
        class ExactMatch(Grader):
            async def grade(self, ctx):
                ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label))

    Args:
        config: The configuration, shared by all rollouts.
    """

    def __init__(self, config: GraderConfig | None = None) -> None:
        self.config = config

    @abstractmethod
    async def grade(self, ctx: GraderContext) -> Any:
        """Set the reward of each sample, or exclude the sample with `remove_sample`.

        Args:
            ctx: The sample, and the row's label and metadata.

        Returns:
            Anything; it is ignored.
        """
