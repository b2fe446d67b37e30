"""Stopping a run, gently or not: finished work is kept, and no process is left behind."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
from pathlib import Path
from time import monotonic

import pytest

from commands import COMMAND, clean_environment, command_line
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, text, tool_call
from repos import copy_repo, seen, write_repo
from running import running
from waiting import PATIENCE

GRACE_SECONDS = 10


def call_then_answer(request: Request) -> Reply:
    prompt = request.messages[1]["content"]
    return tool_call(prompt) if request.turn == 0 and prompt != "answer" else text("done")


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.in_process), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_lets_what_runs_finish_and_resume_does_the_rest(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    rows = [{"user_prompt": str(number), "fault": None} for number in range(10)]
    root = copy_repo("misbehaving", tmp_path, rows)
    gate = Gate()

    def script(request: Request) -> Reply:
        return text("done") if request.messages[1]["content"] in "01" else text("done").after(gate)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        with running("test", *model, "--batch-size", "4", "--json", "-o", "results.json", cwd=root) as command:
            # Two are done and four are held.
            command.until(lambda: len(endpoint.chats) == 6)
            if number == signal.SIGINT:
                command.interrupt()
            else:
                command.process.send_signal(number)
            command.until(lambda: "stopping: running rollouts have 10 s to finish" in command.said())
            gate.open()
            done = command.wait()
        assert done.code == code
        assert json.loads((root / "results.json").read_text(encoding="utf-8")) == done.json
        assert [result["row_index"] for result in done.json["results"]] == [0, 1, 2, 3, 4, 5]
        assert {result["reward"] for result in done.json["results"]} == {0.75}
        assert (done.json["summary"]["total"], done.json["summary"]["missing"]) == (10, 4)
        assert "to continue this run, repeat the command with --resume" in done.stderr
        assert len(endpoint.chats) == 6

        with running("test", *model, "--resume", "--json", cwd=root) as command:
            resumed = command.wait()
        assert resumed.code == 0
        assert [result["row_index"] for result in resumed.json["results"]] == list(range(10))
        asked = sorted(request.messages[1]["content"] for request in endpoint.chats)
        assert asked == [str(number) for number in range(10)]


@pytest.mark.in_process
def test_ctrl_c_gives_up_what_does_not_finish(tmp_path: Path) -> None:
    names = ["answer", "held", "blocks_the_loop", "blocks_a_thread", "leaves_children"]
    root = copy_repo("misbehaving", tmp_path, [{"user_prompt": name} for name in names])
    gate = Gate()

    def script(request: Request) -> Reply:
        last = request.messages[-1]["content"]
        return text("done").after(gate) if last in ("held", "left two") else call_then_answer(request)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        with running("test", *model, "--workers", "5", "--batch-size", "5", "--json", cwd=root) as command:
            command.until(lambda: len(endpoint.chats) == 6 and "blocks_the_loop" in dict(seen(root)))
            command.until(lambda: "score:None" in dict(seen(root)))
            command.interrupt()
            done = command.wait()
        assert done.code == 130
        # A blocked loop may have taken a neighbour's place once, but nobody who was given up has a record.
        assert [(result["row_index"], result["reward"]) for result in done.json["results"]] == [(0, 0.75)]
        assert "Traceback" not in done.stderr


def test_a_signal_that_is_sent_twice_leaves_the_grace_period(tmp_path: Path) -> None:
    root = copy_repo("misbehaving", tmp_path, [{"user_prompt": "answer"}])
    gate = Gate()
    with ScriptedEndpoint(lambda request: text("done").after(gate)).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        with running("test", *model, "--json", cwd=root) as command:
            command.until(lambda: len(endpoint.chats) == 1)
            for _ in range(2):
                command.process.send_signal(signal.SIGHUP)
                command.until(lambda: "stopping: running rollouts have 10 s to finish" in command.said())
            gate.open()
            done = command.wait()
        assert (done.code, done.json["summary"]["passed"]) == (129, 1)


@pytest.mark.parametrize("isolation", ["session", "rollout"])
def test_ctrl_c_twice_ends_at_once(isolation: str, tmp_path: Path) -> None:
    names = ["answer", "blocks_the_loop", "blocks_a_thread", "holds_the_interpreter", "leaves_children"]
    root = copy_repo("misbehaving", tmp_path, [{"user_prompt": name} for name in names])
    gate = Gate()

    def script(request: Request) -> Reply:
        return text("done").after(gate) if request.messages[-1]["content"] == "left two" else call_then_answer(request)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--isolation", isolation]
        with running("test", *model, "--workers", "5", "--batch-size", "5", "--json", cwd=root) as command:
            command.until(lambda: len(endpoint.chats) == 6)
            command.until(lambda: {"blocks_the_loop", "holds_the_interpreter", "score:None"} <= dict(seen(root)).keys())
            command.interrupt()
            command.until(lambda: "press Ctrl-C again to quit now" in command.said())
            started = monotonic()
            command.interrupt()
            assert command.process.wait(PATIENCE) == 130
            assert monotonic() - started < GRACE_SECONDS / 2
            assert command.wait().stdout == ""


def test_ctrl_c_while_the_command_is_still_starting(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    with running("test", "--model", "offline/oracle", cwd=root) as command:
        # Both the command and the fork server are busy importing now.
        command.until(lambda: any("fork_server" in command_line(found) for found in command.descendants()))
        command.interrupt()
        done = command.wait()
        assert (done.code, done.stdout) == (130, "")
        assert "Traceback" not in done.stderr
        assert "KeyboardInterrupt" not in done.stderr


SLOW_IMPORT = """
import os
import subprocess
import time
from pathlib import Path

