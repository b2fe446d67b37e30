"""Sessions without a transport look to a FastMCP server like a connected client."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from fastmcp import Context, FastMCP
from fastmcp.server.middleware import Middleware

from osmosis_ai.mcp_tools.direct import DirectServer, direct_server
from osmosis_ai.mcp_tools.host import ToolHost

SDK = 2 if importlib.util.find_spec("mcp.server.mcpserver") else 1
SECONDS = 30.0

needs_sdk_2 = pytest.mark.skipif(SDK == 1, reason="the SDK 1.x has no public parts for it")


def within(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await test()

    anyio.run(bounded)


async def found(server: Any) -> DirectServer | None:
    return await direct_server(server, [])


@needs_sdk_2
def test_a_fastmcp_server_needs_no_transport(caplog: pytest.LogCaptureFixture) -> None:
    # The canary: a version of fastmcp or the SDK without the parts that this stands on fails here, and says which.
    assert isinstance(anyio.run(found, FastMCP("any")), DirectServer), caplog.text


class Changed(FastMCP[Any]):
    """A server as another version of the library might have it."""

    def http_app(self, *arguments: Any, **options: Any) -> Any:
        raise AttributeError("there is no http_app any more")


@needs_sdk_2
def test_without_the_parts_sessions_have_a_transport_and_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = Changed("changed")
    server.tool(lambda: "hello", name="greet")

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as session:
            assert (await session.call("greet", "", timeout=SECONDS)).text == "hello"

    within(test)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "osmosis_ai.mcp_tools.direct"]
    assert "sessions use a transport" in line
    assert "there is no http_app any more" in line


@pytest.mark.skipif(SDK == 2, reason="the SDK 2.x can do without")
def test_with_the_sdk_1_every_session_has_a_transport() -> None:
    assert anyio.run(found, FastMCP("any")) is None


def test_other_servers_are_reached_through_a_transport() -> None:
    assert anyio.run(found, "http://127.0.0.1:1/mcp") is None


def test_the_result_must_have_the_structure_the_tool_promises() -> None:
    server = FastMCP("promising")
    promised = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}

    @server.tool(output_schema=promised)
    def measure(size: str) -> dict[str, Any]:
        return {"size": int(size) if size.isdigit() else size}

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as session:
            assert (await session.call("measure", {"size": "3"}, timeout=SECONDS)).error is None
            wrong = await session.call("measure", {"size": "big"}, timeout=SECONDS)
        assert wrong.error == "exception"
        assert "'big' is not of type 'integer'" in wrong.text

    within(test)


def test_each_session_shakes_hands_and_says_whether_it_can_sample() -> None:
    seen: list[bool] = []

    class Handshakes(Middleware):
        async def on_initialize(self, context: Any, call_next: Any) -> Any:
            seen.append(context.message.params.capabilities.sampling is not None)
            return await call_next(context)

    server = FastMCP("polite", middleware=[Handshakes()])
    server.tool(lambda: "hello", name="greet")

    async def answer(messages: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": "yes"}

    async def test() -> None:
        async with ToolHost(server) as host:
            seen.clear()
            for handler in (None, answer):
                async with host.session(sampling_handler=handler) as session:
                    for _ in range(2):
                        assert (await session.call("greet", "", timeout=SECONDS)).text == "hello"
        assert seen == [False, True]

    within(test)


class Deaf(Middleware):
    """Handles tool calls only."""

    async def on_call_tool(self, context: Any, call_next: Any) -> Any:
        return await call_next(context)


class Listener(Middleware):
    async def on_message(self, context: Any, call_next: Any) -> Any:
        heard.append(context.method)
        return await call_next(context)


heard: list[str] = []


@needs_sdk_2
@pytest.mark.parametrize("middleware", [[], [Deaf()], [Deaf(), Listener()]], ids=["none", "deaf", "listening"])
def test_a_session_that_needs_no_handshake_is_like_one_that_does(middleware: list[Middleware]) -> None:
    server = FastMCP("introduced", middleware=middleware)
    heard.clear()

    @server.tool
    async def who(ctx: Context) -> dict[str, Any]:
        client = ctx.session.client_params
        assert client is not None
        return {
            "client": client.client_info.name,
            "samples": client.capabilities.sampling is not None,
            "version": ctx.session.protocol_version,
        }

    async def answer(messages: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": "yes"}

    async def test() -> None:
        async with ToolHost(server) as host:
            assert host._direct[""].hears_handshakes() == (len(middleware) == 2)
            heard.clear()
            for handler in (None, answer):
                async with host.session(sampling_handler=handler) as session:
                    said = (await session.call("who", "", timeout=SECONDS)).text
                client = {"client": "osmosis-ai", "samples": handler is not None, "version": LATEST_HANDSHAKE_VERSION}
                assert json.loads(said) == client
        handshake = ["initialize", "notifications/initialized", "tools/call"]
        assert heard == (handshake * 2 if len(middleware) == 2 else [])

    from mcp_types.version import LATEST_HANDSHAKE_VERSION

    within(test)


@needs_sdk_2
def test_a_hook_that_is_set_on_the_object_hears_handshakes() -> None:
    middleware, listener = Middleware(), Listener()
    middleware.on_message = listener.on_message  # type: ignore[method-assign]
    server = FastMCP("patched", middleware=[middleware])
    server.tool(lambda: "hello", name="greet")

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as session:
            heard.clear()
            await session.call("greet", "", timeout=SECONDS)
        assert heard == ["initialize", "notifications/initialized", "tools/call"]

    within(test)


@needs_sdk_2
def test_what_a_tool_does_to_its_clients_introduction_stays_in_its_session() -> None:
    server = FastMCP("renaming")

    @server.tool
    async def rename(ctx: Context) -> str:
        client = ctx.session.client_params
        assert client is not None
        before, client.client_info.name = client.client_info.name, "changed"
        return before

    async def test() -> None:
        async with ToolHost(server) as host:
            for _ in range(2):
                async with host.session() as session:
                    assert (await session.call("rename", "", timeout=SECONDS)).text == "osmosis-ai"

    within(test)


@needs_sdk_2
def test_a_server_that_traces_has_handshakes() -> None:
    code = """
