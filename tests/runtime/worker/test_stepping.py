"""A rollout pauses at each step until it is told to go on, and goes on with what the user has changed."""

from __future__ import annotations

from typing import Any

import pytest

from osmosis_ai.records import Completion, Logprobs, ToolCall, Turn, Usage
from osmosis_ai.runtime.protocol import CallDone, Called, Event, Paused, Resume, Reworded
from osmosis_ai.runtime.worker.deadlines import Deadlines
from osmosis_ai.runtime.worker.stepping import Stepper

pytestmark = pytest.mark.anyio

PROMPT = {"role": "user", "content": "1 + 2?"}
OTHER_PROMPT = {"role": "user", "content": "3 + 4?"}
REPLY = {"role": "assistant", "content": "3"}
OTHER_REPLY = {"role": "assistant", "content": "7"}
GO_ON = Resume("job")


def stepper(*orders: Resume) -> tuple[Stepper, list[Event]]:
    """Return a stepper whose user has given these orders ahead, and the events it emits."""

    async def call(tool: str, arguments: str) -> tuple[ToolCall, str]:
        return ToolCall(0, "by hand", tool, arguments, 2.0, error="schema"), "no such argument"

    events: list[Event] = []
    made = Stepper("job", events.append, Deadlines(), call)
    for order in orders:
        made.resume(order)
    return made, events


def completion(**fields: Any) -> tuple[Turn, Completion]:
    turn = Turn(0, "stop", Usage(1, 1, 2), 1.0, **fields)
    return turn, Completion(REPLY, "stop", Usage(1, 1, 2), **fields)


def results(*contents: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": str(place), "content": text} for place, text in enumerate(contents)]


async def test_what_is_not_changed_goes_on_as_it_was() -> None:
    made, events = stepper(GO_ON, GO_ON, GO_ON)
    messages = [PROMPT]
    await made.before_request(0, messages)
    turn, reply = completion()
    assert await made.after_reply(turn, reply) == (turn, reply)
    for place in range(2):
        made.called(ToolCall(0, str(place), "add", "{}", 1.0))
    given = results("1", "2")
    assert await made.after_results(given) == given
    assert messages == [PROMPT]
    stops = [event for event in events if isinstance(event, Paused)]
    assert len(stops) == len(events)
    assert [(stop.stage, stop.messages) for stop in stops] == [
        ("request", [PROMPT]),
        ("reply", [PROMPT, REPLY]),
        ("result", [PROMPT, REPLY, *given]),
    ]
    assert [call.id for call in stops[2].calls] == ["0", "1"]


async def test_a_changed_request_lasts_for_later_turns_and_is_reported() -> None:
    made, events = stepper(Resume("job", replaced=[OTHER_PROMPT]), GO_ON)
    messages = [PROMPT]
    await made.before_request(0, messages)
    assert messages == [OTHER_PROMPT]
    assert events[1:] == [Reworded("job", [OTHER_PROMPT])]
    # The reply is the model's own, but to a question that the user wrote.
    turn, reply = await made.after_reply(*completion())
    assert (turn.edited, reply.message) == (True, REPLY)


async def test_a_changed_reply_loses_what_describes_the_models_own_text() -> None:
    made, _ = stepper(GO_ON, Resume("job", replaced=[OTHER_REPLY]))
    await made.before_request(0, [PROMPT])
    turn, reply = await made.after_reply(*completion(logprobs=Logprobs([])))
    assert (turn.edited, turn.logprobs) == (True, None)
    assert (reply.message, reply.logprobs) == (OTHER_REPLY, None)


async def test_a_changed_result_is_reported_again_and_the_others_are_not() -> None:
    changed = results("1", "three")
    made, events = stepper(GO_ON, GO_ON, Resume("job", replaced=changed))
    await made.before_request(0, [PROMPT])
    await made.after_reply(*completion())
    for place in range(2):
        made.called(ToolCall(0, str(place), "add", "{}", 1.0))
    assert await made.after_results(results("1", "2")) == changed
    (again,) = [event for event in events if isinstance(event, CallDone)]
    assert (again.call.id, again.call.edited, again.message) == ("1", True, changed[1])


async def test_calls_by_hand_are_answered_and_the_rollout_stays_paused() -> None:
    made, events = stepper(*(Resume("job", "call", tool="add", arguments=text) for text in ("{}", "[]")), GO_ON)
    await made.before_request(0, [PROMPT])
    assert events[1:] == [Called("job", "no such argument", "schema", 2.0)] * 2


async def test_no_deadline_of_the_job_runs_while_it_is_paused() -> None:
    deadlines = Deadlines()

    async def call(tool: str, arguments: str) -> tuple[ToolCall, str]:
        raise AssertionError

    made = Stepper("job", lambda event: None, deadlines, call)
    for index in range(2):
        with deadlines.limit(0.02, "job") as own, deadlines.limit(0.05, "another") as others:
            await made.before_request(index, [PROMPT])
        # Only the other job's deadline could end the wait for an order that never came.
        assert (own.cancelled_caught, others.cancelled_caught) == (False, True)
    assert made.paused_seconds >= 0.08
