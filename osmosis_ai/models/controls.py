"""Controls for reward functions: a policy that is always right, and one that says nothing."""

from __future__ import annotations

from typing import Any

from osmosis_ai.models.planner.answers import render
from osmosis_ai.records import Completion, Message, Tool

__all__ = ["EmptyModel", "OracleModel"]


class OracleModel:
    """Answers with the row's ground truth, in the form its prompts ask for; with nothing when the row has none.

    A reward function that doesn't give this policy its best score is wrong, or the ground truth isn't an answer.
    """

    def __init__(self, ground_truth: str | None) -> None:
        self._answer = ground_truth or ""

    async def complete(self, messages: list[Message], tools: list[Tool], params: dict[str, Any]) -> Completion:
        """The ground truth in the form that the prompts ask for, without calling a tool."""
        said = {message["role"]: str(message.get("content") or "") for message in reversed(messages)}
        answer = render(self._answer, said.get("system", ""), said.get("user", "")) if self._answer else ""
        message = {"role": "assistant", "content": answer}
        return Completion(message=message, model="offline/oracle", cost_usd=0.0)

    async def aclose(self) -> None:
        """Nothing to release."""


class EmptyModel:
    """Answers with the empty text: a reward function that scores it above its minimum gives points for nothing."""

    async def complete(self, messages: list[Message], tools: list[Tool], params: dict[str, Any]) -> Completion:
        """The empty text, without calling a tool."""
        return Completion(message={"role": "assistant", "content": ""}, model="offline/empty", cost_usd=0.0)

    async def aclose(self) -> None:
        """Nothing to release."""
