from __future__ import annotations

import datetime
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import format_datetime
from typing import Any

import anyio
import msgspec
import pytest

from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.models.endpoint import OpenAICompatibleModel
from osmosis_ai.models.host import HostOptions, create_model
from osmosis_ai.records import Completion, Logprobs, ModelSpec, Row, TokenIds, TokenLogprob, Usage
from osmosis_ai.retry import RetryPolicy
from osmosis_ai.testing import (
    Reply,
    ScriptedEndpoint,
    broken_json,
    drop,
    hang,
    raw_json,
    status,
    text,
    tool_call,
)

pytestmark = pytest.mark.anyio

KEY = "sk-secret-0123456789"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ROW = Row(index=0, id="r", system_prompt="s", user_prompt="u", ground_truth="42")


def spec_for(url: str, **changes: Any) -> ModelSpec:
    spec = ModelSpec("m", "openai_compatible", "org/m", url, KEY, request_timeout=20.0)
    return msgspec.structs.replace(spec, **changes)


@asynccontextmanager
async def model_of(spec: ModelSpec, **options: Any) -> AsyncIterator[OpenAICompatibleModel]:
    model = OpenAICompatibleModel(spec, **options)
    try:
        yield model
    finally:
        await model.aclose()


async def answer(reply: Reply, **changes: Any) -> Completion:
    """Return the completion for one scripted reply."""
    async with ScriptedEndpoint([reply]) as endpoint, model_of(spec_for(endpoint.url, **changes)) as model:
        return await model.complete(MESSAGES, TOOLS, {})


async def failure(reply: Reply, **changes: Any) -> ModelError:
    """Return the error for one scripted reply."""
    with pytest.raises(ModelError) as caught:
        await answer(reply, **changes)
    return caught.value


def choice(message: Any, **more: Any) -> Reply:
    return raw_json({"choices": [{"message": message, **more}]})


def calls_of(completion: Completion) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = completion.message["tool_calls"]
    return calls


async def test_what_is_sent() -> None:
    async with ScriptedEndpoint([text("a"), text("b")], api_key=KEY) as endpoint:
        spec = spec_for(endpoint.url, params={"temperature": 1, "max_tokens": 9, "seed": 7})
        async with model_of(spec) as model:
            await model.complete(MESSAGES, TOOLS, {"temperature": 0.5, "seed": None})
            await model.complete(MESSAGES, [], {})
    first, second = endpoint.requests
    assert first.body == {
        "model": "org/m",
        "messages": MESSAGES,
        "tools": TOOLS,
        "temperature": 0.5,
        "max_tokens": 9,
    }
    assert "tools" not in second.body
    assert second.body["seed"] == 7
    assert first.headers["authorization"] == f"Bearer {KEY}"
    assert first.headers["content-type"] == "application/json"


async def test_without_a_key_no_authorization_is_sent() -> None:
    async with ScriptedEndpoint([text("a")]) as endpoint, model_of(spec_for(endpoint.url, api_key=None)) as model:
        await model.complete(MESSAGES, [], {})
    assert "authorization" not in endpoint.requests[0].headers


async def test_numbers_and_odd_text_arrive_exactly() -> None:
    message = {"role": "tool", "content": "é 𝄞 \u0000", "n": 2**70, "f": 0.1}
    async with ScriptedEndpoint([text("a"), text("b")]) as endpoint, model_of(spec_for(endpoint.url)) as model:
        await model.complete([message], [], {})
        await model.complete([message, {"role": "tool", "content": "lone \udce9 surrogate"}], [], {})
    assert endpoint.requests[0].messages == [message]
    # What isn't text can't be sent by any JSON; the rest of the conversation still is.
    assert endpoint.requests[1].messages == [message, {"role": "tool", "content": "lone ? surrogate"}]


async def test_a_conversation_of_megabytes_is_sent_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    messages = [{"role": "user", "content": "x" * 3_000_000}]
    async with ScriptedEndpoint([text("a")]) as endpoint, model_of(spec_for(endpoint.url)) as model:
        await model.complete(messages, [], {})
    assert endpoint.requests[0].messages == messages
    assert [str(warning.message) for warning in recwarn] == []


async def test_what_cannot_be_json_is_the_requests_fault() -> None:
    async with model_of(spec_for("http://127.0.0.1:9/v1")) as model:
        with pytest.raises(ModelError, match="can't be written as JSON") as caught:
            await model.complete([{"role": "user", "content": object()}], [], {})
    assert caught.value.kind == "bad_request"


