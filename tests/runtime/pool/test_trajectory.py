"""A rollout is assembled from its worker's events, in whatever order they come and wherever they stop."""

from __future__ import annotations

from typing import Any

import pytest

from osmosis_ai.records import Failure, Row, ToolCall, Turn, Usage, opening_messages
from osmosis_ai.runtime.pool.trajectory import TrajectoryBuilder, total_cost, total_usage
from osmosis_ai.runtime.protocol import CallDone, Paused, RolloutDone, RolloutJob, SampleDone, TurnDone

ROW = Row(3, "row", "Be good.", "Add.", "7", {"level": 1})


def turn(index: int, cost: float | None = None, *, cached: bool = False) -> Turn:
    return Turn(index, "stop", Usage(10, 5, 15), 1.0, cost_usd=cost, cached=cached)


def calling(index: int, *names: str, cost: float | None = None) -> TurnDone:
    calls = [
        {"id": f"{index}.{position}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for position, name in enumerate(names)
    ]
    return TurnDone("j", turn(index, cost), {"role": "assistant", "content": None, "tool_calls": calls})


def result(call_id: str, name: str) -> CallDone:
    call = ToolCall(int(call_id[0]), call_id, name, "{}", 1.0)
    return CallDone("j", call, {"role": "tool", "tool_call_id": call_id, "content": name})


@pytest.fixture
def builder() -> TrajectoryBuilder:
    return TrajectoryBuilder(RolloutJob("j", ROW, 2, "policy"))


def test_results_stand_in_the_order_of_the_calls(builder: TrajectoryBuilder) -> None:
    builder.add(calling(0, "first", "second"))
    builder.add(result("0.1", "second"))
    builder.add(result("0.0", "first"))
    builder.add(TurnDone("j", turn(1), {"role": "assistant", "content": "7"}))
    rollout = builder.finish(RolloutDone("j", "stop", 12.3456))
    assert [message["role"] for message in rollout.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [message["content"] for message in rollout.messages[3:5]] == ["first", "second"]
    assert [call.name for call in rollout.tool_calls] == ["second", "first"]
    assert (rollout.row_index, rollout.row_id, rollout.run_index, rollout.policy) == (3, "row", 2, "policy")
    assert (rollout.finish_reason, rollout.failure, rollout.duration_ms) == ("stop", None, 12.346)
    assert rollout.usage == Usage(20, 10, 30)


def test_it_says_what_it_is_waiting_for(builder: TrajectoryBuilder) -> None:
    assert builder.waiting_on == "the model (turn 1)"
    assert builder.open_tools == []
    builder.add(calling(0, "slow", "fast", "slow"))
    assert builder.waiting_on == "tool fast, slow"
    builder.add(result("0.1", "fast"))
    assert builder.open_tools == ["slow", "slow"]
    builder.add(result("0.0", "slow"))
    builder.add(result("0.2", "slow"))
    assert builder.waiting_on == "the model (turn 2)"


def test_a_rollout_that_is_given_up_keeps_what_it_has(builder: TrajectoryBuilder) -> None:
    builder.add(calling(0, "first", "second"))
    builder.add(result("0.0", "first"))
    failure = Failure("timeout", "took too long", kind="rollout")
    rollout = builder.abandon(failure)
    assert (rollout.finish_reason, rollout.failure) == ("timeout", failure)
    assert rollout.messages[-1] == {"role": "tool", "tool_call_id": "0.0", "content": "first"}
    assert rollout.usage.total_tokens == 15
    assert builder.abandon(Failure("worker", "died")).finish_reason == "error"


@pytest.mark.parametrize("origin", ["worker", "timeout"])
def test_a_call_that_was_running_when_the_rollout_failed_is_on_record(origin: Any, builder: TrajectoryBuilder) -> None:
    builder.add(calling(0, "first", "second"))
    builder.add(result("0.0", "first"))
    rollout = builder.abandon(Failure(origin, "lost"))
    found = [(call.turn, call.id, call.name, call.arguments, call.error) for call in rollout.tool_calls]
    assert found == [(0, "0.0", "first", "{}", None), (0, "0.1", "second", "{}", origin)]


def test_a_call_that_was_not_begun_is_no_call(builder: TrajectoryBuilder) -> None:
    builder.add(calling(0, "first"))
    assert builder.finish(RolloutDone("j", "max_tokens_total", 1.0)).tool_calls == []


def test_the_time_that_a_person_thinks_does_not_count(builder: TrajectoryBuilder) -> None:
    builder.add(Paused("j", "request", 0, []))
    before = builder.elapsed_ms
    assert builder.elapsed_ms == before
    assert builder.abandon(Failure("worker", "died")).duration_ms == round(before, 3)
    builder.resume()
    assert builder.elapsed_ms > before


def test_a_rollout_that_begins_anew_has_nothing_of_before(builder: TrajectoryBuilder) -> None:
    builder.add(calling(0, "first"))
    builder.restart()
    assert builder.open_tools == []
    rollout = builder.abandon(Failure("worker", "died"))
    assert rollout.messages == opening_messages(ROW)
    assert (rollout.turns, rollout.tool_calls, rollout.usage) == ([], [], Usage())


def test_samples_count_but_are_no_part_of_the_conversation(builder: TrajectoryBuilder) -> None:
    builder.add(calling(0, "asks", cost=0.5))
    builder.add(SampleDone("j", turn(0, 0.25)))
    rollout = builder.finish(RolloutDone("j", "max_turns", 1.0))
    assert len(rollout.turns) == 1
    assert len(rollout.samples) == 1
    assert rollout.usage.total_tokens == 30
    assert rollout.cost_usd == 0.75


def test_cost_and_tokens() -> None:
    assert total_cost([]) is None
    assert total_cost([turn(0)]) is None
    assert total_cost([turn(0), turn(1, 0.5)]) == 0.5
    assert total_usage([turn(0), turn(1, cached=True)]) == Usage(10, 5, 15)
