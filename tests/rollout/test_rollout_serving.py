"""An agent loop served as users do it: by `serve_agent_loop`, and by an ASGI server's own command."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loops import PATIENCE, Adding, call, init, loop_that

from osmosis_ai.errors import AgentLoopError, UsageError
from osmosis_ai.rollout import RolloutStatus, serve_agent_loop
from osmosis_ai.rollout.server.serve import choose_api_key, open_socket
from osmosis_ai.rollout.testing import TrainerDouble, by_turn, hang, serve_app, text
from osmosis_ai.urls import is_loopback

SERVER = """
from osmosis_ai.rollout import RolloutAgentLoop, create_app, serve_agent_loop


class EchoLoop(RolloutAgentLoop):
    name = "echo"

    def get_tools(self, request):
        return []

    async def run(self, ctx):
        messages = list(ctx.request.messages)
        result = await ctx.chat(messages, **ctx.request.completion_params)
        messages.append(result.message)
        return ctx.complete(messages)


agent_loop = EchoLoop()
app = create_app(agent_loop)

if __name__ == "__main__":
    serve_agent_loop(agent_loop, port=0, shutdown_grace_seconds=0.1)
"""


@contextmanager
def started(folder: Path, *command: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server command, the address it prints, and its output before that."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OSMOSIS_")}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env={**kept, **env}, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"(?:running on|loop at) (http://\S+)", line):
                yield process, found[1], lines
                break
        else:
            raise AssertionError(f"the server did not start: {''.join(lines)}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    return tmp_path


def test_a_script_serves_its_loop_prints_its_key_once_and_stops_gracefully(folder: Path) -> None:
    trainer = TrainerDouble(lambda request: hang() if "wait" in str(request.messages) else text("hi"))
    with trainer.run_in_thread(), started(folder, "server.py") as (process, url, lines):
        assert process.stderr is not None
        lines.append(process.stderr.readline())
        (key,) = re.findall(r"^API key .*: (\S{40,})$", lines[-1])
        assert url.startswith("http://127.0.0.1:")
        assert init(url, trainer.request("hello"), key=None).status == 401
        assert init(url, trainer.request("hello", rollout_id="a"), key=key).status == 202
        assert trainer.wait_for_completion("a").status is RolloutStatus.COMPLETED
        assert init(url, trainer.request("wait", rollout_id="b"), key=key).status == 202
        trainer.wait_for_requests(2)
        process.send_signal(signal.SIGTERM)
        assert trainer.wait_for_completion("b").error_message == "the server stopped before the rollout had ended"
        rest = process.stderr.read()
        process.wait(PATIENCE)
    assert "the agent loop 'echo' runs in this server's own process" in "".join(lines) + rest
    assert key not in rest
    assert "Traceback" not in rest


def test_another_asgi_server_serves_the_application_with_a_key_of_its_own(folder: Path) -> None:
    trainer = TrainerDouble(by_turn(text("hi")))
    command = ("-m", "uvicorn", "server:app", "--port", "0")
    with trainer.run_in_thread(), started(folder, *command, OSMOSIS_ROLLOUT_API_KEY="mine") as (_, url, _lines):
        assert call(url, "/platform/health", key="mine").json["agent_loop"] == "echo"
        assert init(url, trainer.request("hello"), key="mine").status == 202
        trainer.wait_for_completions(1)


def test_an_application_can_be_part_of_a_larger_one(tmp_path: Path) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount, Route

    from osmosis_ai.rollout import create_app

    inner = create_app(Adding(), undelivered_dir=tmp_path)
    # A mounted application's lifespan is the larger one's to run.
    outer = Starlette(
        routes=[Route("/health", lambda request: None, methods=["POST"]), Mount("/rollouts", inner)],
        lifespan=lambda app: inner.router.lifespan_context(inner),
    )
    with TrainerDouble(by_turn(text("hi"))).run_in_thread() as trainer, serve_app(outer) as url:
        assert init(f"{url}", trainer.request("hello"), key=None).status == 404
        answer = call(url, "/rollouts/v1/rollout/init", trainer.request("hello").model_dump(), key=None)
        assert answer.status == 202
        trainer.wait_for_completions(1)


def test_without_its_lifespan_an_application_says_that_it_takes_nothing() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from osmosis_ai.rollout import create_app

    outer = Starlette(routes=[Mount("/rollouts", create_app(Adding()))])
    with TrainerDouble().run_in_thread() as trainer, serve_app(outer) as url:
        answer = call(url, "/rollouts/v1/rollout/init", trainer.request("hello").model_dump(), key=None)
    assert answer.status == 503
    assert "not started" in answer.json["detail"]


def test_a_loop_that_isnt_valid_isnt_served() -> None:
    with pytest.raises(AgentLoopError, match="MISSING_FUNCTION"):
        serve_agent_loop(loop_that(lambda ctx: None, [{"type": "function"}]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_a_key_only_loopback_is_served(host: str) -> None:
    with pytest.raises(UsageError, match=f"not on {host}"):
        serve_agent_loop(Adding(), host, 0, local_debug=True)
    assert not is_loopback(host)


def test_the_key_is_the_given_one_then_the_environments_then_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSMOSIS_ROLLOUT_API_KEY", raising=False)
    first, is_new = choose_api_key(None, local=False, host="0.0.0.0")
    second, _ = choose_api_key(None, local=False, host="0.0.0.0")
    assert is_new
    assert first is not None
    assert len(first) >= 40
    assert first != second
    monkeypatch.setenv("OSMOSIS_ROLLOUT_API_KEY", "from-the-environment")
    assert choose_api_key(None, local=False, host="0.0.0.0") == ("from-the-environment", False)
    assert choose_api_key("mine", local=False, host="0.0.0.0") == ("mine", False)
    assert choose_api_key("mine\n", local=False, host="0.0.0.0") == ("mine", False)
    monkeypatch.setenv("OSMOSIS_ROLLOUT_API_KEY", "from-a-file\n")
    assert choose_api_key(None, local=False, host="0.0.0.0") == ("from-a-file", False)
    monkeypatch.setenv("OSMOSIS_ROLLOUT_API_KEY", " \n")
    assert choose_api_key(None, local=False, host="0.0.0.0")[1]
    for host in ("127.0.0.1", "localhost", "::1"):
        assert choose_api_key("mine", local=True, host=host) == (None, False)
    with pytest.raises(UsageError, match="the API key is empty"):
        choose_api_key(" ", local=False, host="127.0.0.1")


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"can't listen on port {port} of 127.0.0.1: .*; choose another"):
            serve_agent_loop(Adding(), port=port, api_key="k")


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no-such-host.invalid", 0), ("192.0.2.1", 0)])
def test_an_address_that_cant_be_listened_at_is_an_error(host: str, port: int) -> None:
    with pytest.raises(UsageError, match=f"can't listen on port {port} of {host}"):
        open_socket(host, port)


def test_a_free_port_is_found() -> None:
    with open_socket("localhost", 0) as listener:
        assert listener.getsockname()[1] > 0
        # Otherwise asyncio leaves TCP_NODELAY off, and every answer waits for a delayed acknowledgement.
        assert listener.proto == socket.IPPROTO_TCP
        socket.create_connection(listener.getsockname()[:2], timeout=PATIENCE).close()
