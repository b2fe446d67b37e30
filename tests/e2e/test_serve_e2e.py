"""`osmosis serve`: a real server, real workers, and a trainer on loopback that speaks the protocol."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from commands import Osmosis
from osmosis_ai.rollout.core.schemas import InitResponse, RolloutRequest, RolloutResponse
from osmosis_ai.rollout.testing import (
    Gate,
    Reply,
    Request,
    TrainerDouble,
    by_turn,
    text,
    tool_call,
    with_faults,
)
from repos import ADDING, copy_repo, seen, write_repo
from running import Running, running
from waiting import PATIENCE
from watching import write

KEY = "a-key-of-the-server"
TWO_TURNS = by_turn(tool_call("add", a=1, b=2), text("3"))
KILLED = "the server was killed before the rollout had ended"
RETRIES = {"OSMOSIS_ROLLOUT_CLIENT_RETRY_BASE_DELAY": "0.01"}


class Served:
    """A running server and its address."""

    def __init__(self, command: Running, url: str, key: str | None) -> None:
        self.command = command
        self.url = url
        self.key = key

    def init(self, request: RolloutRequest, *, key: str | None = None) -> tuple[int, Any]:
        """Request a rollout; return status and body."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.key or ''}"}
        body = request.model_dump_json().encode()
        return self.ask("/v1/rollout/init", body=body, headers=headers)

    def ask(self, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers or {})) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def start(self, trainer: TrainerDouble, prompts: list[str], **fields: Any) -> dict[str, RolloutRequest]:
        """Request a rollout for each prompt."""
        requests = {prompt: trainer.request(prompt, **fields) for prompt in prompts}

        async def send() -> list[InitResponse]:
            asking = (trainer.start_rollout(self.url, request, api_key=self.key) for request in requests.values())
            return await asyncio.gather(*asking)

        asyncio.run(send())
        return requests

    def results(self, trainer: TrainerDouble, requests: dict[str, RolloutRequest]) -> dict[str, RolloutResponse]:
        return {
            prompt: trainer.wait_for_completion(request.rollout_id, PATIENCE * 3)
            for prompt, request in requests.items()
        }


@contextmanager
def serving(root: Path, *options: str, key: str | None = KEY, descriptors: int = 0, **environ: str) -> Iterator[Served]:
    """Run `osmosis serve` on a free port until the end of the block."""
    env = {**RETRIES, **environ, **({"OSMOSIS_ROLLOUT_API_KEY": key} if key else {})}
    command_line = ("serve", "-p", "0", "--skip-register", *options)
    with running(*command_line, cwd=root, env=env, descriptors=descriptors) as command:
        command.until(lambda: "serving at http" in command.said())
        found = re.search(r"serving at (http://\S+);", command.said())
        assert found is not None
        yield Served(command, found[1], key)


@contextmanager
def trainer(script: Any = TWO_TURNS, **options: Any) -> Iterator[TrainerDouble]:
    with TrainerDouble(script, **options).run_in_thread() as double:
        yield double


def test_a_loop_is_served(tmp_path: Path) -> None:
    root = copy_repo("agent_class", tmp_path, [])
    with trainer(api_key="the-trainers-key") as double, serving(root, "-m", "calculator.agents:CalculatorAgent") as it:
        request = double.request("What is 1 + 2?", metadata={"ground_truth": "3", "level": 2})
        status, answer = it.init(request)
        assert status == 202
        assert answer["rollout_id"] == request.rollout_id
        function = answer["tools"][0]["function"]
        assert function["description"] == "add, level 2"
        assert function["parameters"]["$defs"]["number"]["anyOf"][1] == {"type": "string", "pattern": "^[0-9]+$"}
        done = double.wait_for_completion(request.rollout_id, PATIENCE)
        assert (done.status, done.finish_reason, done.reward) == ("COMPLETED", "answered", 1.0)
        assert [message["role"] for message in done.final_messages] == ["user", "assistant", "tool", "assistant"]
        assert done.metrics is not None
        assert done.metrics.num_llm_calls == 2
        assert {chat.body["temperature"] for chat in double.chats} == {0.5}
        # Asked again, it starts nothing.
        assert it.init(request) == (202, answer)
        assert len(double.completions) == 1

        assert it.ask("/health")[1]["agent_loop"] == "calculator-agent"
        assert it.ask("/platform/health")[0] == 401
        assert it.ask("/platform/health", headers={"Authorization": f"Bearer {KEY}"})[0] == 200
        status, _ = it.init(double.request("What is 1 + 2?"), key="wrong")
        assert status == 401
        it.command.interrupt()
        finished = it.command.wait()
    assert finished.code == 130
    assert finished.stdout == ""
    assert KEY not in finished.stderr
    assert "the-trainers-key" not in finished.stderr
    assert "Traceback" not in finished.stderr


