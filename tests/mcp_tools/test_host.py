"""Tool calls against real MCP servers: in this process, over loopback HTTP and over stdio."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
import uvicorn
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.types import SamplingMessage, TextContent

import stdio_tools
from osmosis_ai.errors import RepositoryError
from osmosis_ai.mcp_tools.host import ToolHost, read_config
from osmosis_ai.mcp_tools.session import CallOutcome, ToolSession

SDK = 2 if importlib.util.find_spec("mcp.server.mcpserver") else 1
if SDK == 2:
    from mcp.server.mcpserver import MCPServer as SDKServer
else:
    from mcp.server.fastmcp import FastMCP as SDKServer

REPOS = Path(__file__).parent.parent / "repos"
SECONDS = 30.0


def within(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await test()

    anyio.run(bounded)


def shop() -> FastMCP:
    server = FastMCP("shop")

    @server.tool
    def price(item: str, count: int = 1, colour: Literal["red", "blue"] = "red") -> int:
        """Give a price."""
        if item == "unicorn":
            raise ValueError("we have no unicorns")
        return 3 * count

    @server.tool
    def nested(order: dict[str, list[int]]) -> int:
        """Sum an order."""
        return sum(sum(counts) for counts in order.values())

    return server


async def call_once(server: Any, name: str, arguments: str | dict[str, Any]) -> CallOutcome:
    async with ToolHost(server) as host, host.session() as session:
        return await session.call(name, arguments, timeout=SECONDS)


def outcome(server: Any, name: str, arguments: str | dict[str, Any]) -> CallOutcome:
    return anyio.run(call_once, server, name, arguments)


def test_tools_are_listed_in_order() -> None:
    async def test() -> None:
        async with ToolHost(shop()) as host:
            assert [tool["function"]["name"] for tool in host.tools] == ["price", "nested"]
            assert host.tools[0]["function"]["parameters"]["required"] == ["item"]
        assert host.clean

    within(test)


def test_a_server_without_tools() -> None:
    async def test() -> None:
        async with ToolHost(FastMCP("empty")) as host, host.session() as session:
            assert host.tools == []
            assert await session.call("add", "{}", timeout=SECONDS) == CallOutcome(
                "Error: there is no tool 'add'. There are no tools at all.", "unknown_tool"
            )

    within(test)


def test_a_call() -> None:
    assert outcome(shop(), "price", '{"item": "pen", "count": 2}') == CallOutcome("6")
    assert outcome(shop(), "price", {"item": "pen"}) == CallOutcome("3")
    assert outcome(shop(), "nested", '{"order": {"a": [1, 2]}}') == CallOutcome("3")


def test_an_unknown_tool_names_what_is_near() -> None:
    assert outcome(shop(), "prices", "{}").text == "Error: there is no tool 'prices'. Did you mean 'price'?"
    far = outcome(shop(), "zzz", "{}")
    assert far == CallOutcome("Error: there is no tool 'zzz'. The tools are: price, nested.", "unknown_tool")
    outcome(shop(), "\ud800", "{}").text.encode()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"item": ', "not valid JSON"),
        ("[1]", "must be a JSON object, and not an array"),
        ('"pen"', "must be a JSON object, and not a string"),
        ("7", "must be a JSON object, and not a number"),
        ("true", "must be a JSON object, and not a boolean"),
        ("null", "must be a JSON object, and not null"),
        ('{"item": NaN}', "NaN is not a JSON value"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_arguments_that_are_no_json_object(arguments: str, says: str) -> None:
    found = outcome(shop(), "price", arguments)
    assert found.error == "bad_json"
    assert says in found.text


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("price", "", "'item' is a required property"),
        ("price", "  ", "'item' is a required property"),
        ("price", '{"item": "pen", "count": "many"}', "count: 'many' is not of type 'integer'"),
        ("price", '{"item": "pen", "colour": "green"}', "colour: 'green' is not one of ['red', 'blue']"),
        ("price", '{"item": ["pen"]}', "item: ['pen'] is not of type 'string'"),
        ("nested", '{"order": {"a": [1, {}]}}', "order.a[1]: {} is not of type 'integer'"),
        ("nested", '{"order": 3, "more": 4}', "order: 3 is not of type 'object'"),
    ],
)
def test_arguments_against_the_schema(name: str, arguments: str, says: str) -> None:
    found = outcome(shop(), name, arguments)
    assert found.error == "schema"
    assert found.text.startswith(f"Error: invalid arguments for tool '{name}': ")
    assert says in found.text


def test_what_a_lenient_server_accepts_is_no_error() -> None:
    assert outcome(shop(), "price", '{"item": "pen", "count": "2"}') == CallOutcome("6")


def test_a_tools_exception() -> None:
    found = outcome(shop(), "price", '{"item": "unicorn"}')
    assert found == CallOutcome("Error calling tool 'price': we have no unicorns", "exception")


def test_an_exception_of_a_tool_is_located_for_the_call_that_raised_it() -> None:
    server = shop()

    @server.tool
    def refuse(item: str) -> None:
        """Refuse."""
        try:
            {}[item]
        except KeyError as error:
            raise ToolError(f"we have no {item}") from error

    async def test() -> None:
        async with ToolHost(server, root=Path(__file__).parent) as host, host.session() as session:
            outcomes: dict[int, CallOutcome] = {}

            async def call(count: int) -> None:
                outcomes[count] = await session.call("price", {"item": "unicorn", "count": count}, timeout=SECONDS)

            assert (await session.call("price", {"item": "pen"}, timeout=SECONDS)).raised is None
            async with anyio.create_task_group() as group:
                for count in range(5):
                    group.start_soon(call, count)
            on_purpose = await session.call("refuse", {"item": "unicorn"}, timeout=SECONDS)
            assert (on_purpose.text, on_purpose.error) == ("Error: we have no unicorn", "exception")
            assert on_purpose.raised is None
            for outcome in outcomes.values():
                assert outcome.text == "Error calling tool 'price': we have no unicorns"
                assert outcome.raised is not None
                assert outcome.raised.message == "ValueError: we have no unicorns"
                assert outcome.raised.file == "test_host.py"
                assert outcome.raised.detail is not None
                assert "in price\n    raise ValueError(" in outcome.raised.detail
                assert "site-packages" not in outcome.raised.detail

    within(test)


def test_an_exception_after_a_lenient_server_took_the_arguments_is_the_tools() -> None:
    assert outcome(shop(), "price", '{"item": "unicorn", "count": "2"}').error == "exception"


def test_the_sdks_own_server() -> None:
    server = SDKServer("sdk")

    @server.tool()
    def half(number: float) -> float:
        """Halve a number."""
        return number / 2 if number else 1 / number

    assert outcome(server, "half", '{"number": 3}') == CallOutcome("1.5")
    assert outcome(server, "half", '{"number": "x"}').error == "schema"
    assert outcome(server, "half", "").text.endswith("'number' is a required property")
    assert outcome(server, "half", '{"number": 0}').error == "exception"


@pytest.mark.skipif(SDK == 1, reason="the SDK 1.x has no public place to contain it; the worker dies")
def test_the_sdks_own_server_survives_a_tool_that_exits() -> None:
    server = SDKServer("sdk")

    @server.tool()
    def leave() -> None:
        """Leave."""
        sys.exit(3)

    assert outcome(server, "leave", "") == CallOutcome("Error: the tool raised SystemExit: 3", "exception")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
calls = st.tuples(
    st.sampled_from(["price", "nested", "other"]),
    st.text(max_size=20)
    | st.builds(json.dumps, json_values)
    | st.builds(
        json.dumps,
        st.fixed_dictionaries({}, optional={"item": json_values, "count": json_values, "order": json_values}),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(calls, min_size=1, max_size=8))
def test_no_arguments_break_a_session(written: list[tuple[str, str]]) -> None:
    async def test() -> None:
        async with ToolHost(shop()) as host, host.session() as session:
            for name, arguments in written:
                found = await session.call(name, arguments, timeout=SECONDS)
                found.text.encode()
                assert found.error in (None, "unknown_tool", "bad_json", "schema")
            assert await session.call("price", '{"item": "pen"}', timeout=SECONDS) == CallOutcome("3")

    within(test)


@pytest.mark.parametrize(
    "broken",
    [{"type": 7}, {"$ref": "http://127.0.0.1:1/schema.json"}, {"properties": {"item": {"pattern": "("}}}],
)
def test_a_schema_that_says_nothing_useful_is_left_to_the_server(broken: dict[str, Any]) -> None:
    async def test() -> None:
        async with ToolHost(shop()) as host, host.session() as session:
            parameters = host.tools[0]["function"]["parameters"]
            parameters.clear()
            parameters.update(broken)
            assert (await session.call("price", '{"item": "unicorn"}', timeout=SECONDS)).error == "exception"

    within(test)


def test_calls_of_one_turn_run_at_the_same_time() -> None:
    server = FastMCP("meeting")
    here, there = anyio.Event(), anyio.Event()

    @server.tool
    async def first() -> str:
        here.set()
        await there.wait()
        return "first"

    @server.tool
    async def second() -> str:
        there.set()
        await here.wait()
        return "second"

    async def test() -> None:
        found: dict[str, str] = {}

        async def call(session: ToolSession, name: str) -> None:
            found[name] = (await session.call(name, "", timeout=SECONDS)).text

        async with ToolHost(server) as host, host.session() as session, anyio.create_task_group() as group:
            group.start_soon(call, session, "first")
            group.start_soon(call, session, "second")
        assert found == {"first": "first", "second": "second"}

    within(test)


def test_a_timeout_leaves_the_session_usable() -> None:
    server = shop()
    started = anyio.Event()

    @server.tool
    async def wait() -> None:
        started.set()
        await anyio.sleep_forever()

    async def test() -> None:
        async with ToolHost(server) as host:
            async with host.session() as session:
                found = await session.call("wait", "", timeout=0.2)
                assert started.is_set()
                assert found == CallOutcome("Error: tool 'wait' did not answer within 0.2 seconds", "timeout")
                assert await session.call("price", '{"item": "pen"}', timeout=SECONDS) == CallOutcome("3")
            assert session.clean
        assert host.clean

    within(test)


def test_meta_goes_with_each_call() -> None:
    server = FastMCP("meta")

    @server.tool
    async def meta(ctx: Context) -> dict[str, Any]:
        found = ctx.request_context.meta
        given = found if isinstance(found, dict) else found.model_dump()
        return {key: given.get(key) for key in ("rollout_id", "row")}

    async def test() -> None:
        async with ToolHost(server) as host, host.session(meta={"rollout_id": "r1", "row": {"index": 3}}) as session:
            for _ in range(2):
                found = await session.call("meta", "", timeout=SECONDS)
                assert json.loads(found.text) == {"rollout_id": "r1", "row": {"index": 3}}

    within(test)


def test_rollouts_share_no_session_and_each_keeps_its_own() -> None:
    server = FastMCP("baskets")
    baskets: dict[str, list[str]] = {}

    @server.tool
    async def put(item: str, ctx: Context) -> str:
        basket = baskets.setdefault(ctx.session_id, [])
        basket.append(item)
        return ",".join(basket)

    async def test() -> None:
        async with ToolHost(server) as host, host.session() as one, host.session() as two:
            answers = [
                (await session.call("put", {"item": item}, timeout=SECONDS)).text
                for session, item in [(one, "a"), (two, "b"), (one, "c"), (two, "d")]
            ]
        assert answers == ["a", "b", "a,c", "b,d"]

    within(test)


def counted(server_type: Any, **options: Any) -> tuple[Any, list[str]]:
    log: list[str] = []

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[dict[str, Any]]:
        log.append("start")
        try:
            yield {}
        finally:
            log.append("stop")

    server = server_type("counted", lifespan=lifespan, **options)

    @server.tool()
    def ping() -> str:
        """Answer."""
        return "pong"

    return server, log


def test_a_lifespan_runs_once_for_all_rollouts() -> None:
    async def test() -> None:
        server, log = counted(FastMCP)
        async with ToolHost(server) as host:
            assert log == ["start"]
            for _ in range(2):
                async with host.session() as one, host.session() as two:
                    for session in (one, two):
                        assert (await session.call("ping", "", timeout=SECONDS)).text == "pong"
            assert log == ["start"]
        assert log == ["start", "stop"]

    within(test)


def test_a_session_opens_at_the_first_call() -> None:
    async def test() -> None:
        # The SDK's own servers run their lifespan for every session, so it counts them.
        server, log = counted(SDKServer)
        async with ToolHost(server) as host:
            before = log.count("start")
            async with host.session() as session:
                assert log.count("start") == before
                await session.call("ping", "", timeout=SECONDS)
                await session.call("ping", "", timeout=SECONDS)
                assert log.count("start") == before + 1
            assert log.count("stop") == 1
        assert log.count("stop") == log.count("start")

    within(test)


def test_a_failing_lifespan_names_the_users_line() -> None:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        raise ConnectionError("the database is down")
        yield

    async def test() -> None:
        server = FastMCP("failing", lifespan=lifespan)
        with pytest.raises(RepositoryError) as info:
            async with ToolHost(server, root=Path(__file__).parent):
                pass
        lines = str(info.value).splitlines()
        assert lines[0].startswith("test_host.py:")
        assert lines[0].endswith(": ConnectionError: the database is down")
        assert lines[1:] == [
            '    raise ConnectionError("the database is down")',
            "That is why the MCP server 'failing' did not start.",
        ]

    within(test)


def test_a_server_that_does_not_get_ready() -> None:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await anyio.sleep_forever()
        yield

    async def test() -> None:
        with pytest.raises(RepositoryError, match=r"the MCP server 'late' did not start within 0\.1 s"):
            async with ToolHost(FastMCP("late", lifespan=lifespan), start_timeout=0.1, grace=0.1):
                pass

    within(test)


def test_a_failing_shutdown_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[dict[str, Any]]:
        try:
            yield {}
        finally:
            raise RuntimeError("can't stop")

    async def test() -> None:
        async with ToolHost(FastMCP("stubborn", lifespan=lifespan)):
            pass

    within(test)
    assert "can't stop" in caplog.text


def test_a_blocked_thread_does_not_hold_up_the_caller() -> None:
    gate, entered = threading.Event(), threading.Event()
    server = shop()

    def block() -> None:
        entered.set()
        gate.wait()

    @server.tool
    async def thread() -> None:
        await anyio.to_thread.run_sync(block)

    # Before version 3 fastmcp runs sync tools on the event loop, where nothing else could run.
    name = "thread"
    if SDK == 2:
        server.tool(block)
        name = "block"

    async def test() -> None:
        async with ToolHost(server) as host:
            async with host.session(grace=0.2) as session:
                assert (await session.call(name, "", timeout=0.2)).error == "timeout"
                assert entered.is_set()
            assert not session.clean
            async with host.session() as other:
                assert (await other.call("price", {"item": "pen"}, timeout=SECONDS)).text == "3"
            assert other.clean
            gate.set()
        assert not host.clean

    try:
        within(test)
    finally:
        gate.set()


def asking() -> FastMCP:
    server = FastMCP("asking")

    @server.tool
    async def ask(ctx: Context) -> str:
        message = SamplingMessage(role="user", content=TextContent(type="text", text="Which one?"))
        reply = await ctx.session.create_message(
            [message], max_tokens=33, system_prompt="Be brief.", temperature=0.5, stop_sequences=["."]
        )
        return f"the model said {reply.content.text}"

    return server


def test_a_tool_asks_the_model() -> None:
    asked: list[Any] = []

    async def answer(messages: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
        asked.append((messages, params))
        return {"role": "assistant", "content": "the left one"}

    async def test() -> None:
        async with ToolHost(asking()) as host, host.session(sampling_handler=answer) as session:
            found = await session.call("ask", "", timeout=SECONDS)
        assert found == CallOutcome("the model said the left one")
        assert asked == [
            (
                [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which one?"}],
                {"temperature": 0.5, "max_tokens": 33, "stop": ["."]},
            )
        ]

    within(test)


@pytest.mark.skipif(not hasattr(Context, "sample"), reason="fastmcp 4 has no Context.sample")
def test_ctx_sample() -> None:
    server = FastMCP("sampling")

    @server.tool
    async def ask(ctx: Context) -> str:
        return (await ctx.sample("Which one?", max_tokens=5)).text

    async def answer(messages: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "text", "text": messages[-1]["content"] + str(params)}]}

    async def test() -> None:
        async with ToolHost(server) as host, host.session(sampling_handler=answer) as session:
            assert (await session.call("ask", "", timeout=SECONDS)).text == "Which one?{'max_tokens': 5}"

    within(test)


def test_a_model_that_fails_fails_the_tools_request_only() -> None:
    async def refuse(messages: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionError("no model")

    async def test() -> None:
        async with ToolHost(asking()) as host:
            for handler in (refuse, None):
                async with host.session(sampling_handler=handler) as session:
                    assert (await session.call("ask", "", timeout=SECONDS)).error == "exception"

    within(test)


@asynccontextmanager
async def serving(server: FastMCP, listener: socket.socket) -> AsyncIterator[None]:
    """Serve over HTTP on a socket that already listens, so that clients needn't wait."""
    config = uvicorn.Config(server.http_app(), log_level="error", timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: running.serve(sockets=[listener.dup()]))
        yield
        running.should_exit = True