async def test_what_a_reply_holds_is_kept() -> None:
    logprobs = {"content": [{"token": "a", "logprob": -0.25}]}
    reply = text(
        "hi",
        prompt_tokens=11,
        completion_tokens=3,
        finish_reason="length",
        model="served-name",
        message={"reasoning_content": "hm", "x_provider": {"a": [1]}, "refusal": None, "tool_calls": []},
        choice={"logprobs": logprobs, "token_ids": [5, 6], "prompt_token_ids": [1, 2, 3]},
    )
    assert await answer(reply) == Completion(
        message={"role": "assistant", "content": "hi", "reasoning_content": "hm", "x_provider": {"a": [1]}},
        finish_reason="length",
        usage=Usage(11, 3, 14),
        model="served-name",
        logprobs=Logprobs([TokenLogprob("a", -0.25)]),
        token_ids=TokenIds([1, 2, 3], [5, 6]),
        attempts=1,
    )


async def test_prompt_token_ids_may_stand_beside_the_choices() -> None:
    reply = raw_json({"choices": [{"message": {"content": "x"}, "token_ids": [2]}], "prompt_token_ids": [1]})
    assert (await answer(reply)).token_ids == TokenIds([1], [2])


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, Usage()),
        ({}, Usage()),
        ("many", Usage()),
        ({"prompt_tokens": 4, "completion_tokens": None}, Usage(4, 0, 4)),
        ({"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 7}, Usage(4, 2, 7)),
        ({"prompt_tokens": "4", "completion_tokens": 2.5}, Usage()),
    ],
)
async def test_usage_is_never_invented(usage: Any, expected: Usage) -> None:
    completion = await answer(raw_json({"choices": [{"message": {"content": "x"}}], "usage": usage}))
    assert completion.usage == expected
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "tool_calls": None}, ""),
        ({"content": [{"t": 1}]}, [{"t": 1}]),
    ],
)
async def test_content_can_be_sent_back(message: dict[str, Any], content: Any) -> None:
    assert (await answer(choice(message))).message == {"role": "assistant", "content": content}


async def test_tool_calls_come_out_in_one_form() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    completion = await answer(
        choice(
            {
                "content": None,
                "tool_calls": [
                    {"function": function, "index": 0},
                    {"id": "", "type": "function", "function": {"name": "add", "arguments": {"big": 2**70}}},
                    {"id": "x", "function": {"name": "add"}},
                    {"id": "x", "function": {"name": "add", "arguments": ""}},
                    {"id": "x_2", "function": {"name": "add", "arguments": None}},
                    {"id": 7, "function": {"name": "add", "arguments": "{not json"}},
                ],
            },
            finish_reason="tool_calls",
        )
    )
    calls = calls_of(completion)
    # Two messages were sent, so this is the third: ids made here differ from turn to turn.
    assert [call["id"] for call in calls] == ["call_2_0", "call_2_1", "x", "x_2", "x_2_2", "7"]
    assert {call["type"] for call in calls} == {"function"}
    arguments = [call["function"]["arguments"] for call in calls]
    assert arguments == ['{"a": 1}', '{"big":1180591620717411303424}', "{}", "{}", "{}", "{not json"]
    assert calls[0]["index"] == 0
    assert completion.message["content"] is None


async def test_ids_made_here_are_the_same_every_time_and_avoid_given_ones() -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    reply = choice({"tool_calls": [{**call, "id": "call_2_1"}, call]})
    first, second = await answer(reply), await answer(reply)
    assert [call["id"] for call in calls_of(first)] == ["call_2_1", "call_2_1_2"]
    assert first == second
    assert first.finish_reason == "tool_calls"


