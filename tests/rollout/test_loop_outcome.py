"""The outcome of an agent loop's code, whatever it does."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from osmosis_ai.rollout import RolloutAgentLoop, RolloutContext, RolloutRequest, RolloutResult
from osmosis_ai.rollout.outcome import interpret, outcome_of

pytestmark = pytest.mark.anyio


class Plain(RolloutAgentLoop):
    name = "plain"

    def get_tools(self, request: RolloutRequest) -> list[Any]:
        return []

    def run(self, ctx: RolloutContext) -> Any:
        return {"role": "user"}


async def test_a_run_that_is_not_async_is_said_with_what_to_write() -> None:
    request = RolloutRequest(rollout_id="r", server_url="http://localhost", messages=[])
    outcome = await outcome_of(Plain(), RolloutContext(request, [], None), held=lambda: None)  # type: ignore[arg-type]
    assert outcome is not None
    assert (outcome.kind, outcome.message) == (
        "wrong_type",
        "run returned a dict at once: write `async def run(self, ctx)`",
    )


@pytest.mark.parametrize(("given", "reward"), [(True, 1.0), (Fraction(1, 2), 0.5), (3, 3.0), (None, None)])
async def test_a_reward_is_any_real_number_as_for_reward_functions(given: Any, reward: float | None) -> None:
    outcome = interpret(RolloutResult("COMPLETED", [], reward=given))
    assert (outcome.kind, outcome.reward, outcome.reward_problem) == ("completed", reward, None)


@pytest.mark.parametrize(("given", "kind"), [("1", "wrong_type"), (Decimal(1), "wrong_type"), (10**400, "not_finite")])
async def test_another_reward_is_a_problem_of_the_reward_alone(given: Any, kind: str) -> None:
    outcome = interpret(RolloutResult("COMPLETED", [{"role": "user"}], reward=given))
    assert (outcome.kind, outcome.messages, outcome.reward) == ("completed", [{"role": "user"}], None)
    assert outcome.reward_problem is not None
    assert outcome.reward_problem[0] == kind


async def test_the_messages_are_a_plain_copy() -> None:
    given: Any = [{"role": "user", "content": ("a", 1)}]
    outcome = interpret(RolloutResult("COMPLETED", given))
    given[0]["role"] = "nobody"
    assert outcome.messages == [{"role": "user", "content": ["a", 1]}]


@pytest.mark.parametrize("reason", ["", 7])
async def test_a_finish_reason_is_text(reason: Any) -> None:
    assert interpret(RolloutResult("COMPLETED", [], reason)).finish_reason == str(reason or "stop")
