"""The trainer's client: its requests, tolerated replies, retries, and keys that never appear."""

from __future__ import annotations

from typing import Any

import pytest

from osmosis_ai.errors import UsageError
from osmosis_ai.rollout import (
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisTimeoutError,
    OsmosisTransportError,
    OsmosisValidationError,
    RolloutResponse,
    RolloutStatus,
)
from osmosis_ai.rollout.client import TrainerClient, TrainerPool
from osmosis_ai.rollout.settings import ClientSettings, client_settings, server_settings
from osmosis_ai.rollout.testing import Reply, TrainerDouble, drop, hang, raw_json, status, text

pytestmark = pytest.mark.anyio

KEY = "trainer-key-0123456789"
QUICK = ClientSettings(retry_base_delay=0.001, max_retries=2, complete_rollout_retries=2, timeout_seconds=0.3)
HELLO = [{"role": "user", "content": "hello"}]


async def ask(trainer: TrainerDouble, settings: ClientSettings = QUICK, **params: Any) -> Any:
    async with TrainerPool(settings) as pool:
        return await TrainerClient(pool, trainer.server_url, "r1", KEY).chat_completions(HELLO, **params)


async def test_parameters_go_over_the_protocols_defaults_and_none_leaves_one_out() -> None:
    async with TrainerDouble([text("hi")]) as trainer:
        await ask(trainer, temperature=0.2, max_tokens=None, seed=7, rollout_id="not this one")
    assert trainer.requests[0].body == {
        "model": "default",
        "messages": HELLO,
        "rollout_id": "r1",
        "temperature": 0.2,
        "top_p": 1.0,
        "logprobs": True,
        "seed": 7,
    }