@pytest.fixture
def listener() -> Any:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        yield bound


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"


def test_a_url(listener: socket.socket) -> None:
    async def test() -> None:
        async with serving(shop(), listener), ToolHost(url_of(listener)) as host:
            assert [tool["function"]["name"] for tool in host.tools] == ["price", "nested"]
            async with host.session() as session:
                assert await session.call("price", '{"item": "pen", "count": 2}', timeout=SECONDS) == CallOutcome("6")
                assert (await session.call("price", '{"item": "unicorn"}', timeout=SECONDS)).error == "exception"
                assert (await session.call("price", "", timeout=SECONDS)).error == "schema"

    within(test)


def test_a_server_that_forgot_the_session_gets_a_new_one(listener: socket.socket) -> None:
    async def test() -> None:
        host = ToolHost(url_of(listener))
        async with serving(shop(), listener):
            await host.__aenter__()
            session = host.session()
            assert (await session.call("price", {"item": "pen"}, timeout=SECONDS)).error is None
        async with serving(shop(), listener):
            # The SDK 1.x says nothing when a request can't be sent; there only the timeout brings it to light.
            lost = await session.call("price", {"item": "pen"}, timeout=SECONDS if SDK == 2 else 0.5)
            assert lost.error == "session"
            assert await session.call("price", {"item": "pen"}, timeout=SECONDS) == CallOutcome("3")
            await session.__aexit__(None, None, None)
            await host.__aexit__(None, None, None)

    within(test)