async def test_a_legacy_function_call_becomes_a_tool_call() -> None:
    message = {"content": None, "function_call": {"name": "add", "arguments": '{"a":1}'}}
    completion = await answer(choice(message, finish_reason="function_call"))
    assert [call["function"]["name"] for call in calls_of(completion)] == ["add"]
    assert "function_call" not in completion.message
    assert completion.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (broken_json(), "broken JSON"),
        (Reply(b""), "an empty body"),
        (Reply(b"<!DOCTYPE html><html>", content_type="text/html"), "an HTML page instead of JSON"),
        (Reply(b"data: {}\n\ndata: [DONE]\n\n", content_type="text/event-stream"), "an event stream"),
        (Reply(b'"\xff"'), "broken JSON"),
        (raw_json({"choices": []}), "an empty `choices`"),
        (raw_json({}), "no `choices`"),
        (raw_json([1]), "no `choices`"),
        (raw_json({"choices": [{"text": "completions, not chat"}]}), "a choice without a `message`"),
        (raw_json({"choices": ["x"]}), "a choice without a `message`"),
        (choice({"tool_calls": "x"}), "`tool_calls` that aren't a list"),
        (choice({"tool_calls": [{"id": "a"}]}), "a tool call without a function name"),
        (choice({"tool_calls": [None]}), "a tool call without a function name"),
        (raw_json({"error": {"message": "upstream is gone"}}), "upstream is gone"),
        (raw_json({"ok": True}, status=201), "201"),
    ],
)
async def test_replies_that_are_no_chat_completion(reply: Reply, said: str) -> None:
    error = await failure(reply)
    assert error.kind == "bad_reply"
    assert not error.retryable
    assert said in str(error)
    assert "/v1/chat/completions" in str(error)


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        (400, "bad_request", False),
        (401, "auth", False),
        (403, "auth", False),
        (404, "not_found", False),
        (405, "not_found", False),
        (408, "timeout", True),
        (422, "bad_request", False),
        (429, "rate_limit", True),
        (500, "overloaded", True),
        (502, "overloaded", True),
        (503, "overloaded", True),
        (529, "overloaded", True),
    ],
)
async def test_http_errors_have_a_kind_and_say_what_the_endpoint_said(code: int, kind: str, retryable: bool) -> None:
    error = await failure(status(code))
    assert (error.kind, error.status, error.retryable) == (kind, code, retryable)
    assert f"/v1/chat/completions answered {code}: scripted {code}" in str(error)


@pytest.mark.parametrize("code", [429, 200])
async def test_an_error_inside_a_reply_counts_like_the_status(code: int) -> None:
    error = await failure(raw_json({"error": {"message": "slow down", "code": 429}}, status=code))
    assert (error.kind, error.status) == ("rate_limit", 429)


async def test_an_empty_account_is_not_a_rate_limit() -> None:
    error = await failure(status(429, body={"error": {"message": "no credit", "code": "insufficient_quota"}}))
    assert (error.kind, error.retryable) == ("quota", False)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "one\n  two", "type": "x"}}, "answered 400: one two"),
        ({"error": "plain"}, "answered 400: plain"),
        ({"message": "vllm"}, "answered 400: vllm"),
        ({"detail": [{"loc": ["a"]}]}, 'answered 400: [{"loc":["a"]}]'),
        ([1], "answered 400: [1]"),
        ("<html>very long</html>", "answered 400: an HTML page"),
        ("just text", "answered 400: just text"),
        ("", "answered 400: no message"),
        ("x" * 10_000, "x" * 500 + "…"),
    ],
)
async def test_what_the_endpoint_says_is_shown_in_every_form(body: Any, said: str) -> None:
    error = await failure(status(400, body=body))
    assert str(error).endswith(said)


@pytest.mark.parametrize("body", [{"error": {"message": f"bad key {KEY}!"}}, f"bad key {KEY}!", "y" * 490 + KEY])
async def test_a_key_the_endpoint_echoes_is_masked(body: Any) -> None:
    error = await failure(status(401, body=body))
    assert "***" in str(error)
    assert "sk-secret" not in str(error)


async def test_a_key_echoed_with_status_200_is_masked() -> None:
    error = await failure(raw_json({"error": {"message": f"bad key {KEY}"}}))
    assert "sk-secret" not in str(error)
    assert "bad key ***" in str(error)


async def test_retry_after_is_read_in_all_its_forms() -> None:
    async def seconds(**headers: str) -> float | None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return (await failure(status(429, headers=named))).retry_after

    assert await seconds(Retry_After="3") == 3
    assert await seconds(Retry_After="0.5") == 0.5
    assert await seconds(Retry_After="9", retry_after_ms="1500") == 1.5
    assert await seconds(Retry_After="-3") == 0
    assert await seconds(Retry_After="soon") is None
    assert await seconds(Retry_After="nan") is None
    assert await seconds(Retry_After="inf") is None
    assert await seconds() is None
    now = datetime.datetime.now(datetime.timezone.utc)
    later = await seconds(Retry_After=format_datetime(now + datetime.timedelta(seconds=100), usegmt=True))
    assert later is not None
    assert 60 < later <= 100
    assert await seconds(Retry_After=format_datetime(now - datetime.timedelta(days=1), usegmt=True)) == 0