from opentelemetry import trace
import anyio
from fastmcp import FastMCP
from osmosis_ai.mcp_tools.host import ToolHost

async def main():
    async with ToolHost(FastMCP("traced")) as host:
        before = host._direct[""].hears_handshakes()
        trace.set_tracer_provider(trace.NoOpTracerProvider())
        print(before, host._direct[""].hears_handshakes())

anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@needs_sdk_2
def test_middleware_that_comes_later_hears_the_next_handshake() -> None:
    server = FastMCP("growing")
    heard.clear()
    server.tool(lambda: server.add_middleware(Listener()), name="listen")

    async def test() -> None:
        async with ToolHost(server) as host:
            for _ in range(2):
                async with host.session() as session:
                    await session.call("listen", "", timeout=SECONDS)
        assert heard[:2] == ["initialize", "notifications/initialized"]

    within(test)


def test_a_call_that_ran_out_of_time_is_cancelled() -> None:
    server = FastMCP("patient")
    cancelled = anyio.Event()

    @server.tool
    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as session:
            assert (await session.call("wait", "", timeout=0.1)).error == "timeout"
            if SDK == 2:
                await cancelled.wait()
        await cancelled.wait()

    within(test)


def test_a_rollout_that_is_cancelled_takes_its_call_along() -> None:
    server = FastMCP("patient")
    started, cancelled = anyio.Event(), anyio.Event()

    @server.tool
    async def wait() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async def rollout(host: ToolHost) -> None:
        async with host.session() as session:
            await session.call("wait", "", timeout=SECONDS)

    async def test() -> None:
        async with ToolHost(server) as host:
            async with anyio.create_task_group() as group:
                group.start_soon(rollout, host)
                await started.wait()
                group.cancel_scope.cancel()
            await cancelled.wait()
        assert host.clean

    within(test)


def test_what_a_tool_logs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = FastMCP("talkative")

    @server.tool
    async def talk(ctx: Context) -> str:
        await ctx.info("half way")
        return "done"

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as session:
            assert (await session.call("talk", "", timeout=SECONDS)).text == "done"

    logger = logging.getLogger("fastmcp.client.from_server")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    try:
        within(test)
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    assert "half way" in caplog.text


@pytest.mark.parametrize("asks", ["elicit", "roots"])
def test_what_the_client_cannot_do_fails_the_call_only(asks: str) -> None:
    server = FastMCP("asking")

    @server.tool
    async def ask(ctx: Context) -> str:
        if asks == "elicit":
            return str(await ctx.elicit("Which one?", response_type=str))
        return str(await ctx.session.list_roots())

    @server.tool
    def fine() -> str:
        return "fine"

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as session:
            refused = await session.call("ask", "", timeout=SECONDS)
            assert refused.error == "exception"
            assert "not supported" in refused.text
            assert (await session.call("fine", "", timeout=SECONDS)).text == "fine"

    within(test)


def test_a_ping_is_answered() -> None:
    server = FastMCP("alive")

    @server.tool
    async def ping(ctx: Context) -> str:
        await ctx.session.send_ping()
        return "alive"

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as session:
            assert (await session.call("ping", "", timeout=SECONDS)).text == "alive"

    within(test)


def test_progress_that_nobody_follows_is_no_error() -> None:
    server = FastMCP("slow")

    @server.tool
    async def work(ctx: Context) -> str:
        await ctx.report_progress(1, 2)
        return "worked"

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as session:
            assert (await session.call("work", "", timeout=SECONDS)).text == "worked"

    within(test)


def test_every_session_sees_what_the_lifespan_gave() -> None:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[dict[str, str]]:
        yield {"database": "open"}

    server = FastMCP("stateful", lifespan=lifespan)

    @server.tool
    async def database(ctx: Context) -> str:
        return str(ctx.request_context.lifespan_context["database"])

    async def test() -> None:
        async with ToolHost(server) as host:
            for _ in range(2):
                async with host.session() as session:
                    assert (await session.call("database", "", timeout=SECONDS)).text == "open"

    within(test)


@needs_sdk_2
def test_a_sessions_state_is_its_own() -> None:
    server = FastMCP("counting")

    @server.tool
    async def count(ctx: Context) -> int:
        number = (await ctx.get_state("number") or 0) + 1
        await ctx.set_state("number", number)
        return number

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as one, host.session() as two:
            counts = [(await session.call("count", "", timeout=SECONDS)).text for session in (one, one, two, one)]
        assert counts == ["1", "2", "1", "3"]

    within(test)