def test_a_redirect_to_another_origin_is_not_followed(listener: socket.socket) -> None:
    received = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readline())
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as other:
            location = f"http://localhost:{other.sockets[0].getsockname()[1]}/mcp"

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                answered = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
                writer.write(answered.encode())
                writer.close()

            server = {"url": url_of(listener), "headers": {"X-Api-Key": "sesame"}}
            async with await asyncio.start_server(answer, sock=listener.dup()):
                with pytest.raises(RepositoryError, match=f"Redirect to {location} not followed"):
                    async with ToolHost({"mcpServers": {"shop": server}}):
                        pass

    within(test)
    assert received == []


def test_a_refused_url_is_named_without_its_secrets() -> None:
    async def test() -> None:
        with pytest.raises(RepositoryError) as info:
            async with ToolHost("http://user:sesame@127.0.0.1:1/mcp?token=sesame"):
                pass
        text = str(info.value)
        assert text.startswith("the MCP server at http://127.0.0.1:1/mcp did not start: ")
        assert "sesame" not in text

    within(test)


def test_a_url_of_another_kind() -> None:
    with pytest.raises(RepositoryError, match="must begin with http"):
        ToolHost("ws://127.0.0.1:1/mcp")


STDIO = (
    stdio_tools.PREAMBLE
    + """
import os

def pid() -> int:
    return os.getpid()

def die() -> None:
    os._exit(1)

serve(pid, die)
"""
)