NESTED = ADDING.replace(
    "@mcp.tool\ndef add",
    '''@mcp.tool
def order(items: list[dict[str, int]], where: dict[str, list[str]] | None = None) -> str:
    """Order things."""
    return f"{len(items)} ordered"


@mcp.tool
def add''',
)


@pytest.mark.in_process
def test_a_repositorys_tools_are_served_without_code(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=NESTED, rewards=None)
    script = by_turn(tool_call("order", items=[{"bread": 2}]), tool_call("add", a="x"), text("done"))
    with trainer(script) as double, serving(root, "--mcp", "./mcp") as it:
        request = double.request("Order bread.")
        status, answer = it.init(request)
        assert status == 202
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in answer["tools"]}
        assert tools["order"]["properties"]["items"]["items"]["additionalProperties"] == {"type": "integer"}
        done = double.wait_for_completion(request.rollout_id, PATIENCE)
        assert (done.status, done.finish_reason) == ("COMPLETED", "stop")
        results = [message["content"] for message in done.final_messages if message["role"] == "tool"]
        assert results[0] == "1 ordered"
        assert results[1].startswith("Error: ")
        assert done.metrics is not None
        assert done.metrics.num_tool_calls == 2

        short = double.request("Order bread.", max_turns=1)
        it.init(short)
        assert double.wait_for_completion(short.rollout_id, PATIENCE).finish_reason == "max_turns"
        # The built-in loop goes by the name of the repository's folder.
        assert it.ask("/health")[1]["agent_loop"] == "repo"
        assert "agent repo, tools: order, add" in it.command.said()
        stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
        it.command.until(lambda: re.search(rf"^{stamp} INFO ", it.command.said(), re.MULTILINE))


WRONGS = {
    "throw": "ValueError: this loop is broken",
    "report": "it did not work out",
    "edit": "messages are append-only: message 0",
    "wrong": "run returned a dict",
    "unsendable": "can't be used",
    "binary": "can't be used: message 2 holds bytes",
    "leave": "SystemExit: 3",
    "hang": "the rollout did not end within 6 s",
    "cling": "the rollout did not end within 6 s",
    "exit": "worker: exited with code 7",
    "block": "timeout: user code held the event loop for",
}


@pytest.mark.in_process
def test_what_a_loop_does_wrong_is_an_error_completion_of_its_own_rollout(tmp_path: Path) -> None:
    root = copy_repo("agent_misbehaving", tmp_path, [])
    source = (root / "agents.py").read_text(encoding="utf-8")
    (root / "agents.py").write_text(source.replace("messages[1]", "messages[0]"), encoding="utf-8")
    options = ("-m", "agents:agent", "--timeout", "6", "--workers", "2")
    with trainer(by_turn(text("ok"))) as double, serving(root, *options) as it:
        prompts = [*WRONGS, *(f"fine {number}" for number in range(10))]
        done = it.results(double, it.start(double, prompts))
        for word, message in WRONGS.items():
            assert done[word].status == "ERROR", word
            assert message in str(done[word].error_message), (word, done[word])
        for prompt in prompts[len(WRONGS) :]:
            assert done[prompt].status == "COMPLETED", done[prompt]
        # One result for each, whatever happened to its worker.
        assert len(double.completions) == len(prompts)
        assert it.ask("/health")[1]["active_rollouts"] == 0

        # A loop that can't say which tools it has is refused at once; one that dies over it takes nothing with it.
        for word, said in {"no-tools": "these tools can't be found", "exit-tools": "exited with code 5"}.items():
            status, answer = it.init(double.request(word))
            assert status == 500
            assert said in answer["detail"], answer
        assert it.results(double, it.start(double, ["fine again"]))["fine again"].status == "COMPLETED"


@pytest.mark.in_process
def test_a_rollout_goes_on_when_another_one_takes_its_worker_down(tmp_path: Path) -> None:
    """It repeats its course in another worker without asking the trainer again for earlier replies."""
    root = copy_repo("agent_misbehaving", tmp_path, [])
    second_turn = Gate()

    def answer(request: Request) -> Reply:
        held = request.messages[0]["content"] == "twice" and request.turn == 1
        return text("ok").after(second_turn) if held else text("ok")

    with trainer(answer) as double, serving(root, "-m", "agents:agent", "--workers", "1") as it:
        going = it.start(double, ["twice"])
        assert second_turn.reached.wait(PATIENCE)
        crashed = it.results(double, it.start(double, ["exit"]))
        assert crashed["exit"].status == "ERROR"
        second_turn.open()
        done = it.results(double, going)["twice"]
        assert done.status == "COMPLETED", done
        assert [message["content"] for message in done.final_messages] == ["twice", "ok", "more", "ok", "more", "ok"]
        asked = [len(chat.messages) for chat in double.chats if chat.messages[0]["content"] == "twice"]
        # The first request was answered before, so only the one that was open is sent a second time.
        assert asked == [1, 3, 3, 5]
        assert [name for name, _ in seen(root)].count("twice") == 2


