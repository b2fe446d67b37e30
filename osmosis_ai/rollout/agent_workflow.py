"""The base class of agent workflows, `AgentWorkflow`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from osmosis_ai.rollout.context import AgentWorkflowContext
    from osmosis_ai.rollout.types import AgentWorkflowConfig, AgentWorkflowOutput, Messages

    ConfigT = TypeVar("ConfigT", bound=AgentWorkflowConfig)
else:
    # Unbound, so that a workflow can be defined before pydantic is loaded.
    ConfigT = TypeVar("ConfigT")

__all__ = ["AgentWorkflow"]


class AgentWorkflow(ABC, Generic[ConfigT]):
    """An agent that works on one row. Each rollout creates its own instance.

    Example:
        class Answer(AgentWorkflow[AgentWorkflowConfig]):
            async def run(self, ctx):
                reply = await ask_model(ctx.prompt)
                return [*ctx.prompt, reply]

    Args:
        config: The rollout's own copy of the configuration.
    """

    def __init__(self, config: ConfigT | None = None) -> None:
        self.config = config

    @abstractmethod
    async def run(self, ctx: AgentWorkflowContext[ConfigT]) -> AgentWorkflowOutput | Messages | None:
        """Work on one row.

        Args:
            ctx: The row's prompt and metadata, the configuration, the repository's tools.

        Returns:
            The message history, alone or in an `AgentWorkflowOutput`; None if an integration's agent or session holds
            it.
        """