@pytest.fixture
def stdio(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    script = tmp_path / "server.py"
    script.write_text(STDIO, encoding="utf-8")

    def config(*names: str) -> dict[str, Any]:
        path = tmp_path / "mcp.json"
        entries = {name: {"command": sys.executable, "args": [str(script), name]} for name in names}
        path.write_text(json.dumps({"mcpServers": entries}), encoding="utf-8")
        return read_config(path)

    return config


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_stdio_servers_run_one_process_for_each_rollout(stdio: Callable[..., dict[str, Any]]) -> None:
    async def test() -> None:
        pids = []
        async with ToolHost(stdio("only")) as host:
            assert [tool["function"]["name"] for tool in host.tools] == ["pid", "die"]
            async with host.session() as one, host.session() as two:
                for session in (one, two, one):
                    pids.append(int((await session.call("pid", "", timeout=SECONDS)).text))
            assert pids[0] == pids[2] != pids[1]
            assert one.clean
            assert two.clean
            assert all(gone(process) for process in pids)

    within(test)


def test_a_stdio_server_that_dies_is_started_again(stdio: Callable[..., dict[str, Any]]) -> None:
    async def test() -> None:
        async with ToolHost(stdio("only")) as host, host.session() as session:
            before = (await session.call("pid", "", timeout=SECONDS)).text
            assert (await session.call("die", "", timeout=SECONDS)).error == "session"
            after = await session.call("pid", "", timeout=SECONDS)
            assert after.error is None
            assert after.text != before

    within(test)


def test_tools_of_two_servers_have_prefixes_and_only_the_servers_used_start(
    stdio: Callable[..., dict[str, Any]],
) -> None:
    async def test() -> None:
        async with ToolHost(stdio("a", "b")) as host, host.session() as session:
            assert [tool["function"]["name"] for tool in host.tools] == ["a_pid", "a_die", "b_pid", "b_die"]
            first = await session.call("a_pid", "", timeout=SECONDS)
            second = await session.call("b_pid", "", timeout=SECONDS)
            assert first.error is second.error is None
            assert first.text != second.text

    within(test)


def test_a_command_that_is_not_there() -> None:
    async def test() -> None:
        config = {"mcpServers": {"lost": {"command": "no-such-command-anywhere", "env": {"KEY": "sesame"}}}}
        with pytest.raises(RepositoryError, match=r"^the MCP server 'lost' did not start: .*no-such-command-anywhere"):
            async with ToolHost(config):
                pass

    within(test)


def test_a_configuration_that_is_not_right_shows_no_values() -> None:
    async def test() -> None:
        config = {"mcpServers": {"odd": {"command": "x", "args": "no list", "env": {"KEY": "sesame"}}}}
        with pytest.raises(RepositoryError, match=r"^the MCP server 'odd' is not configured right: ") as info:
            async with ToolHost(config):
                pass
        assert "sesame" not in str(info.value)
        assert "args" in str(info.value)

    within(test)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"mcpServers": {\n  "a": }}', ":2: is not JSON"),
        ("[]", "has no servers"),
        ('{"mcpServers": {}}', "has no servers"),
        ('{"servers": {"a": {"url": "http://127.0.0.1"}}}', "has no servers"),
        ('{"mcpServers": {"a": {}}}', "server 'a' needs either"),
        ('{"mcpServers": {"a": {"url": "http://x", "command": "y"}}}', "server 'a' needs either"),
        ('{"mcpServers": {"a": {"url": "ws://x"}}}', "server 'a': its url must begin with http"),
    ],
)
def test_configuration_files_that_are_no_use(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RepositoryError) as info:
        read_config(path)
    assert str(info.value).startswith(str(path))
    assert says in str(info.value)


def test_a_configuration_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="can't be read"):
        read_config(tmp_path / "mcp.json")
    (tmp_path / "latin.json").write_bytes(b'{"\xff": 1}')
    with pytest.raises(RepositoryError, match="is not JSON"):
        read_config(tmp_path / "latin.json")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("server = object()\n", ["exit code 0", "does not run its server"]),
        ("import sys\n\nsys.exit('no licence')\nmcp.run()\n", ["exit code 1", "no licence"]),
    ],
)
def test_a_stdio_server_that_ends_at_once_is_described(tmp_path: Path, source: str, said: list[str]) -> None:
    (tmp_path / "main.py").write_text(source, encoding="utf-8")
    server = {"command": sys.executable, "args": [str(tmp_path / "main.py")]}

    async def test() -> None:
        with pytest.raises(RepositoryError) as raised:
            async with ToolHost({"mcpServers": {"idle": server}}):
                pass
        assert str(raised.value).startswith("the MCP server 'idle' did not start")
        for part in said:
            assert part in str(raised.value)

    within(test)
