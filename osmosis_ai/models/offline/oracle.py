"""`offline/oracle`: plays a row's reference solution through the tools, or answers with its ground truth."""

from __future__ import annotations

from osmosis_ai.data.solution import Result, fill, fill_text
from osmosis_ai.errors import ModelError
from osmosis_ai.models.base import ChatModel
from osmosis_ai.models.offline.answers import render
from osmosis_ai.models.offline.replies import answer, asked, calling
from osmosis_ai.models.offline.smoke import SmokeModel
from osmosis_ai.records import Completion, JsonObject, Message, Row, SolutionCall, Tool

__all__ = ["OracleModel", "create"]

NAME = "offline/oracle"


def create(row: Row) -> ChatModel:
    """The model of one row; where there is nothing to play and nothing to answer, the tools are called once."""
    return SmokeModel() if row.solution is None and row.ground_truth is None else OracleModel(row)


class OracleModel:
    """Plays one row's solution, step by step. Where there is none, or its last step is no text, it answers with the
    ground truth, in the form that the prompts ask for.

    It keeps no state: what it has done is what the conversation shows. A reward function that doesn't give this policy
    its best score is wrong, or the row is, or a tool.

    Args:
        row: The row.
    """

    def __init__(self, row: Row) -> None:
        self._row = row

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """The first step that isn't in the conversation yet.

        Raises:
            ModelError: The step refers to what no result has.
        """
        results = {message.get("tool_call_id"): message.get("content") for message in messages}
        try:
            return self._next(messages, tools, lambda number: results.get(f"oracle_{number}"))
        except ValueError as error:
            raise ModelError(f"the solution of row {self._row.index} can't go on: {error}", kind="solution") from None

    async def aclose(self) -> None:
        """Nothing to release."""

    def _next(self, messages: list[Message], tools: list[Tool], result: Result) -> Completion:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        done = asked(messages)
        made = 0
        for step in self._row.solution or []:
            if isinstance(step, str):
                return answer(NAME, fill_text(step, result))
            if not tools:
                break  # A tool that samples is asking, and it offers none.
            if f"oracle_{made}" not in done:
                calls = [(call.tool, _arguments(call, schemas.get(call.tool), result)) for call in step]
                return calling(NAME, "oracle", calls, first=made)
            made += len(step)
        return answer(NAME, self._ground_truth(messages))

    def _ground_truth(self, messages: list[Message]) -> str:
        if not self._row.ground_truth:
            return ""
        said = {message["role"]: str(message.get("content") or "") for message in reversed(messages)}
        return render(self._row.ground_truth, said.get("system", ""), said.get("user", ""))


def _arguments(call: SolutionCall, schema: JsonObject | None, result: Result) -> JsonObject:
    properties = (schema or {}).get("properties") or {}
    texts = {name for name, part in properties.items() if isinstance(part, dict) and part.get("type") == "string"}
    return {
        name: fill_text(value, result) if name in texts and isinstance(value, str) else fill(value, result)
        for name, value in call.arguments.items()
    }
