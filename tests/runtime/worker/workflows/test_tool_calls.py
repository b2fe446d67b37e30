"""Tool calls of a workflow: our SDK's client against the worker's listener, over loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from osmosis_ai.config import LimitsConfig
from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.records import Completion, JsonObject
from osmosis_ai.rollout.server.tools import HostedTools, ToolClient
from osmosis_ai.runtime.worker.observed import ObservedRollout
from osmosis_ai.runtime.worker.workflows.listener import Listener, ToolCalls

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    await listener.start()
    yield listener
    await listener.aclose()


@pytest.fixture
async def client() -> AsyncIterator[ToolClient]:
    client = ToolClient()
    yield client
    await client.aclose()


async def no_model(request: web.Request, body: bytes) -> web.StreamResponse:
    raise AssertionError("no model call was expected")


def host(listener: Listener, tool_calls: ToolCalls | None) -> Any:
    return listener.host("r1", no_model, tool_calls)


async def test_arguments_and_results_pass_unchanged(listener: Listener, client: ToolClient) -> None:
    async def echo(name: str, arguments: JsonObject) -> str:
        return f"{name} {arguments}"

    with host(listener, echo) as hosted:
        tools = HostedTools([], f"{hosted.url}/tools", hosted.key, client)
        arguments = {"a": [1, None, {"ü": "\u2028"}], "b": 1.5}
        assert await tools.call_tool("add", arguments) == f"add {arguments}"


async def test_calls_without_bearer_tools_or_form_are_refused(listener: Listener, client: ToolClient) -> None:
    async def empty(name: str, arguments: JsonObject) -> str:
        return ""

    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    with host(listener, empty) as hosted:
        url = f"{hosted.url}/tools"
        with pytest.raises(OsmosisRolloutError, match=r"add can't be called: .*401: the bearer key isn't this"):
            await HostedTools([], url, "another", client).call_tool("add", {})
        with pytest.raises(OsmosisRolloutError, match="422: the arguments are nested"):
            await HostedTools([], url, hosted.key, client).call_tool("add", {"x": deep})
        with pytest.raises(OsmosisRolloutError, match="JSON can't hold its arguments"):
            await HostedTools([], url, hosted.key, client).call_tool("add", {"x": object()})
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {hosted.key}"}) as session:
            for body in ("", "[]", '{"name": 1}', '{"name": "add", "arguments": []}', "[" * 100_000):
                async with session.post(f"{url}/call", data=body) as answer:
                    assert answer.status == 422, body
    with pytest.raises(OsmosisRolloutError, match="410: the rollout 'r1' has ended"):
        await HostedTools([], url, hosted.key, client).call_tool("add", {})
    with host(listener, None) as hosted, pytest.raises(OsmosisRolloutError, match="404: the rollout has no tools"):
        await HostedTools([], f"{hosted.url}/tools", hosted.key, client).call_tool("add", {})


async def test_a_call_that_outlives_its_rollout_is_cut_off(listener: Listener, client: ToolClient) -> None:
    started, ended = anyio.Event(), anyio.Event()

    async def endless(name: str, arguments: JsonObject) -> str:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    async def call(hosted: Any) -> None:
        with pytest.raises(OsmosisRolloutError, match="add can't be called"):
            await HostedTools([], f"{hosted.url}/tools", hosted.key, client).call_tool("add", {})

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            with host(listener, endless) as hosted:
                group.start_soon(call, hosted)
                await started.wait()
            await ended.wait()


def observed(*replies: tuple[str, str, str]) -> ObservedRollout:
    rollout = ObservedRollout("job", [], LimitsConfig(), lambda event: None)
    calls = [{"id": id, "function": {"name": name, "arguments": arguments}} for id, name, arguments in replies]
    rollout.enforce_limits()
    rollout.replied(Completion({"role": "assistant", "tool_calls": calls}))
    return rollout


@pytest.mark.parametrize(
    ("name", "arguments", "claimed"),
    [
        ("add", {"a": 1, "b": 2}, ("2", '{"b": 2, "a": 1}')),
        ("add", {"a": 1}, ("own-1", '{"a":1}')),
        ("sub", {}, ("3", "")),
        ("odd", {}, ("own-1", "{}")),
    ],
)
def test_a_call_belongs_to_the_reply_that_asked_for_it(
    name: str, arguments: JsonObject, claimed: tuple[str, str]
) -> None:
    rollout = observed(
        ("1", "add", '{"a": 1, "b": 3}'), ("2", "add", '{"b": 2, "a": 1}'), ("3", "sub", ""), ("4", "odd", "{")
    )
    call = rollout.claim(name, arguments)
    assert (call["id"], call["function"]["arguments"]) == claimed


def test_each_call_of_a_reply_is_claimed_once() -> None:
    rollout = observed(("1", "add", "{}"), ("2", "add", "{}"))
    assert [rollout.claim("add", {})["id"] for _ in range(4)] == ["1", "2", "own-1", "own-2"]