async def test_redirects_are_not_followed() -> None:
    async with ScriptedEndpoint([text("stolen")]) as other:
        location = f"{other.url}/chat/completions"
        error = await failure(status(307, headers={"Location": location}))
        assert other.requests == []
    assert error.kind == "not_found"
    assert f"a redirect to {location}" in str(error)


async def test_a_hang_ends_with_the_request_timeout() -> None:
    error = await failure(hang(), request_timeout=0.2)
    assert error.kind == "timeout"
    assert "no answer within 0.2 s" in str(error)


async def test_a_connection_dropped_halfway() -> None:
    error = await failure(drop())
    assert (error.kind, error.retryable) == ("dropped", True)
    assert "dropped the connection" in str(error)


async def test_after_a_fault_the_next_request_works() -> None:
    script = [drop(), status(500), broken_json(), text("fine")]
    async with ScriptedEndpoint(script) as endpoint, model_of(spec_for(endpoint.url)) as model:
        for _ in range(3):
            with pytest.raises(ModelError):
                await model.complete(MESSAGES, [], {})
        assert (await model.complete(MESSAGES, [], {})).message["content"] == "fine"


async def test_a_reply_may_not_be_endless() -> None:
    async with (
        ScriptedEndpoint([text("x" * 3000), text("short")]) as endpoint,
        model_of(spec_for(endpoint.url), max_reply_bytes=2000) as model,
    ):
        with pytest.raises(ModelError, match="more than 2000 bytes") as caught:
            await model.complete(MESSAGES, [], {})
        assert caught.value.kind == "bad_reply"
        assert (await model.complete(MESSAGES, [], {})).message["content"] == "short"


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


async def test_nothing_listens_there() -> None:
    url = f"http://127.0.0.1:{unused_port()}/v1"
    async with model_of(spec_for(url)) as model:
        with pytest.raises(ModelError, match="nothing answers at") as caught:
            await model.complete(MESSAGES, [], {})
    assert caught.value.kind == "refused"
    assert f"{url}/chat/completions" in str(caught.value)


async def test_a_host_that_does_not_exist() -> None:
    async with model_of(spec_for("http://no-such-host.invalid/v1")) as model:
        with pytest.raises(ModelError, match=r"host of http://no-such-host\.invalid.* can't be found") as caught:
            await model.complete(MESSAGES, [], {})
    assert caught.value.kind == "refused"


async def test_https_to_a_server_that_speaks_http() -> None:
    async with (
        ScriptedEndpoint([text("x")]) as endpoint,
        model_of(spec_for(endpoint.url.replace("http:", "https:"))) as model,
    ):
        with pytest.raises(ModelError, match="TLS") as caught:
            await model.complete(MESSAGES, [], {})
    assert caught.value.kind == "refused"


async def test_a_server_that_does_not_speak_http() -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        async with model_of(spec_for(f"http://127.0.0.1:{port}/v1")) as model:
            with pytest.raises(ModelError, match="isn't HTTP") as caught:
                await model.complete(MESSAGES, [], {})
        tasks.cancel_scope.cancel()
    await listener.aclose()
    assert caught.value.kind == "bad_reply"


async def test_a_hundred_requests_run_at_the_same_time() -> None:
    async with (
        ScriptedEndpoint(lambda request: text(request.messages[0]["content"]).after(0.2)) as endpoint,
        model_of(spec_for(endpoint.url)) as model,
    ):
        got: list[str] = []

        async def ask(number: int) -> None:
            completion = await model.complete([{"role": "user", "content": f"{number}"}], [], {})
            got.append(completion.message["content"])

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for number in range(100):
                    tasks.start_soon(ask, number)
    assert sorted(got, key=int) == [str(number) for number in range(100)]


# The probe that precedes a run.


async def probe(endpoint_or_url: ScriptedEndpoint | str, **changes: Any) -> None:
    url = endpoint_or_url if isinstance(endpoint_or_url, str) else endpoint_or_url.url
    host = create_model(spec_for(url, **changes), HostOptions(policy=RetryPolicy(max_attempts=3, base_delay=0.001)))
    try:
        await host.probe()
    finally:
        await host.aclose()


