from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from osmosis_ai.testing import (
    Gate,
    ScriptedEndpoint,
    broken_json,
    by_turn,
    drop,
    hang,
    raw_json,
    status,
    text,
    tool_call,
    tool_calls,
)

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hello"}


async def ask(
    endpoint: ScriptedEndpoint, *messages: dict[str, Any], key: str | None = None, **body: Any
) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    async with aiohttp.ClientSession(headers=headers) as session:
        payload = io.BytesIO(json.dumps({"model": "m", "messages": list(messages) or [USER], **body}).encode())
        async with session.post(f"{endpoint.url}/chat/completions", data=payload) as response:
            return response.status, await response.json()


def ask_blocking(endpoint: ScriptedEndpoint) -> Any:
    request = urllib.request.Request(
        f"{endpoint.url}/chat/completions", json.dumps({"model": "m", "messages": [USER]}).encode()
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


async def test_replies_are_consumed_in_order_and_requests_recorded() -> None:
    async with ScriptedEndpoint([text("one", prompt_tokens=7, completion_tokens=2), text("two")]) as endpoint:
        _, first = await ask(endpoint, temperature=0.5)
        _, second = await ask(endpoint)
        code, third = await ask(endpoint)
    assert first["choices"][0]["message"] == {"role": "assistant", "content": "one"}
    assert first["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert second["choices"][0]["message"]["content"] == "two"
    assert code == 400
    assert "no reply left" in third["error"]["message"]
    assert [request.body.get("temperature") for request in endpoint.requests] == [0.5, None, None]
    assert endpoint.requests[0].headers["content-type"] == "application/json"
    assert endpoint.requests[0].time <= endpoint.requests[1].time


async def test_tool_calls_carry_arguments_as_text_and_ids_of_their_own() -> None:
    script = [tool_calls([("add", {"a": 1}), ("add", {"a": 1}), ("echo", "{broken")])]
    async with ScriptedEndpoint(script) as endpoint:
        _, reply = await ask(endpoint)
    calls = reply["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"a":1}', '{"a":1}', "{broken"]
    assert len({call["id"] for call in calls}) == 3
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert tool_call("add", a=1) == tool_call("add", a=1)


async def test_by_turn_counts_the_replies_a_conversation_holds() -> None:
    async with ScriptedEndpoint(by_turn(tool_call("add"), text("done"))) as endpoint:
        _, first = await ask(endpoint)
        _, later = await ask(endpoint, USER, {"role": "assistant", "content": "x"})
        _, last = await ask(endpoint, USER, *[{"role": "assistant", "content": "x"}] * 5)
    assert "tool_calls" in first["choices"][0]["message"]
    assert later["choices"][0]["message"]["content"] == "done"
    assert last["choices"][0]["message"]["content"] == "done"


async def test_a_function_decides_by_messages_and_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    async with ScriptedEndpoint(
        lambda request: text(f"{request.messages[-1]['content']} {len(request.tools)}")
    ) as endpoint:
        _, reply = await ask(endpoint, tools=tools)
    assert reply["choices"][0]["message"]["content"] == "hello 1"


async def test_probes_leave_the_script_alone_unless_it_answers_them() -> None:
    probe = {"role": "user", "content": "ping"}
    async with ScriptedEndpoint([text("one")]) as endpoint:
        await ask(endpoint, probe)
        _, reply = await ask(endpoint)
        assert reply["choices"][0]["message"]["content"] == "one"
        assert len(endpoint.requests) == 2
        assert [request.messages for request in endpoint.chats] == [[USER]]
    async with ScriptedEndpoint([text("one")], probe=None) as endpoint:
        _, reply = await ask(endpoint, probe)
        assert reply["choices"][0]["message"]["content"] == "one"


async def test_keys_models_and_paths_are_checked() -> None:
    async with ScriptedEndpoint([text("in")], api_key="right", models=["m"]) as endpoint:
        code, refused = await ask(endpoint, key="wrong")
        assert (code, refused["error"]["code"]) == (401, "invalid_api_key")
        assert (await ask(endpoint))[0] == 401
        assert (await ask(endpoint, key="right"))[0] == 200
        code, unknown = await ask(endpoint, key="right", model="other")
        assert code == 404
        assert "`other` does not exist" in unknown["error"]["message"]
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer right"}) as session:
            async with session.get(f"{endpoint.url}/models") as response:
                assert [item["id"] for item in (await response.json())["data"]] == ["m"]
            async with session.post(f"{endpoint.url}/nowhere") as response:
                assert response.status == 404


async def test_errors_have_their_status_headers_and_body() -> None:
    script = [status(429, headers={"Retry-After": "3"}), status(500, body="<html>oops</html>"), raw_json({"any": [1]})]
    async with ScriptedEndpoint(script) as endpoint, aiohttp.ClientSession() as session:
        address = f"{endpoint.url}/chat/completions"
        async with session.post(address, data=b"{}") as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "3")
        async with session.post(address, data=b"{}") as response:
            assert (response.status, response.content_type) == (500, "text/html")
        async with session.post(address, data=b"{}") as response:
            assert await response.json() == {"any": [1]}


async def test_faults_of_the_connection_and_the_body() -> None:
    async with ScriptedEndpoint([drop(), broken_json()]) as endpoint:
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(endpoint)
        with pytest.raises(json.JSONDecodeError):
            await ask(endpoint)


async def test_closing_ends_requests_that_hang_or_wait_at_a_gate() -> None:
    gate = Gate()

    async def ended(endpoint: ScriptedEndpoint) -> None:
        with pytest.raises(aiohttp.ClientError):
            await ask(endpoint)

    with anyio.fail_after(10):
        async with (
            anyio.create_task_group() as tasks,
            ScriptedEndpoint([hang(), text("late").after(1e6), hang()]) as endpoint,
        ):
            for _ in range(3):
                tasks.start_soon(ended, endpoint)
            await asyncio.to_thread(endpoint.wait_for_requests, 3)
    gate.open()


async def test_a_gate_holds_replies_until_the_test_opens_it() -> None:
    gate = Gate()
    got: list[Any] = []

    async def asking() -> None:
        got.append(await ask(endpoint))

    async with (
        ScriptedEndpoint([text("held").after(gate), text("free")]) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(asking)
        await asyncio.to_thread(gate.reached.wait, 10)
        assert (await ask(endpoint))[1]["choices"][0]["message"]["content"] == "free"
        assert got == []
        gate.open()
    assert got[0][1]["choices"][0]["message"]["content"] == "held"


def test_a_thread_serves_tests_that_are_not_async() -> None:
    gate = Gate()
    with ScriptedEndpoint([text("one"), text("two").after(gate)]).run_in_thread() as endpoint:
        assert ask_blocking(endpoint)["choices"][0]["message"]["content"] == "one"
        gate.open()
        assert ask_blocking(endpoint)["choices"][0]["message"]["content"] == "two"
        endpoint.wait_for_requests(2)
        with pytest.raises(TimeoutError, match="2 of 3"):
            endpoint.wait_for_requests(3, timeout=0)
        url = endpoint.url
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models")
    with pytest.raises(RuntimeError, match="not running"):
        _ = endpoint.port


async def test_conversations_of_several_megabytes_arrive() -> None:
    async with ScriptedEndpoint([text("read")]) as endpoint:
        code, _ = await ask(endpoint, {"role": "user", "content": "x" * 6_000_000})
    assert code == 200
    assert len(endpoint.requests[0].messages[0]["content"]) == 6_000_000


def start_command(tmp_path: Path, script: Any) -> tuple[subprocess.Popen[str], Path]:
    file = tmp_path / "script.json"
    file.write_text(json.dumps(script), encoding="utf-8")
    port_file = tmp_path / "port"
    command = [
        sys.executable,
        "-m",
        "osmosis_ai.testing.endpoint",
        "--script",
        str(file),
        "--port-file",
        str(port_file),
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True), port_file


async def test_the_command_serves_a_script_file(tmp_path: Path) -> None:
    turns = [{"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}, {"text": "3", "completion_tokens": 4}]
    process, port_file = start_command(tmp_path, {"turns": turns, "api_key": "k"})
    try:
        with anyio.fail_after(30):
            while not port_file.exists():
                assert process.poll() is None
                await anyio.sleep(0.01)
        url = f"http://127.0.0.1:{port_file.read_text(encoding='utf-8').strip()}/v1/chat/completions"
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as session:
            async with session.post(url, json={"messages": [USER]}) as response:
                reply = await response.json()
            assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
            async with session.post(url, json={"messages": [USER, {"role": "assistant"}]}) as response:
                reply = await response.json()
            assert reply["choices"][0]["message"]["content"] == "3"
            assert reply["usage"]["completion_tokens"] == 4
    finally:
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert stderr == ""


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({}, "either `replies` or `turns`"),
        ({"replies": [{"txt": "x"}]}, "this one has ['txt']"),
        ([], "Expected `object`"),
    ],
)
def test_the_command_explains_a_script_it_cannot_use(tmp_path: Path, script: Any, message: str) -> None:
    process, _ = start_command(tmp_path, script)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in stderr
    assert "Traceback" not in stderr
