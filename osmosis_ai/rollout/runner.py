"""Where a served agent loop runs: the server knows only `RolloutRunner`."""

from __future__ import annotations

from typing import Protocol

from osmosis_ai.records import Tool
from osmosis_ai.rollout.core.schemas import RolloutRequest, RolloutResponse

__all__ = ["RolloutRunner"]


class RolloutRunner(Protocol):
    """Runs the rollouts of one agent loop, in this process or in others.

    Attributes:
        name: The agent loop's name.
    """

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Get ready; called once, before any rollout.

        Raises:
            StartError: The loop can't be loaded.
        """
        ...

    async def aclose(self) -> None:
        """Release what it holds; no rollout is running any more."""
        ...

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        """The tools of a rollout, in the OpenAI format, as the trainer gets them.

        Raises:
            OsmosisRolloutError: The loop's `get_tools` fails or returns something else.
        """
        ...

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        """Run one rollout to its end.

        Whatever the loop does (raise, hang, return the wrong thing, take its process down) becomes a response with
        status ERROR that says so. Cancelling it stops the rollout.
        """
        ...
