"""`offline/empty`: answers with nothing."""

from __future__ import annotations

from osmosis_ai.models.offline.replies import answer
from osmosis_ai.records import Completion, JsonObject, Message, Row, Tool

__all__ = ["EmptyModel", "create"]


def create(row: Row) -> EmptyModel:
    """The model of one row, which doesn't matter to it."""
    return EmptyModel()


class EmptyModel:
    """Answers with the empty text: a reward function that scores it above its minimum gives points for nothing."""

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """The empty text, without calling a tool."""
        return answer("offline/empty", "")

    async def aclose(self) -> None:
        """Nothing to release."""
