"""The offline models and their engine, which needs no connection, budget, retries or cache."""

from __future__ import annotations

import json
from collections.abc import Iterable

from osmosis_ai.data.solution import Result, fill, fill_text
from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.models.base import ChatModel
from osmosis_ai.models.host import HostOptions
from osmosis_ai.models.offline.answers import render
from osmosis_ai.models.offline.schemas import smallest_arguments
from osmosis_ai.records import Completion, JsonObject, Message, ModelSpec, Row, SolutionCall, Tool

__all__ = ["ENGINE", "OracleModel"]


class _OfflineModel:
    """The model of one row. It keeps no state: the conversation shows what it has done."""

    name: str

    def __init__(self, row: Row) -> None:
        self._row = row

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""

    def _answer(self, text: str) -> Completion:
        # A cost of 0 is known, unlike None, so reports can add it up.
        return Completion(message={"role": "assistant", "content": text}, model=self.name, cost_usd=0.0)

    def _call(self, calls: Iterable[tuple[str, JsonObject]], first: int = 0) -> Completion:
        """Return a reply with tool calls under ids such as `oracle_0`."""
        made = [
            {
                "id": self._call_id(number),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for number, (name, arguments) in enumerate(calls, first)
        ]
        message: Message = {"role": "assistant", "content": None, "tool_calls": made}
        return Completion(message=message, finish_reason="tool_calls", model=self.name, cost_usd=0.0)

    def _has_called(self, number: int, messages: list[Message]) -> bool:
        call_id = self._call_id(number)
        return any(call.get("id") == call_id for message in messages for call in message.get("tool_calls") or ())

    def _call_id(self, number: int) -> str:
        return f"{self.name.removeprefix('offline/')}_{number}"


class EmptyModel(_OfflineModel):
    """Gives an empty answer: a reward function that scores it above its minimum rewards doing nothing."""

    name = "offline/empty"

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        return self._answer("")


class SmokeModel(_OfflineModel):
    """Calls every tool in its first reply and says nothing in its second: a test that the tools work at all."""

    name = "offline/smoke"

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        if not tools or self._has_called(0, messages):
            return self._answer("")
        functions = [tool["function"] for tool in tools]
        return self._call((each["name"], smallest_arguments(each.get("parameters"))) for each in functions)


class OracleModel(_OfflineModel):
    """Plays one row's solution step by step. Without a solution, or after one whose last step isn't text, it answers
    with the ground truth in the form that the prompts ask for. With neither, it acts as `SmokeModel`.

    If this policy doesn't get a reward function's best score, the function, the row or a tool is wrong.
    """

    name = "offline/oracle"

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Return the first step that isn't in the conversation yet.

        Raises:
            ModelError: The step refers to something that no result contains.
        """
        if self._row.solution is None and self._row.ground_truth is None:
            return await SmokeModel(self._row).complete(messages, tools, params)
        results = {message.get("tool_call_id"): message.get("content") for message in messages}
        try:
            return self._next(messages, tools, lambda number: results.get(self._call_id(number)))
        except ValueError as error:
            raise ModelError(f"row {self._row.index}'s solution can't continue: {error}", kind="solution") from None

    def _next(self, messages: list[Message], tools: list[Tool], result: Result) -> Completion:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        made = 0
        for step in self._row.solution or []:
            if isinstance(step, str):
                return self._answer(fill_text(step, result))
            if not tools:
                break  # A request without tools comes from a tool that samples.
            # The number of calls made so far is the id of the step's first call.
            if not self._has_called(made, messages):
                return self._call(
                    ((call.tool, _arguments(call, schemas.get(call.tool), result)) for call in step), made
                )
            made += len(step)
        if not self._row.ground_truth:
            return self._answer("")
        # Reversed, so that the first message of each role wins.
        said = {message["role"]: str(message.get("content") or "") for message in reversed(messages)}
        return self._answer(render(self._row.ground_truth, said.get("system", ""), said.get("user", "")))


def _arguments(call: SolutionCall, schema: JsonObject | None, result: Result) -> JsonObject:
    properties = (schema or {}).get("properties") or {}
    texts = {name for name, part in properties.items() if isinstance(part, dict) and part.get("type") == "string"}
    return {
        name: fill_text(value, result) if name in texts and isinstance(value, str) else fill(value, result)
        for name, value in call.arguments.items()
    }


_MODELS: dict[str, type[OracleModel | SmokeModel | EmptyModel]] = {
    model.name: model for model in (OracleModel, SmokeModel, EmptyModel)
}


class _Host:
    """The host of an offline model; each rollout gets its own, made for its row."""

    def __init__(self, spec: ModelSpec) -> None:
        if spec.model not in _MODELS:
            raise ModelStartError(f"There is no offline model {spec.model!r}.")
        self.spec = spec

    def for_rollout(self, row: Row, run_index: int, draw: str = "") -> ChatModel:
        return _MODELS[self.spec.model](row)

    def price_known(self) -> bool:
        return True  # it costs nothing

    async def probe(self) -> None:
        """Do nothing: an offline model always answers."""

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""


class _Engine:
    def create(self, spec: ModelSpec, options: HostOptions) -> _Host:
        return _Host(spec)

    def preload(self, spec: ModelSpec) -> None:
        _Host(spec)

    def destination(self, spec: ModelSpec, environ: object) -> None:
        """Return None: requests go nowhere."""


ENGINE = _Engine()