async def test_what_training_needs_is_kept() -> None:
    reply = {
        "choices": [
            {
                "message": {"role": "assistant", "content": "hi", "reasoning_content": "hm"},
                "finish_reason": "length",
                "logprobs": {"content": []},
                "token_ids": [1, 2],
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    async with TrainerDouble([raw_json(reply)]) as trainer:
        result = await ask(trainer)
    assert result.message == {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
    assert (result.finish_reason, result.token_ids, result.logprobs) == ("length", [1, 2], {"content": []})
    assert result.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (result.content, result.has_tool_calls, result.tool_calls) == ("hi", False, [])


@pytest.mark.parametrize(
    ("reply", "message", "finish_reason"),
    [
        ({"choices": [{"message": {}}]}, {"role": "assistant"}, "stop"),
        ({"choices": [{"message": {"content": None}, "finish_reason": 1}], "usage": "much"}, None, "stop"),
        ({"choices": [{"message": {"tool_calls": [{"id": "c"}]}}], "token_ids": [1], "id": 5}, None, "tool_calls"),
        ({"new": True, "choices": [{"message": {"content": "x"}, "extra": 1}, {}]}, None, "stop"),
    ],
)
async def test_missing_and_unknown_fields_of_a_reply_are_tolerated(
    reply: dict[str, Any], message: dict[str, Any] | None, finish_reason: str
) -> None:
    async with TrainerDouble([raw_json(reply)]) as trainer:
        result = await ask(trainer)
    assert result.message["role"] == "assistant"
    assert message is None or result.message == message
    assert result.finish_reason == finish_reason
    assert isinstance(result.content, str)
    assert isinstance(result.usage, dict)


@pytest.mark.parametrize(
    "reply",
    [
        [],
        {},
        {"choices": None},
        {"choices": [1]},
        {"choices": [{"message": "hi"}]},
        {"choices": [{"message": {"tool_calls": "add"}}]},
        {"choices": [{"message": {"tool_calls": ["add"]}}]},
    ],
    ids=str,
)
async def test_a_reply_that_is_not_a_completion_is_an_error(reply: Any) -> None:
    async with TrainerDouble([raw_json(reply)]) as trainer:
        with pytest.raises(OsmosisServerError, match="/v1/chat/completions answered with"):
            await ask(trainer)


@pytest.mark.parametrize(
    ("reply", "kind", "attempts"),
    [
        (status(500), OsmosisServerError, 3),
        (status(599), OsmosisServerError, 3),
        (drop(), OsmosisTransportError, 3),
        (hang(), OsmosisTimeoutError, 3),
        (status(400), OsmosisValidationError, 1),
        (status(404), OsmosisValidationError, 1),
        (status(429), OsmosisValidationError, 1),
        (status(302, headers={"Location": "/elsewhere"}), OsmosisValidationError, 1),
    ],
    ids=["500", "599", "drop", "hang", "400", "404", "429", "302"],
)
async def test_transient_errors_are_retried_and_permanent_ones_are_not(
    reply: Reply, kind: type[OsmosisRolloutError], attempts: int
) -> None:
    async with TrainerDouble(lambda request: reply) as trainer:
        with pytest.raises(kind) as caught:
            await ask(trainer)
    assert len(trainer.requests) == attempts
    assert type(caught.value) is kind
    assert ("(after 3 attempts)" in str(caught.value)) == (attempts > 1)
    if isinstance(caught.value, (OsmosisServerError, OsmosisValidationError)):
        assert caught.value.status_code == reply.status


async def test_every_attempt_sends_the_same_bytes() -> None:
    async with TrainerDouble([status(500), drop(), text("hi")]) as trainer:
        assert (await ask(trainer)).content == "hi"
    assert len({request.raw for request in trainer.requests}) == 1


async def test_a_trainer_that_isnt_there_is_a_transport_error() -> None:
    trainer = TrainerDouble()
    async with trainer:
        url = trainer.server_url
    async with TrainerPool(QUICK) as pool:
        with pytest.raises(OsmosisTransportError, match=r"^nothing answers at http://127\.0\.0\.1:\d+/v1/chat"):
            await TrainerClient(pool, url, "r1").chat_completions(HELLO)


async def test_the_key_is_in_no_error_and_no_repr() -> None:
    echo = status(403, body={"detail": f"{'x' * 480}{KEY} isn't welcome"})
    async with TrainerDouble([echo]) as trainer, TrainerPool(QUICK) as pool:
        client = TrainerClient(pool, trainer.server_url, "r1", KEY)
        with pytest.raises(OsmosisValidationError) as caught:
            await client.chat_completions(HELLO)
        seen = f"{client!r} {vars(pool)} {caught.value} {caught.value!r} {caught.value.args}"
    assert KEY[:8] not in seen
    assert "***" in seen


async def test_a_key_that_http_cant_carry_is_an_error_without_the_key() -> None:
    async with TrainerDouble() as trainer, TrainerPool(QUICK) as pool:
        client = TrainerClient(pool, trainer.server_url, "r1", "secret\r\nX-Injected: 1")
        with pytest.raises(OsmosisValidationError, match="can't be written as HTTP") as caught:
            await client.chat_completions(HELLO)
    assert "secret" not in str(caught.value)
    assert trainer.requests == []


async def test_text_that_utf8_cant_hold_is_sent_replaced() -> None:
    async with TrainerDouble([text("hi")]) as trainer, TrainerPool(QUICK) as pool:
        client = TrainerClient(pool, trainer.server_url, "r1")
        await client.chat_completions([{"role": "user", "content": "a\ud800b"}])
    assert trainer.requests[0].messages == [{"role": "user", "content": "a?b"}]


async def test_a_large_conversation_arrives_whole() -> None:
    messages = [{"role": "user", "content": "x" * 3_000_000}]
    async with TrainerDouble([text("hi")]) as trainer, TrainerPool(QUICK) as pool:
        await TrainerClient(pool, trainer.server_url, "r1").chat_completions(messages)
    assert trainer.requests[0].messages == messages


async def test_a_result_is_delivered_with_its_key() -> None:
    response = RolloutResponse(rollout_id="r1", status=RolloutStatus.COMPLETED, reward=0.5, extra_fields={"a": 1})
    async with TrainerDouble(completed=[status(500)], api_key=KEY) as trainer, TrainerPool(QUICK) as pool:
        await TrainerClient(pool, trainer.server_url, "r1", KEY).complete_rollout(response)
    assert trainer.completions == [response]
    assert trainer.deliveries[1].body == {
        "rollout_id": "r1",
        "status": "COMPLETED",
        "final_messages": [],
        "finish_reason": None,
        "error_message": None,
        "reward": 0.5,
        "metrics": None,
        "extra_fields": {"a": 1},
    }


async def test_a_closed_pool_opens_again_when_it_is_asked() -> None:
    async with TrainerDouble(lambda request: text("hi")) as trainer:
        pool = TrainerPool(QUICK)
        for _ in range(2):
            assert (await TrainerClient(pool, trainer.server_url, "r1").chat_completions(HELLO)).content == "hi"
            await pool.aclose()


def test_settings_come_from_the_environment() -> None:
    found = client_settings(
        {"OSMOSIS_ROLLOUT_CLIENT_MAX_RETRIES": "7", "OSMOSIS_ROLLOUT_CLIENT_TIMEOUT_SECONDS": " 2.5 ", "OTHER": "x"}
    )
    assert (found.max_retries, found.timeout_seconds, found.retry_max_delay) == (7, 2.5, 30.0)
    server = {"OSMOSIS_ROLLOUT_SERVER_MAX_CONCURRENT_ROLLOUTS": "3", "OSMOSIS_ROLLOUT_SERVER_RECORD_TTL_SECONDS": ""}
    assert server_settings(server).max_concurrent_rollouts == 3
    assert server_settings(server).record_ttl_seconds == 3600
    assert server_settings(server, max_concurrent_rollouts=5, record_ttl_seconds=None).max_concurrent_rollouts == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_RETRIES", "many"),
        ("MAX_RETRIES", "-1"),
        ("MAX_RETRIES", "1.5"),
        ("TIMEOUT_SECONDS", "0"),
        ("TIMEOUT_SECONDS", "nan"),
        ("TIMEOUT_SECONDS", "inf"),
    ],
)
def test_an_invalid_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"the environment variable OSMOSIS_ROLLOUT_CLIENT_{name} is '{value}': "):
        client_settings({f"OSMOSIS_ROLLOUT_CLIENT_{name}": value})


@pytest.mark.parametrize("given", [{"max_concurrent_rollouts": 0}, {"record_ttl_seconds": -1}])
def test_an_invalid_setting_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        server_settings({}, **given)