@pytest.mark.in_process
def test_nothing_is_lost_or_doubled_when_the_trainer_fails_now_and_then(tmp_path: Path) -> None:
    root = copy_repo("agent_instance", tmp_path, [])
    count = 100
    with (
        trainer(
            with_faults(TWO_TURNS, 0.05, seed=3), completed=with_faults(lambda request: accepted(), 0.05)
        ) as double,
        serving(root, "-m", "server:agent_loop", "--log-level", "warning") as it,
    ):
        requests = it.start(double, [f"What is {number} + 2?" for number in range(count)])
        done = it.results(double, requests)
        assert {result.status for result in done.values()} == {"COMPLETED"}
        assert all(len(result.final_messages) == 4 for result in done.values())
        assert sorted(result.rollout_id for result in double.completions) == sorted(
            request.rollout_id for request in requests.values()
        )


def test_more_connections_than_descriptors_keep_nobody_out(tmp_path: Path) -> None:
    root = copy_repo("agent_instance", tmp_path, [])
    with trainer() as double, serving(root, "-m", "server:agent_loop", descriptors=256) as it, ExitStack() as idle:
        address = urlsplit(it.url)
        for number in range(300):
            connection = idle.enter_context(socket.create_connection((address.hostname, address.port)))
            if number % 2:
                connection.sendall(b"POST /v1/rollout/init HTTP/1.1\r\nHost: 127")
        requests = it.start(double, [f"What is {number} + 2?" for number in range(5)])
        done = it.results(double, requests)
        assert {result.status for result in done.values()} == {"COMPLETED"}
        it.command.process.send_signal(signal.SIGTERM)
        finished = it.command.wait()
    assert finished.code == 0
    assert "Traceback" not in finished.stderr


def accepted() -> Reply:
    return Reply(b"{}")


@pytest.mark.in_process
def test_code_is_loaded_anew_when_it_changes(tmp_path: Path) -> None:
    root = copy_repo("agent_instance", tmp_path, [])
    gate = Gate()

    def answer(request: Request) -> Reply:
        reply = text("done") if request.turn else tool_call("add", a=1, b=2)
        return reply.after(gate) if request.messages[0]["content"] == "held" and not request.turn else reply

    with trainer(answer) as double, serving(root, "-m", "server:agent_loop", "--reload") as it:
        old = it.start(double, ["held"])
        assert gate.reached.wait(PATIENCE)
        source = (root / "server.py").read_text(encoding="utf-8")
        write(root, {"server.py": source.replace('arguments["a"] + arguments["b"]', '"new"')})
        it.command.until(lambda: "reloaded" in it.command.said())
        fresh = it.results(double, it.start(double, ["fresh"]))["fresh"]
        assert fresh.final_messages[2]["content"] == "new"

        write(root, {"server.py": "def broken(:\n"})
        it.command.until(lambda: "still serving the last good code: server.py:1" in it.command.said())
        still = it.results(double, it.start(double, ["still"]))["still"]
        assert still.final_messages[2]["content"] == "new"

        # What ran when the code changed ends with the code it began with.
        gate.open()
        assert it.results(double, old)["held"].final_messages[2]["content"] == "3"


def test_a_server_that_is_stopped_reports_what_still_runs(tmp_path: Path) -> None:
    root = copy_repo("agent_misbehaving", tmp_path, [])
    grace = {"OSMOSIS_ROLLOUT_SERVER_SHUTDOWN_GRACE_SECONDS": "0.2"}
    with trainer(by_turn(text("ok"))) as double, serving(root, "-m", "agents:agent", **grace) as it:
        requests = it.start(double, ["hang"])
        it.command.until(lambda: seen(root))
        it.command.process.send_signal(signal.SIGTERM)
        done = it.results(double, requests)["hang"]
        assert done.status == "ERROR"
        assert "stopped" in str(done.error_message)
        finished = it.command.wait()
    assert finished.code == 0
    assert "Traceback" not in finished.stderr


