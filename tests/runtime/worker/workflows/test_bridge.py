"""The model endpoint of a rollout, called by the openai package and by hand, in front of a real model client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import aiohttp
import anyio
import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osmosis_ai.models.base import Listen, streamed
from osmosis_ai.models.choice import choose_model
from osmosis_ai.models.host import HostOptions, create_model
from osmosis_ai.records import Completion, Row
from osmosis_ai.retry import RetryPolicy
from osmosis_ai.runtime.worker.workflows.bridge import Bridge, ChatCall, Complete, RefusedCallError
from osmosis_ai.runtime.worker.workflows.listener import Hosted, Listener
from osmosis_ai.testing import ScriptedEndpoint, status, text, tool_call
from osmosis_ai.testing.endpoint import Gate, Reply, Request

pytestmark = pytest.mark.anyio
MESSAGES: list[Any] = [{"role": "user", "content": "6 × 7?"}]
ROW = Row(0, "row", "", "6 × 7?")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def hosted(complete: Complete, **options: Any) -> AsyncIterator[Hosted]:
    listener = Listener()
    await listener.start()
    try:
        with listener.host("r1", Bridge(complete, **options).answer) as rollout:
            yield rollout
    finally:
        await listener.aclose()


@asynccontextmanager
async def bridged(
    script: list[Reply] | Callable[[Request], Reply], **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedEndpoint, Hosted]]:
    """A client of a bridge in front of a scripted endpoint."""
    async with ScriptedEndpoint(script) as endpoint:
        spec = choose_model(
            model="scripted", base_url=endpoint.url, api_key=None, params={}, request_timeout=30.0, environ={}
        )
        host = create_model(spec, HostOptions(policy=RetryPolicy(max_attempts=2, base_delay=0.01)))
        model = host.for_rollout(ROW, 0)

        async def complete(call: ChatCall, listen: Listen | None) -> Completion:
            if listen is None:
                return await model.complete(call.messages, call.tools, call.params)
            return await streamed(model, call.messages, call.tools, call.params, listen)

        async with hosted(complete, **options) as rollout:
            client = openai.AsyncOpenAI(base_url=rollout.url, api_key=rollout.key)
            yield client, endpoint, rollout
            await client.close()
        await host.aclose()


async def test_the_whole_request_reaches_the_model_and_the_whole_reply_the_client() -> None:
    logprobs = {"content": [{"token": "42", "logprob": -0.5, "bytes": [52, 50], "top_logprobs": []}], "refusal": None}
    reply = text("42", message={"reasoning_content": "6 × 7"}, choice={"logprobs": logprobs, "token_ids": [7]})
    asked = {
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "stop": ["\n"],
        "seed": 7,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 0,
        "temperature": 0.5,
    }
    async with bridged([reply]) as (client, endpoint, _):
        got = await client.chat.completions.create(model="openai/osmosis-rollout", messages=MESSAGES, **asked)  # type: ignore[call-overload]
    assert endpoint.requests[0].body == {"model": "scripted", "messages": MESSAGES, **asked}
    assert got.model == "openai/osmosis-rollout"
    choice = got.choices[0].model_dump()
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("42", "6 × 7")
    assert (choice["logprobs"], choice["token_ids"]) == (logprobs, [7])
    assert got.usage is not None
    assert got.usage.total_tokens == 15


async def test_a_streamed_reply_is_the_same_reply() -> None:
    async with bridged([tool_call("add", a=1, b=2)]) as (client, _, _):
        stream = await client.chat.completions.create(
            model="any", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert [(call.index, call.function and call.function.arguments) for call in calls] == [(0, '{"a":1,"b":2}')]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (status(401), openai.AuthenticationError),
        (status(429), openai.RateLimitError),
        (status(400), openai.BadRequestError),
        (status(503), openai.InternalServerError),
        (Reply(b"<html>", content_type="text/html"), openai.InternalServerError),
    ],
)
async def test_errors_have_the_status_that_the_endpoint_gave(
    reply: Reply, error: type[openai.APIStatusError], stream: bool
) -> None:
    async with bridged(lambda request: reply) as (client, endpoint, _):
        with pytest.raises(error) as raised:
            await client.chat.completions.create(model="any", messages=MESSAGES, stream=stream)
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"]
    # Retried by the model's client alone, and there only what may succeed.
    assert len(endpoint.requests) == (2 if raised.value.status_code in (429, 503) else 1)


def events(*chunks: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> Reply:
    """An answer that is a stream of chunks."""
    body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
    return Reply(body + end, content_type="text/event-stream")


def part(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"model": "served", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


async def test_a_stream_s_parts_reach_the_client_as_they_come() -> None:
    script = [events(part(role="assistant", content="4"), part(content="2"), part("stop"), USAGE)]
    async with bridged(script) as (client, endpoint, _):
        stream = await client.chat.completions.create(model="any", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["4", "2", None]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 5
    assert {chunk.model for chunk in chunks} == {"any"}
    assert endpoint.requests[0].body["stream"] is True


async def test_the_first_part_comes_before_the_last_is_made() -> None:
    gate = Gate()

    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        assert listen is not None
        await listen({"delta": {"content": "4"}})
        await gate.wait()
        await listen({"delta": {"content": "2"}, "finish_reason": "stop"})
        return Completion({"role": "assistant", "content": "42"})

    async with hosted(complete) as rollout:
        client = openai.AsyncOpenAI(base_url=rollout.url, api_key=rollout.key)
        stream = await client.chat.completions.create(model="any", messages=MESSAGES, stream=True)
        first = await anext(stream.__aiter__())
        assert first.choices[0].delta.content == "4"
        gate.open()
        rest = [chunk async for chunk in stream]
        await client.close()
    assert rest[-1].choices[0].delta.content == "2"


async def test_a_stream_that_breaks_off_is_an_error_and_not_asked_for_again() -> None:
    async with bridged(lambda request: events(part(content="4"), end=b"")) as (client, endpoint, _):
        stream = await client.chat.completions.create(model="any", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="no end"):
            _ = [chunk async for chunk in stream]
    assert len(endpoint.requests) == 1


async def test_a_stream_has_heartbeats_and_reports_a_late_error() -> None:
    gate = Gate()
    async with (
        bridged([status(400).after(gate)], heartbeat=0.01) as (_, _, rollout),
        aiohttp.ClientSession() as session,
    ):
        body = {"messages": MESSAGES, "stream": True}
        headers = {"Authorization": f"Bearer {rollout.key}"}
        async with session.post(f"{rollout.url}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
            assert await answer.content.readline() == b": ping\n"
            gate.open()
            rest = (await answer.content.read()).decode()
    assert '"error"' in rest
    assert rest.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/rollouts/r1/chat/completions", {}, 200),
        ("/chat/completions", {}, 200),
        ("/chat/completions", {"x-rollout-id": "r1", "x-sample-id": "a"}, 200),
        ("/rollouts/r2/chat/completions", {}, 404),
        ("/chat/completions", {"x-rollout-id": "r2"}, 404),
        ("/rollouts/r1/chat/completions", {"Authorization": "Bearer other"}, 401),
        ("/chat/completions", {"Authorization": "Bearer other"}, 401),
        ("/chat/completions", {"Authorization": ""}, 401),
    ],
)
async def test_every_route_asks_for_the_rollout_s_bearer(path: str, headers: dict[str, str], expected: int) -> None:
    calls: list[ChatCall] = []

    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        calls.append(call)
        return Completion({"role": "assistant", "content": "42"})

    async with hosted(complete) as rollout, aiohttp.ClientSession() as session:
        base = rollout.url.removesuffix("/rollouts/r1")
        given = {"Authorization": f"Bearer {rollout.key}", **headers}
        async with session.post(base + path, json={"messages": MESSAGES}, headers=given) as answer:
            assert answer.status == expected
            # The oldest clients, which name the sample, get a stream unless they ask for none.
            is_stream = answer.content_type == "text/event-stream"
    assert is_stream is ("x-sample-id" in headers)
    assert [call.sample for call in calls] == ([headers.get("x-sample-id")] if expected == 200 else [])


async def test_a_rollout_can_t_use_the_bearer_of_another() -> None:
    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        raise AssertionError("no call was expected")

    listener = Listener()
    await listener.start()
    with listener.host("r1", Bridge(complete).answer) as one, listener.host("r2", Bridge(complete).answer) as two:
        client = openai.AsyncOpenAI(base_url=one.url, api_key=two.key)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="any", messages=MESSAGES)
        await client.close()
    await listener.aclose()


async def test_the_rollout_s_end_cuts_off_its_calls_and_refuses_later_ones() -> None:
    entered = anyio.Event()
    errors: list[Exception] = []

    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        entered.set()
        await anyio.sleep_forever()
        raise AssertionError

    listener = Listener()
    await listener.start()
    client = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0)

    async def ask() -> None:
        try:
            await client.chat.completions.create(model="any", messages=MESSAGES)
        except openai.APIError as error:
            errors.append(error)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            with listener.host("r1", Bridge(complete).answer) as rollout:
                client = openai.AsyncOpenAI(base_url=rollout.url, api_key=rollout.key, max_retries=0)
                group.start_soon(ask)
                await entered.wait()
        await ask()
    await client.close()
    await listener.aclose()
    assert isinstance(errors[0], openai.APIConnectionError)
    assert isinstance(errors[1], openai.APIStatusError)
    assert errors[1].status_code == 410


async def test_a_client_that_gives_up_cancels_the_model_call() -> None:
    cancelled = anyio.Event()

    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    async with hosted(complete) as rollout:
        client = openai.AsyncOpenAI(base_url=rollout.url, api_key=rollout.key, max_retries=0, timeout=0.2)
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="any", messages=MESSAGES)
        with anyio.fail_after(30):
            await cancelled.wait()
        await client.close()


async def test_a_limit_refuses_the_call_in_words() -> None:
    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        raise RefusedCallError("the 10 turns (--max-turns) are used up", "max_turns")

    async with hosted(complete) as rollout:
        client = openai.AsyncOpenAI(base_url=rollout.url, api_key=rollout.key)
        with pytest.raises(openai.BadRequestError, match="10 turns") as raised:
            await client.chat.completions.create(model="any", messages=MESSAGES)
        await client.close()
    assert raised.value.code == "max_turns"


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "{}", '{"messages": []}', '{"messages": [1]}', '{"messages": [{}], "tools": {"a": 1}}',
        '{"messages": [{}], "n": 2}', '{"messages": [{}], "api_base": "http://elsewhere"}',
        '{"messages": [{"tool_calls": {"a": 1}}]}', '{"messages": [{"tool_calls": [1]}]}',
        '{"messages": [{"tool_calls": [{"function": "add"}]}]}',
        '{"messages": ' + "[" * 3000 + "]" * 3000 + "}",
    ],
)  # fmt: skip
async def test_an_invalid_request_is_refused(body: str) -> None:
    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        raise AssertionError("no call was expected")

    async with hosted(complete) as rollout, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {rollout.key}"}
        async with session.post(f"{rollout.url}/chat/completions", data=body, headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    content=st.text(max_size=200),
    arguments=st.dictionaries(st.text(max_size=10), JSON, max_size=3),
    extra=st.dictionaries(st.sampled_from(["reasoning_content", "x_own"]), JSON, max_size=2),
    stream=st.booleans(),
)
async def test_whatever_the_model_says_arrives(
    content: str, arguments: dict[str, Any], extra: dict[str, Any], stream: bool
) -> None:
    written = msgspec.json.encode(arguments).decode()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": written}}
    message = {"role": "assistant", "content": content, "tool_calls": [call], **extra}

    async def complete(asked: ChatCall, listen: Listen | None) -> Completion:
        return Completion(message, finish_reason="tool_calls")

    async with hosted(complete) as rollout:
        client = openai.AsyncOpenAI(base_url=rollout.url, api_key=rollout.key)
        if stream:
            chunks = [
                chunk async for chunk in await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            ]
            got = chunks[0].choices[0].delta.model_dump()
        else:
            got = (await client.chat.completions.create(model="m", messages=MESSAGES)).choices[0].message.model_dump()
        await client.close()
    assert got["content"] == content
    assert got["tool_calls"][0]["function"] == {"name": "f", "arguments": written}
    assert {name: got[name] for name in extra} == extra


async def test_a_call_costs_little_more_than_the_model() -> None:
    async def complete(call: ChatCall, listen: Listen | None) -> Completion:
        return Completion({"role": "assistant", "content": "42"})

    async with hosted(complete) as rollout, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {rollout.key}"}
        took = []
        for _ in range(50):
            started = perf_counter()
            url = f"{rollout.url}/chat/completions"
            async with session.post(url, json={"messages": MESSAGES}, headers=headers) as answer:
                await answer.read()
            took.append(perf_counter() - started)
    # The fastest, because the machine may be busy; the median is measured in benchmarks.
    assert min(took) < 0.005
