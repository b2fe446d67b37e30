"""The trainer double that users test their loops with."""

from __future__ import annotations

import threading
from http.client import IncompleteRead
from pathlib import Path

import pytest
from loops import Adding, call, health, loop_that, serving

from osmosis_ai.rollout import OsmosisRolloutError, RolloutResponse, RolloutStatus
from osmosis_ai.rollout.testing import (
    TrainerDouble,
    by_turn,
    drop,
    serve_app,
    status,
    text,
    tool_call,
    with_faults,
)
from osmosis_ai.testing import Request

pytestmark = pytest.mark.anyio

COMPLETED = "/v1/rollout/completed"


async def test_a_loop_runs_against_it_without_a_server(tmp_path: Path) -> None:
    async with TrainerDouble([tool_call("add", a=1, b=2), status(500), text("3")]) as trainer:
        response = await trainer.run(Adding, "What is 1 + 2?", metadata={"ground_truth": "3"}, debug_dir=tmp_path)
    assert response.status == "COMPLETED"
    assert response.final_messages[-1]["content"] == "3"
    assert len(trainer.requests) == 3
    assert trainer.completions == []


async def test_a_loop_that_fails_or_takes_too_long_gives_an_error() -> None:
    async with TrainerDouble() as trainer:
        failed = await trainer.run(loop_that(lambda ctx: None), trainer.request("hello"))
        assert failed.status is RolloutStatus.ERROR
        refused = await trainer.run(Adding(), [{"role": "user", "content": "hello"}])
        assert refused.error_message is not None
        assert "the script has no reply left" in refused.error_message


async def test_it_asks_a_server_for_a_rollout_and_waits_for_the_result() -> None:
    with serving(Adding(), TrainerDouble(by_turn(text("hi")))) as (url, trainer):
        request = trainer.request("hello")
        answer = await trainer.start_rollout(url, request, api_key="server-key-0123456789")
        assert (answer.rollout_id, answer.tools[0].function.name) == (request.rollout_id, "add")
        assert (await trainer.result(request.rollout_id)).status is RolloutStatus.COMPLETED
        with pytest.raises(OsmosisRolloutError, match="answered 401"):
            await trainer.start_rollout(url, trainer.request("hello"))
        with pytest.raises(TimeoutError, match=r"no result of rollout other arrived within 0\.01 s"):
            await trainer.result("other", seconds=0.01)
        with pytest.raises(TimeoutError, match="1 of 2 results"):
            trainer.wait_for_completions(2, timeout=0.01)
        with pytest.raises(TimeoutError, match="1 of 2 deliveries"):
            trainer.wait_for_deliveries(2, timeout=0.01)


def test_only_a_delivery_that_is_answered_in_full_is_accepted() -> None:
    body = RolloutResponse(rollout_id="r", status=RolloutStatus.COMPLETED).model_dump(mode="json")
    trainer = TrainerDouble(completed=[status(503), drop()], api_key="k")
    with trainer.run_in_thread():
        assert call(trainer.server_url, COMPLETED, body, key="wrong").status == 401
        assert call(trainer.server_url, COMPLETED, body, key="k").status == 503
        with pytest.raises(IncompleteRead):
            call(trainer.server_url, COMPLETED, body, key="k")
        assert trainer.completions == []
        assert call(trainer.server_url, COMPLETED, body, key="k").status == 200
        assert call(trainer.server_url, COMPLETED, method="GET", key="k").status == 405
    assert [done.rollout_id for done in trainer.completions] == ["r"]
    assert len(trainer.deliveries) == 4


def test_its_requests_carry_its_address_and_key_and_a_new_id_each() -> None:
    with TrainerDouble(api_key="k").run_in_thread() as trainer:
        first, second = trainer.request("a"), trainer.request("b", max_turns=3)
        assert first.server_url == trainer.server_url
        assert (first.api_key, second.max_turns) == ("k", 3)
        assert first.rollout_id != second.rollout_id
        assert first.messages == [{"role": "user", "content": "a"}]


def test_faults_are_the_same_every_time_and_take_no_reply() -> None:
    request = Request("POST", "/", {}, b"{}")
    script = [text(str(number)) for number in range(50)]
    for seed in range(3):
        runs = [[with_faults(script, 0.5, seed)] * 100 for _ in range(2)]
        first, second = ([answer(request) for answer in run] for run in runs)
        assert first == second
        played = [reply for reply in first if reply in script]
        assert played == script[: len(played)]
        failed = [reply for reply in first if reply.status == 503 or reply.action == "drop"]
        assert 25 <= len(failed) <= 75
        assert {reply.status for reply in failed} == {200, 503}
    never = with_faults(script, 0.0)
    assert [never(request) for _ in range(50)] == script
    assert never(request).status == 400


def test_an_application_is_served_until_its_block_ends() -> None:
    from osmosis_ai.rollout import create_app

    before = threading.active_count()
    with serve_app(create_app(Adding())) as url:
        assert health(url)["status"] == "healthy"
    with pytest.raises(OSError, match="refused"):
        health(url)
    assert threading.active_count() == before
