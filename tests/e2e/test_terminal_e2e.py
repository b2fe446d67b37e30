"""What a person sees on a terminal: the status line at the start, the progress line, and a question."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import Osmosis, clean_environment
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, text
from terminal import Terminal

CLEARED = "\r\x1b[K"


@contextmanager
def terminal(*arguments: str, cwd: Path, columns: int = 60, **env: str) -> Iterator[Terminal]:
    screen = Terminal([*arguments], cwd, clean_environment(TERM="xterm-256color", **env), columns=columns)
    try:
        yield screen
    finally:
        screen.close()


@pytest.mark.parametrize("command", ["test", "eval", "validate", "runs"])
def test_the_status_line_comes_before_anything_slow_is_imported(command: str, repo: Path) -> None:
    with terminal(command, cwd=repo, PYTHONPROFILEIMPORTTIME="1") as screen:
        before = screen.wait_for("…")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in before.splitlines() if "|" in line}
    assert {"msgspec", "typer", "rich", "asyncio", "subprocess", "anyio"} & imported == set()
    # A bare interpreter with this environment imports about sixty.
    assert "osmosis_ai" in imported


def test_the_status_line_names_each_wait_and_leaves_nothing_behind(repo: Path) -> None:
    with terminal("test", "--model", "offline/oracle", cwd=repo) as screen:
        assert screen.end() == 0
    waits = re.findall(r"\x1b\[\?7l(.*?)…\x1b\[\?7h", screen.shown)
    assert waits[:2] == ["starting workers", "loading tools from mcp/main.py"]
    assert waits[-1] == "asking offline/oracle for a first reply"
    # Each is overwritten by the next or removed before the next output.
    for after in screen.shown.split("…\x1b[?7h")[1:]:
        assert after.startswith(CLEARED)


@pytest.mark.parametrize("option", ["-q", "--json"])
def test_results_only_means_no_status_line(option: str, repo: Path) -> None:
    with terminal("test", "--model", "offline/oracle", option, cwd=repo) as screen:
        assert screen.end() == 0
    assert "…\x1b" not in screen.shown


def test_a_pipe_gets_no_status_line(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("test", "--model", "offline/oracle", cwd=repo)
    assert done.code == 0
    assert "starting workers" not in done.stderr
    assert "\x1b" not in done.stderr


def test_debug_says_when_the_first_rollout_starts(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("test", "--model", "offline/oracle", "--debug", cwd=repo)
    assert re.findall(r"first rollout after \d+\.\d\d s \(.*loading tools from mcp/main.py at \d+\.\d\d s", done.stderr)


def test_an_error_takes_the_place_of_the_status_line(tmp_path: Path) -> None:
    with terminal("test", "--bogus", cwd=tmp_path) as screen:
        assert screen.end() == 2
    assert f"starting workers…\x1b[?7h{CLEARED}\x1b[1;31merror:\x1b[0m No such option" in screen.shown


def test_no_part_of_the_progress_stays_after_ctrl_c(repo: Path) -> None:
    gate = Gate()

    def script(request: Request) -> Reply:
        # The first request is the probe.
        return text("done") if len(endpoint.requests) == 1 else text("done").after(gate)

    with (
        ScriptedEndpoint(script).run_in_thread() as endpoint,
        terminal("test", "--base-url", endpoint.url, "--model", "scripted", cwd=repo) as screen,
    ):
        screen.wait_for(r"━\x1b\[0m 0/3  0 failed")
        screen.type("\x03")
        screen.wait_for("stopping: running rollouts have 10 s to finish")
        screen.wait_for(r"━\x1b\[0m 0/3  0 failed")
        screen.type("\x03")
        assert screen.end() == 130
        gate.open()
    # The line that held the bar is erased, and nothing is written after it but the cursor.
    assert "━" not in screen.shown.rpartition("\x1b[2K")[2]


def test_rm_asks_on_a_terminal(osmosis: Osmosis, repo: Path) -> None:
    assert osmosis("eval", "-q", "--model", "offline/empty", "--limit", "1", cwd=repo).code == 0
    (made,) = [item["id"] for item in osmosis("runs", "--json", cwd=repo).json["runs"]]
    for answer, left in (("n", [made]), ("y", [])):
        with terminal("runs", "rm", made, cwd=repo) as screen:
            screen.wait_for(rf"remove {made} \(eval, 1 rollout\)\?")
            screen.type(f"{answer}\n")
            screen.end()
        assert [item["id"] for item in osmosis("runs", "--json", cwd=repo).json["runs"]] == left
