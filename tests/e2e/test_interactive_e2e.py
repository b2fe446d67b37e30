"""`osmosis test --interactive`: scripted over a pipe, and typed at a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import COMMAND, Finished, Osmosis, clean_environment, documented, run_osmosis
from osmosis_ai.store.queries import Queries, ScoredRollout
from osmosis_ai.testing.endpoint import (
    Gate,
    Reply,
    Request,
    ScriptedEndpoint,
    by_turn,
    status,
    text,
    tool_call,
    tool_calls,
)
from repos import ADDING, write_repo
from terminal import Terminal

PATIENCE = 60.0
EXACT = "reward_fn.rewards:exact"

MORE = (
    ADDING.split("if __name__")[0]
    + '''
import os

notes = []


@mcp.tool
def note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return ", ".join(notes)


@mcp.tool
def crash() -> str:
    """Take the process down."""
    os._exit(7)


@mcp.tool
def long(length: int) -> str:
    """A long text."""
    return "x" * length + "THE END"


@mcp.tool
def key() -> str:
    """What nobody should see."""
    return "the key is sk-very-secret-1234"
'''
)


def sums(request: Request) -> Reply:
    """A model that adds with the tool and answers with its result."""
    if request.turn == 0:
        first, second = (int(word.strip("?")) for word in request.messages[1]["content"].split()[2::2])
        return tool_call("add", a=first, b=second)
    return text(request.messages[-1]["content"])


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """A repository with tools that do more than add."""
    return write_repo(tmp_path / "more", main=MORE)


def type_in(repo: Path, script: Any, *lines: str, options: tuple[str, ...] = (), **environ: str) -> Finished:
    """Run the command with piped commands, against a scripted model."""
    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        return pipe_in(endpoint, repo, *lines, options=options, **environ)


def pipe_in(
    endpoint: ScriptedEndpoint, repo: Path, *lines: str, options: tuple[str, ...] = (), **environ: str
) -> Finished:
    """The same, with an endpoint whose requests the test inspects."""
    done = run_osmosis(
        *("test", "-i", "--base-url", endpoint.url, "--model", "scripted", *options),
        cwd=repo,
        env={"TERM": "dumb", "EDITOR": "", "VISUAL": "", **environ},
        typed="".join(f"{line}\n" for line in lines),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in clean_environment().items() if name not in ("EDITOR", "VISUAL")}
    return {**kept, "TERM": "dumb", **extra}


def recorded(repo: Path) -> list[ScoredRollout]:
    """The rollouts of the latest run."""
    store = Queries(repo / ".osmosis" / "runs.db")
    return list(store.scored(store.find_run("latest").id, with_trajectory=True))


def editor(folder: Path, *steps: str) -> str:
    """An EDITOR whose n-th use runs the n-th of these programs on `message`, and keeps its input."""
    file = folder / "editor.py"
    file.write_text(
        "import json, sys, pathlib, time\n"
        f"steps = {list(steps)!r}\n"
        "file, log = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).with_name('seen.jsonl')\n"
        "seen = log.read_text(encoding='utf-8').splitlines() if log.exists() else []\n"
        "given = file.read_text(encoding='utf-8')\n"
        "log.write_text('\\n'.join([*seen, json.dumps(given)]) + '\\n', encoding='utf-8')\n"
        "scope = {'given': given, 'text': None, 'time': time}\n"
        "try: scope['message'] = json.loads(given)\n"
        "except ValueError: pass\n"
        "exec(steps[len(seen)], scope)\n"
        "text = scope['text']\n"
        "file.write_text(json.dumps(scope['message']) if text is None else text, encoding='utf-8')\n",
        encoding="utf-8",
    )
    return f"{sys.executable} {file}"


def seen_by_editor(folder: Path) -> list[str]:
    """Return the input of each use of the editor."""
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text(encoding="utf-8").splitlines()]


# Through a pipe


@pytest.mark.parametrize("where", [("--workers", "0"), ("--workers", "1"), ("--isolation", "rollout")], ids=" ".join)
def test_each_step_is_shown_and_the_rollout_is_recorded(repo: Path, where: tuple[str, ...]) -> None:
    done = type_in(repo, sums, "n", "n", "n", "n", "n", "q", options=(*where, "--param", "top_p=0.5", "--row", "1"))
    assert done.code == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("── ")]
    patterns = [
        r"── request 1: scripted at http://127.0.0.1:\d+/v1, 2 messages, 2 of them new, 1 tool, {\"top_p\":0.5}",
        r"── reply 1: tool_calls, scripted, 10 \+ 5 tokens, [\d.]+ ms",
        r"── result of add {\"a\":3,\"b\":4}, [\d.]+ ms",
        r"── request 2: .*, 4 messages, 2 of them new, 1 tool, .*",
        r"── reply 2: stop, scripted, 10 \+ 5 tokens, [\d.]+ ms",
        r"── row 1 ended: stop, 2 turns, 1 tool call, 30 tokens, [\d.]+ ms",
    ]
    assert [bool(re.fullmatch(pattern, step)) for pattern, step in zip(patterns, steps, strict=True)] == [True] * 6
    for shown in ("user: What is 3 + 4?", '→ add {"a":3,"b":4}', "\n7\n", f"{EXACT}: 1.000\n"):
        assert shown in done.stdout
    assert "> " not in done.stdout, "a prompt is for a terminal"
    assert "? lists the commands" in done.stderr

    store = Queries(repo / ".osmosis" / "runs.db")
    run = store.find_run("latest")
    assert (run.command, run.status, run.config["interactive"], run.rollouts) == ("test", "finished", True, 1)
    (scored,) = recorded(repo)
    rollout = scored.stored.rollout
    assert (rollout.row_index, rollout.finish_reason, rollout.failure) == (1, "stop", None)
    assert [message["role"] for message in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert not any(step.edited for step in [*rollout.turns, *rollout.tool_calls])
    assert scored.scores[EXACT].value == 1.0


def test_continue_goes_to_the_end_and_rows_can_be_run_again(repo: Path, osmosis: Osmosis) -> None:
    done = type_in(
        repo,
        sums,
        *("c", "n", "r 2", "n", "r 1", "c", "r", "c", "r 3", "r x", "frobnicate", "", "q"),
        options=("-o", "out.json"),
    )
    assert done.code == 0, done.stderr
    assert [line.split(" ended")[0] for line in done.stdout.splitlines() if " ended: " in line] == [
        "── row 0",
        "── row 1",
        "── row 1",
    ]
    assert "no rollout is paused; r N starts row N" in done.stderr
    assert "row 2 was abandoned and isn't recorded" in done.stderr
    assert "there is no row 3; the rows are 0 to 2" in done.stderr
    assert "r takes a row's number, from 0 to 2" in done.stderr
    assert "there is no command 'frobnicate'; ? lists the commands" in done.stderr
    rollouts = [scored.stored.rollout for scored in recorded(repo)]
    assert [(rollout.row_index, rollout.run_index) for rollout in rollouts] == [(0, 0), (1, 0), (1, 1)]
    written = documented("test", (repo / "out.json").read_text(encoding="utf-8"))
    assert written["config"]["interactive"] is True
    assert (written["summary"]["total"], written["summary"]["passed"], len(written["results"])) == (3, 3, 3)
    listed = osmosis("runs", "--json", cwd=repo).json["runs"][0]
    assert (listed["command"], listed["rollouts"], listed["planned"]) == ("test", 3, 3)


def test_what_can_be_looked_at_between_the_steps(more: Path) -> None:
    done = type_in(
        more,
        sums,
        *("messages", "tools", "score", "n", "call note", 'call note {"text": "by hand"}', "n", "m", "s", "help"),
        *('call note {"text": "again"}', "call nothing {}", "save", "save", "save there.json", "save no/where.json"),
        "call",
    )
    assert done.code == 0, done.stderr
    assert "── system\nUse the tools.\n── user\nWhat is 1 + 2?\n" in done.stdout
    assert '── note\nKeep a note.\n{\n  "properties": {\n    "text": {' in done.stdout
    assert done.stdout.count(f"{EXACT}: 0.000\n") == 2
    assert re.search(r"── result of note, called by hand, [\d.]+ ms, error: schema\nError: ", done.stdout)
    assert re.search(r"── result of note, called by hand, [\d.]+ ms\nby hand\n", done.stdout)
    # In the rollout's own session and process, so what one call left is there for the next.
    assert re.search(r"── result of note, called by hand, [\d.]+ ms\nby hand, again\n", done.stdout)
    assert "error: unknown_tool\nError: there is no tool 'nothing'" in done.stdout
    assert '── assistant\n→ add {"a":1,"b":2}\n── result of add\n3\n' in done.stdout
    assert "call TOOL [JSON]" in done.stdout
    assert "call takes a tool and its arguments" in done.stderr
    assert "no/where.json can't be written: No such file or directory" in done.stderr
    saved = json.loads((more / "trajectory-row-0.json").read_text(encoding="utf-8"))
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant", "tool"]
    assert (saved["row_index"], saved["model"], saved["finish_reason"], saved["edited"]) == (0, "scripted", None, False)
    assert json.loads((more / "trajectory-row-0-2.json").read_text(encoding="utf-8")) == saved
    assert (more / "there.json").exists()
    # The rollout never came to its end, so there is nothing to keep a run for.
    assert "row 0 was abandoned" in done.stderr
    assert Queries(more / ".osmosis" / "runs.db").list_runs(10) == []


@pytest.mark.parametrize(("isolation", "last"), [("session", "a, b, c"), ("rollout", "c")])
def test_isolation_decides_what_is_left_for_the_next_row(more: Path, isolation: str, last: str) -> None:
    notes = [f'call note {{"text": "{text}"}}' for text in "abc"]
    done = type_in(more, sums, *notes[:2], "r 1", notes[2], "c", options=("--isolation", isolation, "--workers", "1"))
    assert done.code == 0, done.stderr
    assert re.findall(r"^── result of note, called by hand, .*\n(.*)$", done.stdout, re.MULTILINE) == [
        "a",
        "a, b",
        last,
    ]
    assert "── row 1 ended: stop" in done.stdout


def test_a_saved_trajectory_of_an_ended_rollout_has_its_record_and_scores(repo: Path) -> None:
    done = type_in(repo, sums, "c", "m", "s", "save")
    assert done.code == 0, done.stderr
    saved = json.loads((repo / "trajectory-row-0.json").read_text(encoding="utf-8"))
    assert (saved["finish_reason"], len(saved["turns"]), len(saved["tool_calls"])) == ("stop", 2, 1)
    assert [(score["function"], score["value"]) for score in saved["scores"]] == [(EXACT, 1.0)]
    assert done.stdout.endswith(f"── assistant\n3\n{EXACT}: 1.000\n")


def test_long_texts_are_cut_and_shown_in_full_by_m(more: Path) -> None:
    done = type_in(more, by_turn(tool_call("long", length=5000), text("done")), "n", "n", "m")
    shown, full = done.stdout.split("── system\n")
    assert f"{'x' * 2000}\n… 3,007 more characters; m shows all of it" in shown
    assert "THE END" not in shown
    assert f"{'x' * 5000}THE END" in full


def test_a_model_that_fails_ends_the_rollout_and_the_prompt_comes_back(repo: Path) -> None:
    def fails_on_row_0(request: Request) -> Reply:
        return status(400) if "1 + 2" in request.messages[1]["content"] else sums(request)

    done = type_in(repo, fails_on_row_0, "n", "s", "r 1", "c")
    assert done.code == 1
    assert "── row 0 ended: error" in done.stdout
    assert "\nmodel: " in done.stdout
    assert "── row 1 ended: stop" in done.stdout


def test_an_interactive_run_is_never_taken_up_by_another_one(more: Path, osmosis: Osmosis) -> None:
    with ScriptedEndpoint(by_turn(tool_call("crash"))).run_in_thread() as endpoint:
        pipe_in(endpoint, more, "c")
        done = osmosis("test", "--base-url", endpoint.url, "--model", "scripted", "--retry-failed", cwd=more)
    assert done.code == 2
    assert "it was stepped through with --interactive" in done.stderr


# Changing things


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_edited_reply_is_what_goes_on(repo: Path, workers: str) -> None:
    change = "message['tool_calls'][0]['function']['arguments'] = {'a': 40, 'b': 2}; message['content'] = 'By hand.'"
    with ScriptedEndpoint(sums).run_in_thread() as endpoint:
        done = pipe_in(
            endpoint,
            repo,
            *("n", "e", "c", "save"),
            options=("--workers", workers),
            EDITOR=editor(repo.parent, change),
        )
        asked = endpoint.chats[-1].messages
    assert done.code == 0, done.stderr
    assert "the edit, which the record mentions" in done.stderr
    assert '── result of add {"a":40,"b":2}' in done.stdout
    assert re.search(r"── row 0 ended: stop, .*, edited by hand\n", done.stdout)
    (scored,) = recorded(repo)
    rollout = scored.stored.rollout
    assert rollout.messages[2]["content"] == "By hand."
    assert rollout.messages[:-1] == asked
    assert rollout.messages[3]["content"] == "42"
    assert [turn.edited for turn in rollout.turns] == [True, False]
    assert [call.edited for call in rollout.tool_calls] == [False]
    assert scored.scores[EXACT].value == 0.0
    assert json.loads((repo / "trajectory-row-0.json").read_text(encoding="utf-8"))["edited"] is True


def test_edited_results_are_what_the_model_gets(more: Path) -> None:
    """Edit results in both ways: one of two results at its step, and a result in the next request."""

    def three_turns(request: Request) -> Reply:
        turns = [
            tool_calls([("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2})]),
            tool_call("note", text="as it was"),
            text("done"),
        ]
        return turns[request.turn]

    with ScriptedEndpoint(three_turns).run_in_thread() as endpoint:
        done = pipe_in(
            endpoint,
            more,
            *("n", "n", "e", "s", "n", "n", "n", "n", "e", "m", "c"),
            EDITOR=editor(more.parent, "message[1]['content'] = 'five'", "message['content'] = 'not as it was'"),
        )
        second, third = (request.messages for request in endpoint.chats[1:])
    assert done.code == 0, done.stderr
    assert [message["content"] for message in second[3:]] == ["2", "five"]
    assert [message["content"] for message in third[3:]] == ["2", "five", None, "not as it was"]
    assert "── result of note\nnot as it was\n" in done.stdout
    (scored,) = recorded(more)
    rollout = scored.stored.rollout
    assert rollout.messages[:-1] == third
    assert [(call.name, call.edited) for call in rollout.tool_calls] == [
        ("add", False),
        ("add", True),
        ("note", False),
    ]
    # The change came after the results were taken, so the request that carried it is the one that is marked.
    assert [turn.edited for turn in rollout.turns] == [False, False, True]


def test_a_broken_edit_is_refused_and_can_be_mended(repo: Path) -> None:
    broken = {
        "text = '{\"role\": '": "it isn't JSON",
        "message = 7": "it must be a message",
    }
    done = type_in(
        repo,
        sums,
        *("n", *("e" for _ in broken), "e", "n", "e", "e", "c"),
        EDITOR=editor(
            repo.parent,
            *broken,
            "message = {'role': 'assistant', 'content': None, 'tool_calls': [{'function': {'name': 'add', "
            "'arguments': {'a': 1, 'b': 1}}}]}",
            "message['tool_call_id'] = 'another'",
            "message['tool_call_id'] = 'call_edited_0'; message['content'] = '3'",
        ),
    )
    assert done.code == 0, done.stderr
    for why in [*broken.values(), "the results must keep"]:
        assert f"not changed: {why}" in done.stderr or f"{why}; e reopens it" in done.stderr, why
    assert done.stderr.count("e reopens it as you left it") == len(broken) + 1
    seen = seen_by_editor(repo.parent)
    # What was refused comes back as it was left.
    assert seen[1] == '{"role": '
    assert json.loads(seen[2]) == 7
    assert json.loads(seen[-1])["tool_call_id"] == "another"
    (scored,) = recorded(repo)
    assert scored.stored.rollout.messages[3] == {"role": "tool", "tool_call_id": "call_edited_0", "content": "3"}


def test_an_edit_that_changes_nothing_is_none(repo: Path) -> None:
    done = type_in(repo, sums, "n", "e", "c", "e", EDITOR="true")
    assert done.code == 0, done.stderr
    assert "nothing was changed" in done.stderr
    assert "edited" not in done.stdout
    assert "no rollout is paused" in done.stderr


@pytest.mark.parametrize("workers", ["0", "1"])
def test_no_time_limit_runs_while_a_person_thinks(repo: Path, workers: str) -> None:
    thinking = editor(repo.parent, "time.sleep(4.5); message['content'] = 'Thought about.'")
    done = type_in(repo, sums, "n", "e", "c", options=("--timeout", "4", "--workers", workers), EDITOR=thinking)
    assert done.code == 0, done.stdout
    (scored,) = recorded(repo)
    assert scored.stored.rollout.failure is None
    assert scored.stored.rollout.duration_ms < 4000


def test_the_time_limit_still_runs_between_the_pauses(repo: Path) -> None:
    done = type_in(repo, by_turn(tool_call("add", a=1, b=2), text("late").after(30.0)), "c", options=("--timeout", "2"))
    assert done.code == 1
    assert "── row 0 ended: timeout" in done.stdout
    assert "timeout: the rollout took longer than 2 s" in done.stdout


# What goes wrong


def test_a_tool_that_takes_its_worker_down(more: Path) -> None:
    def crash_on_row_0(request: Request) -> Reply:
        return tool_call("crash") if "1 + 2" in request.messages[1]["content"] else sums(request)

    done = type_in(more, crash_on_row_0, "n", "n", "n", "r 1", "n", "call crash", "m", "r 2", "c")
    assert done.code == 1
    assert "── row 0 ended: error" in done.stdout
    assert "worker: exited with code 7 (while running crash)" in done.stdout
    assert "no rollout is paused; r N starts row N" in done.stderr
    assert "the rollout ended while crash ran by hand" in done.stderr
    assert "── row 1 ended: error" in done.stdout
    assert "── row 2 ended: stop" in done.stdout
    failures = [scored.stored.rollout.failure for scored in recorded(more)]
    assert [failure and failure.origin for failure in failures] == ["worker", "worker", None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-i", "--watch"), "--interactive and --watch don't go together"),
        (("-i", "--json"), "--interactive and --json don't go together"),
        (("-i", "-q"), "--interactive and --quiet don't go together"),
        (("-i", "--resume"), "--interactive and --resume don't go together"),
        (("-i", "--retry-failed"), "--interactive and --retry-failed don't go together"),
        (("-i", "--row", "3"), "--row 3: the rows are 0 to 2"),
        (("-i", "--offset", "1", "--row", "0"), "--row 0: the rows are 1 to 2"),
        (("--row", "1"), "--row goes with --interactive"),
    ],
)
def test_what_does_not_go_together_is_refused(
    repo: Path, osmosis: Osmosis, options: tuple[str, ...], said: str
) -> None:
    done = osmosis("test", "--model", "offline/oracle", *options, cwd=repo)
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_appears_nowhere(more: Path) -> None:
    secret = "sk-very-secret-1234"
    done = type_in(
        more,
        by_turn(tool_call("key"), text("done")),
        *("n", "n", "m", "call key", "e", "save", "c"),
        options=("--api-key", secret),
        EDITOR=editor(more.parent, "message['content'] += '!'"),
    )
    assert done.code == 0, done.stderr
    assert "the key is [masked]" in done.stdout
    assert secret not in done.stdout + done.stderr
    assert "[masked]" in seen_by_editor(more.parent)[0]
    written = [path for path in more.rglob("*") if path.is_file() and path.name != "main.py"]
    assert written
    for path in [*written, more.parent / "seen.jsonl"]:
        assert path.suffix == ".pyc" or secret.encode() not in path.read_bytes(), path


# Ctrl-C through a pipe


def test_ctrl_c_during_a_model_call_ends_a_scripted_session_with_130(repo: Path) -> None:
    gate = Gate()
    with ScriptedEndpoint(by_turn(text("never").after(gate))).run_in_thread() as endpoint:
        process = subprocess.Popen(
            [str(COMMAND), "test", "-i", "--base-url", endpoint.url, "--model", "scripted"],
            cwd=repo,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write("n\n")
        process.stdin.flush()
        try:
            assert gate.reached.wait(PATIENCE)
            os.killpg(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=PATIENCE)
        finally:
            gate.open()
            process.kill()
            process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr


# At a terminal


@contextmanager
def terminal(repo: Path, endpoint: ScriptedEndpoint, *options: str, **environ: str) -> Iterator[Terminal]:
    arguments = ["test", "-i", "--base-url", endpoint.url, "--model", "scripted", *options]
    screen = Terminal(arguments, repo, environment(**environ))
    try:
        yield screen
    finally:
        screen.close()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_terminal_has_a_prompt_line_editing_and_history(repo: Path, workers: str) -> None:
    history = repo / ".osmosis" / "interactive_history"
    with ScriptedEndpoint(sums).run_in_thread() as endpoint:
        with terminal(repo, endpoint, "--workers", workers) as screen:
            screen.wait_for(r"\? lists the commands")
            screen.wait_for(r"row 0, request 1> ")
            screen.type("x\x7fn\n")  # a mistake, taken back
            assert "→ add" in screen.wait_for(r"row 0, reply 1> ")
            screen.type("not sent")
            screen.wait_for("not sent")
            screen.press_ctrl_c(r"row 0, reply 1> ")
            screen.type("n\n")
            screen.wait_for(r"row 0, result 1> ")
            screen.type("c\n")
            assert f"{EXACT}: 1" in screen.wait_for(r"row 0, ended> ")
            screen.type("\x04")
            assert screen.end() == 0
            assert "there is no command" not in screen.shown
        assert stat.S_IMODE(history.stat().st_mode) == 0o600
        assert history.read_text(encoding="utf-8").splitlines() == ["n", "c"]  # not the same line twice
        with terminal(repo, endpoint, "--workers", workers) as screen:
            screen.wait_for(r"row 0, request 1> ")
            screen.type("\x1b[A\n")  # the arrow up: the last session's last command
            screen.wait_for(r"row 0, ended> ")
            screen.type("q\n")
            assert screen.end() == 0
    assert len(recorded(repo)) == 1


@pytest.mark.parametrize("workers", ["0", "1"])
def test_ctrl_c_during_a_model_call_comes_back_to_the_prompt(repo: Path, workers: str) -> None:
    gate = Gate()

    def held_on_row_0(request: Request) -> Reply:
        return text("never").after(gate) if "1 + 2" in request.messages[1]["content"] else sums(request)

    with (
        ScriptedEndpoint(held_on_row_0).run_in_thread() as endpoint,
        terminal(repo, endpoint, "--workers", workers) as screen,
    ):
        screen.wait_for(r"row 0, request 1> ")
        screen.type("n\n")
        assert gate.reached.wait(PATIENCE)
        screen.type("\x03")
        screen.wait_for(r"stopped; row 0 was abandoned and isn't recorded")
        screen.wait_for(r"row 0, ended> ")
        screen.press_ctrl_c(r"row 0, ended> ")
        screen.type("r 1\n")
        screen.wait_for(r"row 1, request 1> ")
        screen.type("c\n")
        screen.wait_for(r"row 1, ended> ")
        screen.type("q\n")
        assert screen.end() == 0
        gate.open()
    assert [scored.stored.rollout.row_index for scored in recorded(repo)] == [1]


def test_the_editor_gets_the_terminal(repo: Path) -> None:
    change = "message['content'] = input('your words: ')"
    with (
        ScriptedEndpoint(by_turn(text("the model's words"))).run_in_thread() as endpoint,
        terminal(repo, endpoint, EDITOR=editor(repo.parent, change)) as screen,
    ):
        screen.wait_for(r"row 0, request 1> ")
        screen.type("n\n")
        screen.wait_for(r"row 0, reply 1> ")
        screen.type("e\n")
        screen.wait_for(r"your words: ")
        screen.type("3\n")
        screen.wait_for(r"the edit, which the record mentions")
        screen.wait_for(r"row 0, reply 1> ")
        screen.type("n\n")
        assert f"{EXACT}: 1" in screen.wait_for(r"row 0, ended> ")
        screen.type("q\n")
        assert screen.end() == 0
    (scored,) = recorded(repo)
    assert [turn.edited for turn in scored.stored.rollout.turns] == [True]


def test_a_worker_that_dies_gives_the_prompt_back(more: Path) -> None:
    with (
        ScriptedEndpoint(by_turn(tool_call("crash"))).run_in_thread() as endpoint,
        terminal(more, endpoint) as screen,
    ):
        screen.wait_for(r"row 0, request 1> ")
        screen.type("c\n")
        assert "worker: exited with code 7" in screen.wait_for(r"row 0, ended> ")
        screen.type("r 2\n")
        screen.wait_for(r"row 2, request 1> ")
        screen.type("q\n")
        assert screen.end() == 1
