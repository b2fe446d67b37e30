from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.models.host import HostOptions, create_model
from osmosis_ai.models.litellm import LiteLLMModel, price_known
from osmosis_ai.records import Completion, ModelSpec, Usage
from osmosis_ai.retry import RetryPolicy
from osmosis_ai.testing import (
    Reply,
    ScriptedEndpoint,
    broken_json,
    by_turn,
    drop,
    hang,
    raw_json,
    status,
    text,
    tool_call,
)

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("litellm")]

KEY = "sk-secret-0123456789"
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0}},
                "$defs": {"x": {}},
            },
        },
    }
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
async def one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps one loop for the module: LiteLLM 1.80 has a background task that can't move to another one."""
    yield  # noqa: PT022  a fixture that returned would not hold the loop


def spec_for(url: str | None, model: str = "openai/scripted-x", **changes: Any) -> ModelSpec:
    spec = ModelSpec(model, "litellm", model, url, KEY, request_timeout=20.0)
    return msgspec.structs.replace(spec, **changes)


@asynccontextmanager
async def model_of(spec: ModelSpec) -> AsyncIterator[LiteLLMModel]:
    model = LiteLLMModel(spec)
    try:
        yield model
    finally:
        await model.aclose()


async def answer(reply: Reply, model: str = "openai/scripted-x", **changes: Any) -> Completion:
    async with (
        ScriptedEndpoint([reply]) as endpoint,
        model_of(spec_for(endpoint.url, model, **changes)) as litellm_model,
    ):
        return await litellm_model.complete(MESSAGES, TOOLS, {})


async def failure(reply: Reply, **changes: Any) -> ModelError:
    """Return the error for one scripted reply; LiteLLM must not have retried by itself."""
    async with ScriptedEndpoint([reply] * 5) as endpoint, model_of(spec_for(endpoint.url, **changes)) as model:
        with pytest.raises(ModelError) as caught:
            await model.complete(MESSAGES, TOOLS, {})
    assert len(endpoint.requests) == 1
    assert KEY not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    return caught.value


async def test_what_is_sent() -> None:
    async with (
        ScriptedEndpoint([text("a")], api_key=KEY) as endpoint,
        model_of(spec_for(endpoint.url, params={"temperature": 1, "seed": 7})) as model,
    ):
        await model.complete(MESSAGES, TOOLS, {"temperature": 0.5, "seed": None, "max_tokens": 9})
    assert endpoint.requests[0].body == {
        "model": "scripted-x",
        "messages": MESSAGES,
        "tools": TOOLS,
        "temperature": 0.5,
        "max_tokens": 9,
    }


async def test_a_reply_becomes_the_same_completion_as_elsewhere() -> None:
    completion = await answer(text("hi", prompt_tokens=11, completion_tokens=3, model="served", finish_reason="length"))
    assert completion == Completion(
        message={"role": "assistant", "content": "hi"}, finish_reason="length", usage=Usage(11, 3, 14), model="served"
    )


