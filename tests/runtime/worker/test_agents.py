"""An agent loop's result as a record, and the built-in loop as an agent loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from osmosis_ai.errors import ModelError, OsmosisRolloutError
from osmosis_ai.records import Row, ToolCall, Turn, Usage
from osmosis_ai.rollout import RolloutAgentLoop, RolloutRequest, RolloutResult
from osmosis_ai.rollout.outcome import LoopOutcome, interpret, raised
from osmosis_ai.runtime.pool.trajectory import TrajectoryBuilder
from osmosis_ai.runtime.protocol import Acting, Asked, RolloutDone, RolloutJob, TurnDone
from osmosis_ai.runtime.worker.agent_loop import McpAgentLoop
from osmosis_ai.runtime.worker.agents import LoadedAgent, finished

HERE = Path(__file__).resolve()
ROW = Row(0, "r", "Be short.", "Hello.")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/one"}},
    "required": ["a"],
    "$defs": {"one": {"enum": [1]}},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


class Nothing(RolloutAgentLoop):
    name = "nothing"

    def get_tools(self, request: RolloutRequest) -> list[Any]:
        return []

    async def run(self, ctx: Any) -> RolloutResult:
        return ctx.complete([])


AGENT = LoadedAgent(Nothing(), "nothing", [])


def outcome_of_run(result: Any) -> LoopOutcome:
    return raised(result) if isinstance(result, BaseException) else interpret(result)


def test_the_built_in_loop_is_an_agent_loop() -> None:
    loop = McpAgentLoop([TOOL])
    assert isinstance(loop, RolloutAgentLoop)
    assert loop.name == "mcp"
    assert [tool.model_dump() for tool in loop.get_default_tools()] == [TOOL]


@pytest.mark.parametrize(
    ("result", "reason", "score"),
    [
        (RolloutResult("COMPLETED", [], "stop"), "stop", None),
        (RolloutResult("COMPLETED", [], "max_turns", reward=0), "max_turns", 0.0),
        (RolloutResult("COMPLETED", [], "gave up", reward=1), "stop", 1.0),
        (RolloutResult("COMPLETED", [], "error"), "stop", None),
    ],
)
def test_a_result_is_recorded(result: RolloutResult, reason: str, score: float | None, tmp_path: Path) -> None:
    ending = finished(interpret(result), AGENT, tmp_path)
    assert (ending.finish_reason, ending.failure, ending.messages) == (reason, None, [])
    assert ending.report is not None
    assert ending.report.finish_reason == result.finish_reason
    assert (ending.report.score.value if ending.report.score else None) == score


@pytest.mark.parametrize(("reward", "kind"), [(math.inf, "not_finite"), (10**400, "not_finite"), ("1", "wrong_type")])
def test_a_reward_that_is_no_number_is_a_scoring_error(reward: Any, kind: str, tmp_path: Path) -> None:
    report = finished(interpret(RolloutResult("COMPLETED", [], reward=reward)), AGENT, tmp_path).report
    assert report is not None
    assert report.score is not None
    assert report.score.failure is not None
    assert report.score.failure.kind == kind


@pytest.mark.parametrize(
    ("outcome", "origin", "said"),
    [
        (None, "agent", "run returned None, not a RolloutResult"),
        (RolloutResult("ERROR", [], error_message="no luck"), "agent", "no luck"),
        (RolloutResult("COMPLETED", ["text"]), "agent", "message 0 is a str, not a dict"),  # type: ignore[list-item]
        (RolloutResult("COMPLETED", [{"tool_calls": "x"}]), "agent", "message 0 has `tool_calls` that aren't a list"),
        (
            RolloutResult("COMPLETED", [{}, {"content": (b"x",)}]),
            "agent",
            "message 1 holds bytes, and messages are JSON",
        ),
        (KeyError("level"), "agent", "KeyError: 'level'"),
    ],
)
def test_a_failure_says_whose_it_was(outcome: Any, origin: str, said: str, tmp_path: Path) -> None:
    failure = finished(outcome_of_run(outcome), AGENT, tmp_path).failure
    assert failure is not None
    assert failure.origin == origin
    assert said in failure.message


@pytest.mark.parametrize("outcome", [None, RolloutResult("COMPLETED", "text"), OsmosisRolloutError("not async")])  # type: ignore[arg-type]
def test_a_failure_that_no_line_has_raised_is_at_the_loops_run(outcome: Any) -> None:
    failure = finished(outcome_of_run(outcome), AGENT, HERE.parent).failure
    assert failure is not None
    assert (failure.file, failure.line) == (HERE.name, Nothing.run.__code__.co_firstlineno)


@pytest.mark.parametrize("reward", [math.nan, "1"])
def test_a_reward_that_is_no_number_is_at_the_loops_run_with_what_to_write(reward: Any) -> None:
    report = finished(interpret(RolloutResult("COMPLETED", [], reward=reward)), AGENT, HERE.parent).report
    assert report is not None
    assert report.score is not None
    failure = report.score.failure
    assert failure is not None
    assert (failure.file, failure.line) == (HERE.name, Nothing.run.__code__.co_firstlineno)
    assert "write `return ctx.complete(messages, reward=1.0)`" in failure.message


def test_a_forgotten_await_is_said_with_what_to_write(tmp_path: Path) -> None:
    async def chat() -> None: ...

    waiting: Any = chat()
    with pytest.raises(AttributeError) as caught:
        _ = waiting.message
    waiting.close()
    failure = finished(raised(caught.value), AGENT, tmp_path).failure
    assert failure is not None
    assert failure.message.endswith("'coroutine' object has no attribute 'message'; write: await ctx.chat(…)")


def test_a_models_failure_that_the_loop_lets_through_stays_the_models(tmp_path: Path) -> None:
    error = OsmosisRolloutError("the endpoint answered 400")
    error.__cause__ = ModelError("the endpoint answered 400", kind="bad_request")
    failure = finished(raised(error), AGENT, tmp_path).failure
    assert failure is not None
    assert (failure.origin, failure.kind) == ("model", "bad_request")


def test_a_conversation_is_known_as_far_as_the_loop_came() -> None:
    builder = TrajectoryBuilder(RolloutJob("j", ROW, 0, "policy"))
    turn = Turn(0, "stop", Usage(1, 1, 2), 1.0)
    builder.add(Acting("j"))
    assert builder.waiting_on == "the agent loop"
    builder.add(Asked("j", 1, [{"role": "user", "content": "Hello?"}]))
    assert builder.waiting_on == "the model (turn 1)"
    builder.add(TurnDone("j", turn, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add"}}]}))
    assert builder.waiting_on == "tool add"
    builder.add(Acting("j"))
    call = ToolCall(0, "1", "add", "{}", 2.0)
    builder.add(Asked("j", 3, [{"role": "tool", "tool_call_id": "1", "content": "3"}], [call]))
    rollout = builder.finish(RolloutDone("j", "stop", 5.0))
    assert [message.get("content") for message in rollout.messages] == ["Be short.", "Hello?", None, "3"]
    assert rollout.tool_calls == [call]
    # A loop may begin with no messages at all.
    builder.add(Asked("j", 0, []))
    assert builder.finish(RolloutDone("j", "stop", 5.0)).messages == []
    told = builder.finish(RolloutDone("j", "stop", 5.0, messages=[{"role": "user", "content": "mine"}]))
    assert [message["content"] for message in told.messages] == ["mine"]