def test_what_a_killed_server_had_accepted_is_reported_or_kept_by_the_next_one(tmp_path: Path) -> None:
    root = copy_repo("agent_misbehaving", tmp_path, [])
    undelivered = root / ".osmosis" / "undelivered"
    with trainer(by_turn(text("ok"))) as double:
        with serving(root, "-m", "agents:agent") as it:
            open_one = it.start(double, ["hang"])["hang"]
            keyed = it.start(double, ["hang"], api_key="the-trainers-key")["hang"]
            it.command.until(lambda: len(seen(root)) == 2)
            it.command.process.kill()
            it.command.process.wait()
        (noted,) = (file.read_text(encoding="utf-8") for file in undelivered.glob("open/*"))
        assert open_one.rollout_id in noted
        assert keyed.rollout_id in noted
        assert "the-trainers-key" not in noted
        with serving(root, "-m", "agents:agent") as it:
            result = double.wait_for_completion(open_one.rollout_id)
            assert (result.status, result.error_message) == ("ERROR", KILLED)
            it.command.until(lambda: list(undelivered.glob("*.json")))
            it.command.process.send_signal(signal.SIGTERM)
            assert it.command.wait().code == 0
    (kept,) = (json.loads(file.read_text(encoding="utf-8")) for file in undelivered.glob("*.json"))
    assert kept["response"]["rollout_id"] == keyed.rollout_id
    assert "the trainer's key" in kept["reason"]
    assert not (undelivered / "open").exists()


@pytest.mark.in_process
def test_a_key_is_made_and_shown_once(tmp_path: Path) -> None:
    root = copy_repo("agent_instance", tmp_path, [])
    with trainer() as double, serving(root, "-m", "server:agent_loop", key=None) as it:
        found = re.search(r"API key .*: (\S+)\n", it.command.said())
        assert found is not None
        assert it.init(double.request("What is 1 + 2?"), key="another")[0] == 401
        assert it.init(double.request("What is 1 + 2?"), key=found[1])[0] == 202
        double.wait_for_completions(1, PATIENCE)
        it.command.interrupt()
        assert it.command.wait().stderr.count(found[1]) == 1


@pytest.mark.in_process
def test_registration_is_not_offered_yet_and_says_so(tmp_path: Path) -> None:
    root = copy_repo("agent_instance", tmp_path, [])
    with running("serve", "-m", "server:agent_loop", "-p", "0", "--api-key", KEY, cwd=root) as command:
        command.until(lambda: "serving at http" in command.said())
        said = command.said()
    assert said.count("platform registration isn't available yet") == 1
    assert KEY not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--local", "-H", "0.0.0.0"), "listens on loopback only"),
        (("--log-level", "loud"), "--log-level loud"),
        (("--log", "server.py"), "--log server.py: can't create the folder: File exists; name another one"),
        (("--local", "--api-key", KEY), "--local serves without a key, but --api-key sets one: remove one of them"),
        (("--mcp", "./mcp"), "-m and --mcp each name an agent"),
        (("-p", "{taken}"), "can't listen on port"),
    ],
)
def test_what_cant_be_served_is_said(tmp_path: Path, osmosis: Osmosis, options: tuple[str, ...], said: str) -> None:
    root = copy_repo("agent_instance", tmp_path, [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [option.replace("{taken}", port) for option in options]
        done = osmosis("serve", "-m", "server:agent_loop", *given, cwd=root)
    assert done.code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.in_process
def test_a_loop_that_isnt_valid_is_served_only_when_asked_for(tmp_path: Path) -> None:
    root = copy_repo("agent_instance", tmp_path, [])
    (root / "unfit.py").write_text(
        "from server import CalculatorLoop\n\n\nclass Unfit(CalculatorLoop):\n    name = ' '\n", encoding="utf-8"
    )
    with running("serve", "-m", "unfit:Unfit", "--local", "-p", "0", cwd=root) as refused:
        done = refused.wait()
    assert done.code == 2
    assert "EMPTY_NAME" in done.stderr
    with trainer() as double, serving(root, "-m", "unfit:Unfit", "--no-validate", "--local", key=None) as it:
        assert it.ask("/platform/health")[0] == 404
        assert it.results(double, it.start(double, ["What is 1 + 2?"]))["What is 1 + 2?"].status == "COMPLETED"


@pytest.mark.in_process
def test_loops_write_their_events_where_they_are_told_to(tmp_path: Path) -> None:
    root = copy_repo("agent_class", tmp_path, [])
    options = ("-m", "calculator.agents:CalculatorAgent", "--log", "events")
    with trainer() as double, serving(root, *options) as it:
        request = double.request("What is 1 + 2?", metadata={"ground_truth": "3"}, rollout_id="one")
        it.init(request)
        double.wait_for_completion("one", PATIENCE)
    (file,) = (root / "events").rglob("*.jsonl")
    assert json.loads(file.read_text(encoding="utf-8"))["right"] is True