subprocess.Popen(["sleep", "3600"])
Path("seen").open("a").write(f"loading {os.getpid()}\\n")
time.sleep(3600)
"""


@pytest.mark.parametrize("how", [pytest.param("interrupt", marks=pytest.mark.in_process), "kill"])
@pytest.mark.parametrize("isolation", ["session", "rollout"])
def test_a_repository_that_takes_for_ever_to_load_can_be_left(isolation: str, how: str, tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=SLOW_IMPORT)
    with running("test", "--model", "offline/oracle", "--isolation", isolation, cwd=root) as command:
        command.until(lambda: seen(root))
        if how == "interrupt":
            command.interrupt()
        else:
            command.process.kill()
        done = command.wait()
        assert done.code == (130 if how == "interrupt" else -9)
        if how == "interrupt":
            assert "interrupted before the first rollout" in done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.parametrize("isolation", ["session", "rollout"])
def test_workers_leave_when_the_command_is_killed(isolation: str, tmp_path: Path) -> None:
    names = ["blocks_the_loop", "blocks_a_thread", "holds_the_interpreter", "leaves_children", "held"]
    rows = [*({"user_prompt": name} for name in names), {"user_prompt": "answer", "fault": "blocks"}]
    root = copy_repo("misbehaving", tmp_path, rows)
    gate = Gate()

    def script(request: Request) -> Reply:
        last = request.messages[-1]["content"]
        return text("done").after(gate) if last in ("held", "left two") else call_then_answer(request)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--isolation", isolation]
        with running("test", *model, "--workers", "6", "--batch-size", "6", cwd=root) as command:
            expected = {"blocks_the_loop", "holds_the_interpreter", "leaves_children", "score:blocks"}
            command.until(lambda: expected <= dict(seen(root)).keys())
            command.process.kill()
            assert command.wait().code == -9


BREAKING = '''
from fastmcp import FastMCP

mcp = FastMCP("breaking")


@mcp.tool
{how} add(a: int, b: int) -> int:
    """Add."""
    total = a + b
    breakpoint()
    return total
'''


@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_breakpoint_in_a_tool_opens_the_debugger(how: str, tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=BREAKING.replace("{how}", how))

    def script(request: Request) -> Reply:
        return tool_call("add", a=1, b=2) if request.turn == 0 else text(request.messages[-1]["content"])

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        terminal, far = pty.openpty()
        process = subprocess.Popen(
            [str(COMMAND), "test", *model, "--workers", "0", "--limit", "1", "--json"],
            cwd=root,
            env=clean_environment(TERM="xterm"),
            stdin=far,
            stdout=subprocess.PIPE,
            stderr=far,
            start_new_session=True,
        )
        os.close(far)
        try:
            answer(terminal, "p total * 1000")
            assert "3000" in answer(terminal, "total = 42")
            answer(terminal, "c")
            read_to_end(terminal)
            stdout = process.communicate(timeout=PATIENCE)[0].decode()
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
        assert process.returncode == 0, stdout
        assert '"reward":0.0' in stdout
        assert len(stdout.splitlines()) == 1
        assert endpoint.chats[-1].messages[-1]["content"] == "42"


def answer(terminal: int, line: str) -> str:
    """Wait for the debugger's prompt, type a line, and return the text shown before."""
    shown = ""
    while not shown.endswith("(Pdb) "):
        assert select.select([terminal], [], [], PATIENCE)[0], f"no prompt in {shown!r}"
        shown += os.read(terminal, 4096).decode(errors="replace")
    os.write(terminal, f"{line}\n".encode())
    return shown


def read_to_end(terminal: int) -> None:
    """Read until the command has closed the terminal, which Linux reports as an error."""
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        return