async def probe_failure(script: Any, **changes: Any) -> str:
    async with ScriptedEndpoint(script, probe=None) as endpoint:
        with pytest.raises(ModelStartError) as caught:
            await probe(endpoint, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert KEY not in message
    return message


async def test_the_probe_is_one_small_request_with_the_runs_parameters() -> None:
    async with ScriptedEndpoint([text("pong")], probe=None, api_key=KEY) as endpoint:
        await probe(endpoint, params={"temperature": 0.5, "max_tokens": 4000})
    assert [request.body for request in endpoint.requests] == [
        {"model": "org/m", "messages": [{"role": "user", "content": "ping"}], "temperature": 0.5, "max_tokens": 16}
    ]


async def test_the_probe_limits_whichever_parameter_the_model_takes() -> None:
    async with ScriptedEndpoint([text("pong")], probe=None) as endpoint:
        await probe(endpoint, params={"max_completion_tokens": 4000})
    assert endpoint.requests[0].body["max_completion_tokens"] == 16
    assert "max_tokens" not in endpoint.requests[0].body


@pytest.mark.parametrize(
    "said", ["Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'.", "hm"]
)
async def test_a_400_about_something_else_is_an_answer(said: str) -> None:
    async with ScriptedEndpoint([status(400, body={"error": {"message": said}})], probe=None) as endpoint:
        await probe(endpoint)
    assert len(endpoint.requests) == 1


async def test_the_probe_is_retried_like_any_request() -> None:
    async with ScriptedEndpoint([status(429), drop(), text("pong")], probe=None) as endpoint:
        await probe(endpoint)
    assert len(endpoint.requests) == 3
    message = await probe_failure([status(503)] * 3)
    assert "answered 503" in message
    assert "after 3 attempts" in message
    assert "no answer within 0.1 s" in await probe_failure([hang()] * 3, request_timeout=0.1)


async def test_the_probe_says_what_to_set_for_a_key() -> None:
    async with ScriptedEndpoint(api_key="right") as endpoint:
        with pytest.raises(ModelStartError) as caught:
            await probe(endpoint)
        message = str(caught.value)
        assert f"{endpoint.url}/chat/completions answered 401" in message
        assert "Pass another key with --api-key or OSMOSIS_API_KEY" in message
        assert KEY not in message
        with pytest.raises(ModelStartError, match=r"Pass a key with --api-key or OSMOSIS_API_KEY \(OPENAI_API_KEY"):
            await probe(endpoint, api_key=None)
    assert "--api-key" in await probe_failure([status(403)])
    assert "--api-key" in await probe_failure([status(400, body={"error": {"message": "Incorrect API key provided"}})])


async def test_the_probe_lists_what_the_endpoint_serves() -> None:
    async with ScriptedEndpoint(models=["qwen", "llama"]) as endpoint:
        with pytest.raises(ModelStartError) as caught:
            await probe(endpoint)
        message = str(caught.value)
        assert "The model `org/m` does not exist" in message
        assert "Pass one of its models with --model: qwen, llama." in message
        # A wrong path has no list to show.
        with pytest.raises(ModelStartError, match="usually it ends in /v1"):
            await probe(endpoint.url.removesuffix("/v1"))
    unknown = await probe_failure([status(400, body={"error": {"message": "org/m is not a valid model ID"}})])
    assert "--model: scripted." in unknown


async def test_the_probe_explains_what_is_no_api() -> None:
    message = await probe_failure([Reply(b"<html>Welcome</html>", content_type="text/html")])
    assert "an HTML page instead of JSON" in message
    assert "--base-url" in message
    assert "--base-url" in await probe_failure([raw_json({"choices": []})])
    assert "a redirect to /login" in await probe_failure([status(302, headers={"Location": "/login"})])


async def test_the_probe_names_an_address_where_nothing_listens() -> None:
    url = f"http://127.0.0.1:{unused_port()}/v1"
    with pytest.raises(ModelStartError, match=r"^nothing answers at") as caught:
        await probe(url)
    assert url in str(caught.value)
    assert "check --base-url" in str(caught.value)


# What the host gives to rollouts.


async def test_rollouts_share_one_model() -> None:
    async with ScriptedEndpoint([tool_call("add", a=1)]) as endpoint:
        host = create_model(spec_for(endpoint.url))
        assert host.for_rollout(ROW, 0) is host.for_rollout(ROW, 1)
        completion = await host.for_rollout(ROW, 0).complete(MESSAGES, TOOLS, {})
        assert calls_of(completion)[0]["function"] == {"name": "add", "arguments": '{"a":1}'}
        assert not host.price_known()
        await host.aclose()
