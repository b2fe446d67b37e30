"""`offline/smoke`: calls every tool once, with the smallest arguments that its schema allows, and answers nothing."""

from __future__ import annotations

from osmosis_ai.models.offline.replies import answer, asked, calling
from osmosis_ai.models.offline.schemas import smallest_arguments
from osmosis_ai.records import Completion, JsonObject, Message, Row, Tool

__all__ = ["SmokeModel", "create"]

NAME = "offline/smoke"


def create(row: Row) -> SmokeModel:
    """The model of one row, which doesn't matter to it."""
    return SmokeModel()


class SmokeModel:
    """Calls every tool in its first reply and says nothing in its second, which shows whether the tools work at all."""

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """The calls, unless the conversation has them already."""
        if not tools or "smoke_0" in asked(messages):
            return answer(NAME, "")
        functions = [tool["function"] for tool in tools]
        calls = [(function["name"], smallest_arguments(function.get("parameters"))) for function in functions]
        return calling(NAME, "smoke", calls)

    async def aclose(self) -> None:
        """Nothing to release."""