async def test_tool_calls_and_further_fields_survive() -> None:
    reply = raw_json(
        {
            "choices": [
                {
                    "finish_reason": "tool_calls",
                    "message": {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": "hm",
                        "tool_calls": [
                            {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                            {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{bad"}},
                            {"type": "function", "function": {"name": "add", "arguments": "{}"}},
                        ],
                    },
                }
            ]
        }
    )
    completion = await answer(reply)
    calls = completion.message["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"a":1}', "{bad", "{}"]
    assert [call["id"] for call in calls[:2]] == ["a", "a_2"]
    assert len({call["id"] for call in calls}) == 3
    assert completion.message["reasoning_content"] == "hm"
    assert completion.finish_reason == "tool_calls"
    assert completion.usage == Usage()
    assert "function_call" not in completion.message
    assert "provider_specific_fields" not in completion.message


async def test_a_conversation_goes_back_as_it_came() -> None:
    async with (
        ScriptedEndpoint(by_turn(tool_call("add", a=1), text("2"))) as endpoint,
        model_of(spec_for(endpoint.url)) as model,
    ):
        first = (await model.complete(MESSAGES, TOOLS, {})).message
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        await model.complete([*MESSAGES, first, result], TOOLS, {})
    sent = endpoint.requests[1].messages
    assert sent[1]["tool_calls"] == first["tool_calls"]
    assert sent[2] == result


async def test_cost_comes_from_the_price_table() -> None:
    reply = text("hi", prompt_tokens=1000, completion_tokens=100, model="gpt-4o-mini")
    completion = await answer(reply, "openai/gpt-4o-mini")
    # 0.15 and 0.60 USD per million tokens.
    assert completion.cost_usd == pytest.approx(1000 * 0.15e-6 + 100 * 0.60e-6)
    assert (await answer(reply)).cost_usd is None


def test_which_prices_are_known() -> None:
    assert price_known("openai/gpt-4o-mini")
    assert price_known("gemini/gemini-2.5-flash")
    assert not price_known("openai/no-such-model")
    assert not price_known("hosted_vllm/gpt-4o-mini")
    assert not price_known("nobody/gpt-4o-mini")
    assert not price_known("ollama/my-own-model")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (status(400), "bad_request"),
        (status(401, body={"error": {"message": f"Incorrect API key provided: {KEY}"}}), "auth"),
        (status(403), "auth"),
        (status(404), "not_found"),
        (status(429), "rate_limit"),
        (status(429, body={"error": {"message": "no credit", "code": "insufficient_quota"}}), "quota"),
        (status(500), "overloaded"),
        (status(503), "overloaded"),
        (drop(), "dropped"),
        (broken_json(), "bad_reply"),
        (raw_json({"choices": []}), "bad_reply"),
    ],
)
async def test_faults_have_a_kind(reply: Reply, kind: str) -> None:
    error = await failure(reply)
    assert error.kind == kind
    assert "openai/scripted-x" in str(error)


async def test_status_wait_and_message_come_from_the_reply() -> None:
    body = {"error": {"message": f"slow down, {KEY}"}}
    error = await failure(status(429, headers={"Retry-After": "7"}, body=body))
    assert (error.status, error.retry_after) == (429, 7)
    assert str(error) == "openai/scripted-x failed: slow down, ***"


async def test_a_key_from_the_environment_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-environment")
    body = {"error": {"message": "bad key sk-from-environment"}}
    assert "bad key ***" in str(await failure(status(401, body=body), api_key=None))


async def test_a_hang_ends_with_the_request_timeout() -> None:
    error = await failure(hang(), request_timeout=0.3)
    assert error.kind == "timeout"
    assert "no answer within 0.3 s" in str(error)


PROVIDERS = ["openai/scripted-x", "azure/scripted-x", "groq/scripted-x", "anthropic/claude-x", "gemini/gemini-x"]
"""LiteLLM calls these in different ways: with clients of its own, and with the openai package."""


@asynccontextmanager
async def answering(head: str, body: bytes = b"") -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request, whatever its path, with these bytes; its address and the requests."""
    requests: list[bytes] = []

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = await reader.readuntil(b"\r\n\r\n")
        requests.append(sent)
        length = int(sent.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()

    async with await asyncio.start_server(answer_one, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", requests


@pytest.mark.parametrize("model", PROVIDERS)
async def test_redirects_are_not_followed(model: str) -> None:
    async with answering("200 OK") as (other, received):
        # By name: the other origin is another host as well as another port.
        location = f"{other.replace('127.0.0.1', 'localhost')}/v1"
        async with (
            answering(f"307 Temporary Redirect\r\nLocation: {location}") as (url, _),
            model_of(spec_for(url, model, params={"api_version": "1"} if "azure" in model else {})) as litellm_model,
        ):
            with pytest.raises(ModelError, match="which is not followed, so that no key is sent there") as caught:
                await litellm_model.complete(MESSAGES, [], {})
    assert received == []
    assert (caught.value.kind, caught.value.status) == ("not_found", 307)
    assert f"answered 307: a redirect to {location}" in str(caught.value)


def bomb() -> bytes:
    """A gigabyte as a megabyte of gzip."""
    compress = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    return b"".join(compress.compress(bytes(1 << 20)) for _ in range(1024)) + compress.flush()


async def test_a_reply_is_read_up_to_a_size_after_decompression() -> None:
    async with answering("200 OK\r\nContent-Encoding: gzip", bomb()) as (url, requests):
        for model in PROVIDERS:
            params = {"api_version": "1"} if "azure" in model else {}
            async with model_of(spec_for(url, model, params=params)) as litellm_model:
                with pytest.raises(ModelError, match="answered with more than 67108864 bytes") as caught:
                    await litellm_model.complete(MESSAGES, [], {})
            assert caught.value.kind == "bad_reply"
    assert len(requests) == len(PROVIDERS)
    assert all(b"accept-encoding: gzip\r\n" in request.lower() for request in requests)


@pytest.mark.parametrize("model", PROVIDERS[:1])
async def test_a_compressed_reply_is_read(model: str) -> None:
    reply = text("squeezed")
    async with (
        answering("200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip", gzip.compress(reply.body)) as (
            url,
            _,
        ),
        model_of(spec_for(url, model)) as litellm_model,
    ):
        assert (await litellm_model.complete(MESSAGES, [], {})).message["content"] == "squeezed"


@pytest.mark.parametrize(("coding", "what"), [("br", "the coding 'br'"), ("gzip", "broken gzip")])
async def test_a_reply_that_cant_be_decompressed_is_an_error(coding: str, what: str) -> None:
    async with (
        answering(f"200 OK\r\nContent-Encoding: {coding}", b"not compressed") as (url, _),
        model_of(spec_for(url)) as model,
    ):
        with pytest.raises(ModelError, match=what) as caught:
            await model.complete(MESSAGES, [], {})
    assert caught.value.kind == "bad_reply"


async def test_nothing_listens_there() -> None:
    async with ScriptedEndpoint() as endpoint:
        url = endpoint.url
    async with model_of(spec_for(url)) as model:
        with pytest.raises(ModelError, match="can't be reached") as caught:
            await model.complete(MESSAGES, [], {})
    assert caught.value.kind == "refused"
    assert url in str(caught.value)


async def probe(spec: ModelSpec) -> None:
    host = create_model(spec, HostOptions(policy=RetryPolicy(max_attempts=3, base_delay=0.001)))
    try:
        await host.probe()
    finally:
        await host.aclose()


async def test_the_probe_accepts_a_model_that_answers() -> None:
    async with ScriptedEndpoint([status(429), text("pong")], probe=None, api_key=KEY) as endpoint:
        await probe(spec_for(endpoint.url))
    assert len(endpoint.requests) == 2
    assert endpoint.requests[1].body["max_tokens"] == 16


async def test_the_probe_explains_a_name_without_a_provider() -> None:
    with pytest.raises(ModelStartError, match=r"'nobody/nothing'.*provider/model"):
        await probe(spec_for(None, "nobody/nothing"))


@pytest.mark.parametrize(
    ("model", "variable"), [("openai/gpt-4o-mini", "OPENAI_API_KEY"), ("anthropic/claude-x", "ANTHROPIC_API_KEY")]
)
async def test_the_probe_names_the_variable_of_a_missing_key(
    model: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ModelStartError, match=f"No key is set: set {variable}, or pass --api-key"):
        await probe(spec_for(None, model, api_key=None))


async def test_the_probe_explains_a_refused_key_and_an_unknown_model() -> None:
    async with ScriptedEndpoint(api_key="right") as endpoint:
        with pytest.raises(ModelStartError, match="Pass another key with --api-key") as caught:
            await probe(spec_for(endpoint.url))
    assert KEY not in str(caught.value)
    async with ScriptedEndpoint(models=["other"]) as endpoint:
        with pytest.raises(ModelStartError, match=r"`scripted-x` does not exist.*Check --model"):
            await probe(spec_for(endpoint.url))


async def test_a_streamed_reply_is_passed_on_in_parts_and_is_the_whole_reply() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Let me"},
        {"content": " add"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o-mini"}
    chunks: list[dict[str, Any]] = [{**head, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    chunks.append({**head, "choices": [], "usage": usage})
    body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    heard: list[str] = []

    async def listen(choice: dict[str, Any]) -> None:
        heard.append(choice["delta"].get("content") or "")

    async with (
        ScriptedEndpoint([Reply(body, content_type="text/event-stream")]) as endpoint,
        model_of(spec_for(endpoint.url, "openai/gpt-4o-mini")) as model,
    ):
        completion = await model.stream(MESSAGES, TOOLS, {}, listen)
    assert [each for each in heard if each] == ["Let me", " add"]
    assert completion.message["content"] == "Let me add"
    assert [each["function"] for each in completion.message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert completion.finish_reason == "tool_calls"
    assert completion.usage == Usage(10, 5, 15)
    assert completion.cost_usd is not None


async def test_a_refused_stream_is_the_same_error_as_a_refused_request() -> None:
    async def listen(choice: dict[str, Any]) -> None:
        raise AssertionError("nothing was to be heard")

    async with ScriptedEndpoint([status(401)]) as endpoint, model_of(spec_for(endpoint.url)) as model:
        with pytest.raises(ModelError) as raised:
            await model.stream(MESSAGES, [], {}, listen)
    assert (raised.value.kind, raised.value.status) == ("auth", 401)
