"""Watch mode: a save re-runs what it affects, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from commands import COMMAND, Osmosis, clean_environment, documented
from osmosis_ai.store.queries import Queries
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, text
from waiting import eventually
from watching import (
    REWARD,
    Watching,
    calls_the_tool,
    dataset,
    redone,
    repository,
    rewards,
    server,
    watching,
    write,
)

HALF = REWARD.replace("1.0 if", "0.5 if")
SHARED = {
    "mcp/main.py": server("str(table.A + rules.B + lazy())", "import table\nfrom reward_fn import rules\nLAZY").replace(
        "LAZY", "\n\ndef lazy():\n    import later\n\n    return later.C\n"
    ),
    "table.py": "A = 0\n",
    "later.py": "C = 0\n",
    "reward_fn/rules.py": "B = 1\n",
    "reward_fn/rewards.py": "import table\n" + REWARD.replace("1.0 if", "1.0 + table.A if"),
}


def flipped(line: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The rows that pass now, and those that fail now."""
    flips = line["iteration"]["flipped"]
    return [flip["row_index"] for flip in flips["passed"]], [flip["row_index"] for flip in flips["failed"]]


@pytest.mark.in_process
def test_a_reward_function_that_changes(tmp_path: Path) -> None:
    with watching(repository(tmp_path), "-o", "results.json") as watch:
        first = watch.next()
        assert (rewards(first), redone(first), watch.requests()) == ([1.0, 1.0], (2, 2, 0), 4)
        assert first["iteration"]["number"] == 1
        assert first["iteration"]["trigger"] == ["start"]
        assert flipped(first) == ([], [])

        half = watch.save({"reward_fn/rewards.py": HALF})
        assert (rewards(half), redone(half), watch.requests()) == ([0.5, 0.5], (0, 2, 0), 0)
        assert half["iteration"]["trigger"] == ["reward_fn/rewards.py"]
        assert half["iteration"]["number"] == 2
        assert half["iteration"]["took_ms"] > 0
        assert flipped(half) == ([], [0, 1])
        flip = half["iteration"]["flipped"]["failed"][1]
        assert (flip["prompt"], flip["before"], flip["after"]) == ("answer b", 1.0, 0.5)
        assert documented("test", (tmp_path / "results.json").read_text(encoding="utf-8")) == half

        back = watch.save({"reward_fn/rewards.py": REWARD})
        assert (rewards(back), redone(back), flipped(back)) == ([1.0, 1.0], (0, 2, 0), ([0, 1], []))
        assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == back


@pytest.mark.in_process
def test_a_tool_that_changes_costs_the_turns_that_diverge(tmp_path: Path) -> None:
    with watching(repository(tmp_path)) as watch:
        watch.next()
        assert watch.requests() == 4
        changed = watch.save({"mcp/main.py": server('"2"')})
        # The first turn's requests are what they were; their replies come from the cache.
        assert (redone(changed), watch.requests(), flipped(changed)) == ((2, 2, 2), 2, ([], [0, 1]))
        back = watch.save({"mcp/main.py": server('"1"')})
        assert (redone(back), watch.requests(), flipped(back)) == ((2, 2, 4), 0, ([0, 1], []))
        assert back["summary"]["total_tokens"] == 0


@pytest.mark.in_process
def test_without_the_cache_every_turn_is_asked_again(tmp_path: Path) -> None:
    with watching(repository(tmp_path), "--no-cache") as watch:
        watch.next()
        assert redone(watch.save({"mcp/main.py": server('"2"')})) == (2, 2, 0)
        assert watch.requests() == 8
        assert not (tmp_path / ".osmosis" / "cache.db").exists()


@pytest.mark.in_process
def test_what_makes_no_difference_redoes_nothing(tmp_path: Path) -> None:
    files: dict[str, str | None] = {
        ".gitignore": "ignored/\n*.log\n/mcp/generated.py\n!mcp/kept.log\n",
        "mcp/unused.py": "# a comment\n",
        "reward_fn/unused.py": "# a comment\n",
    }
    with watching(repository(tmp_path, files)) as watch:
        watch.next()
        # Nothing of this is followed by a line of its own: the next line is that of the last save.
        write(tmp_path, {"mcp/main.py": server('"1"'), "reward_fn/rewards.py": REWARD})
        write(tmp_path, {"mcp/unused.py": "#   a comment\n", "reward_fn/unused.py": "#   a comment\n"})
        for name in (
            "README.md",
            "mcp/.main.py.swp",
            "mcp/main.py~",
            "mcp/4913",
            "mcp/#main.py#",
            "mcp/.#main.py",
            "mcp/main.py.tmp",
            "mcp/__pycache__/main.cpython-311.pyc",
            "mcp/generated.py",
            "mcp/ignored/notes.py",
            "reward_fn/run.log",
            ".osmosis/note.py",
            ".venv/lib/module.py",
            "mcp/venv/module.py",
            ".git/HEAD",
        ):
            write(tmp_path, {name: "x\n"})
        last = watch.save({"reward_fn/rewards.py": HALF})
        assert last["iteration"]["number"] == 2
        assert redone(last) == (0, 2, 0)
        assert not watch.more()
        # What git ignores doesn't count as the tools' data either, but what it keeps does.
        write(tmp_path, {"mcp/ignored/notes.txt": "a\n"})
        kept = watch.save({"mcp/kept.log": "a\n"})
        assert kept["iteration"]["trigger"] == ["mcp/kept.log"]
        assert redone(kept)[0] == 2


@pytest.mark.in_process
def test_each_side_depends_on_what_it_imports(tmp_path: Path) -> None:
    with watching(repository(tmp_path, SHARED), "--no-cache") as watch:
        assert rewards(watch.next()) == [1.0, 1.0]
        assert watch.requests() == 4

        # Imported when the tool is called; only the tools know it.
        lazily = watch.save({"later.py": "C = 1\n"})
        assert (redone(lazily), rewards(lazily), watch.requests()) == ((2, 2, 0), [0.0, 0.0], 4)
        # A helper of the reward functions' folder that only the tool imports.
        inside = watch.save({"reward_fn/rules.py": "B = 0\n"})
        assert (redone(inside), rewards(inside), watch.requests()) == ((2, 2, 0), [1.0, 1.0], 4)
        # What both import.
        both = watch.save({"table.py": "A = 1\n", "later.py": "C = 0\n"})
        assert (redone(both), rewards(both), watch.requests()) == ((2, 2, 0), [2.0, 2.0], 4)
        # After all these reloads a reward function is still only a reward function.
        only = watch.save({"reward_fn/rewards.py": SHARED["reward_fn/rewards.py"].replace("1.0 +", "0.5 +")})
        assert (redone(only), rewards(only), watch.requests()) == ((0, 2, 0), [1.5, 1.5], 0)
        # A data file of the reward functions.
        assert redone(watch.save({"reward_fn/words.txt": "a\n"})) == (0, 2, 0)
        assert watch.requests() == 0


@pytest.mark.in_process
def test_saves_that_follow_each_other_are_one_change(tmp_path: Path) -> None:
    with watching(repository(tmp_path)) as watch:
        watch.next()
        for value in ('"2"', '"3"', '"4"', '"1 "'):
            write(tmp_path, {"mcp/main.py": server(value)})
        write(tmp_path, {"reward_fn/rewards.py": REWARD.replace("== ground", ".strip() == ground")})
        one = watch.next()
        assert set(one["iteration"]["trigger"]) == {"mcp/main.py", "reward_fn/rewards.py"}
        assert rewards(one) == [1.0, 1.0]
        assert one["iteration"]["number"] == 2
        assert redone(watch.save({"reward_fn/rewards.py": HALF})) == (0, 2, 0)


@pytest.mark.in_process
def test_a_change_during_a_run_starts_again(tmp_path: Path) -> None:
    gate = Gate()

    def script(request: Request) -> Reply:
        """Holds every rollout of version 1 but the first row's at its second turn."""
        reply = calls_the_tool(request)
        last = request.messages[-1]
        held = last["role"] == "tool" and last["content"] == "1" and "first" not in request.messages[1]["content"]
        return reply.after(gate) if held else reply

    rows = {"test_data.jsonl": dataset("answer first", "answer b", "answer c")}
    with watching(repository(tmp_path, rows), "--no-cache", script=script) as watch:
        assert gate.reached.wait(30)
        write(tmp_path, {"mcp/main.py": server('"2"')})
        line = watch.next()
        gate.open()
        assert rewards(line) == [0.0, 0.0, 0.0]
        assert line["iteration"]["number"] == 1
        assert line["iteration"]["trigger"] == ["mcp/main.py"]
        assert redone(line) == (3, 3, 0)
        assert redone(watch.save({"reward_fn/rewards.py": HALF})) == (0, 3, 0)


@pytest.mark.in_process
def test_a_store_that_is_removed_ends_it_and_says_where_the_rollouts_are(tmp_path: Path) -> None:
    with watching(repository(tmp_path)) as watch:
        watch.next()
        shutil.rmtree(tmp_path / ".osmosis")
        write(tmp_path, {"reward_fn/rewards.py": HALF})
        done = watch.command.wait()
    assert done.code == 1
    assert "removed or replaced" in done.stderr
    assert "Traceback" not in done.stderr
    (copy,) = (tmp_path / ".osmosis").glob("recovered-*")
    (run,) = Queries(copy / "runs.db").list_runs()
    assert run.rollouts == 2


@pytest.mark.in_process
def test_a_reward_function_that_changes_during_a_run(tmp_path: Path) -> None:
    """Finished rollouts stay; every score is of the new code."""
    gate = Gate()

    def script(request: Request) -> Reply:
        reply = calls_the_tool(request)
        held = request.messages[-1]["role"] == "tool" and "first" not in request.messages[1]["content"]
        return reply.after(gate) if held else reply

    rows = {"test_data.jsonl": dataset("answer first", "answer b")}
    with watching(repository(tmp_path, rows), script=script) as watch:
        assert gate.reached.wait(30)
        write(tmp_path, {"reward_fn/rewards.py": HALF})
        # The request that was under way is made again with the new functions loaded.
        eventually(lambda: sum(chat.turn == 1 for chat in watch.endpoint.chats) >= 3)
        gate.open()
        line = watch.next()
        assert rewards(line) == [0.5, 0.5]
        assert line["iteration"]["trigger"] == ["reward_fn/rewards.py"]
        assert not watch.more()


@pytest.mark.in_process
def test_a_dataset_outside_the_repository(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(dataset("answer a"), encoding="utf-8")
    with watching(repository(tmp_path / "repo"), "-d", "../rows.jsonl") as watch:
        assert len(rewards(watch.next())) == 1
        line = watch.save({"../rows.jsonl": dataset("answer a", "answer b")})
        assert redone(line) == (1, 1, 0)
        assert line["iteration"]["trigger"] == ["../rows.jsonl"]


@pytest.mark.in_process
def test_settings_redo_everything(tmp_path: Path) -> None:
    reads = {
        "mcp/main.py": server('os.environ["VALUE"]', "import os\n"),
        ".env": "VALUE=1\n",
        ".gitignore": ".env\n",
        "configs/eval/run.toml": "[run]\n",
    }
    with watching(repository(tmp_path, reads)) as watch:
        assert rewards(watch.next()) == [1.0, 1.0]
        line = watch.save({".env": "VALUE=2\nOTHER=1\n"})
        assert (redone(line)[0], rewards(line), flipped(line)) == (2, [0.0, 0.0], ([], [0, 1]))
        assert line["iteration"]["trigger"] == [".env"]
        assert line["iteration"]["number"] == 2
        config = watch.save({"configs/eval/run.toml": "[run]\nname = 'x'\n"})
        assert redone(config)[0] == 2
        removed = watch.save({".env": None})
        assert rewards(removed) == [None, None] or rewards(removed) == [0.0, 0.0]
        watch.command.interrupt()
        assert watch.command.wait().code == 130


TOOL_MISTAKES = {
    "a syntax error": (server("("), "mcp/main.py", 9),
    "an import that fails": ("import no_such_module\n" + server('"1"'), "mcp/main.py", 1),
    "an exception": (server('"1"') + "\nraise RuntimeError('at import')\n", "mcp/main.py", 11),
    "a server that doesn't start": (
        server('"1"')
        .replace('"answers"', '"answers", lifespan=starts')
        .replace("mcp = F", "async def starts(_):\n    raise RuntimeError('no database')\n    yield\n\n\nmcp = F")
        .replace("async def", "from contextlib import asynccontextmanager\n\n\n@asynccontextmanager\nasync def"),
        "mcp/main.py",
        None,
    ),
    "no tool": ("from fastmcp import FastMCP\n\nmcp = FastMCP('empty')\n", "mcp/main.py", None),
}


def is_broken(line: dict[str, Any], file: str, number: int | None) -> None:
    """Check that a line reports an error at this place."""
    assert set(line) == {"error"}, line
    error = line["error"]
    assert set(error) == {"kind", "message", "file", "line", "excerpt"}
    assert "Traceback" not in error["message"]
    if number is not None:
        assert (error["file"], error["line"]) == (file, number), error
        assert f"> {number:4} | " in error["excerpt"]


@pytest.mark.in_process
def test_tools_that_are_broken_keep_the_last_results(tmp_path: Path) -> None:
    with watching(repository(tmp_path)) as watch:
        watch.next()
        asked = watch.requests()
        assert asked == 4
        for mistake, file, number in TOOL_MISTAKES.values():
            is_broken(watch.save({"mcp/main.py": mistake}), file, number)
            good = watch.save({"mcp/main.py": server('"1"')})
            assert rewards(good) == [1.0, 1.0]
            assert redone(good) == (0, 0, 0)
        assert watch.requests() == 0
        assert redone(watch.save({"reward_fn/rewards.py": HALF})) == (0, 2, 0)


@pytest.mark.in_process
def test_functions_and_rows_that_are_broken_keep_the_last_results(tmp_path: Path) -> None:
    with watching(repository(tmp_path)) as watch:
        watch.next()
        is_broken(watch.save({"reward_fn/rewards.py": REWARD + "\ndef broken(:\n"}), "reward_fn/rewards.py", 9)
        is_broken(watch.save({"reward_fn/rewards.py": "import no_such_module\n" + REWARD}), "reward_fn/rewards.py", 1)
        is_broken(
            watch.save({"reward_fn/rewards.py": REWARD.replace("solution_str: str", "solution_str: int")}), "", None
        )
        # Two mistakes at once, mended one after the other.
        is_broken(watch.save({"mcp/main.py": "import no_such_module\n"}), "mcp/main.py", 1)
        is_broken(watch.save({"mcp/main.py": server('"1"')}), "", None)
        assert redone(watch.save({"reward_fn/rewards.py": HALF})) == (0, 2, 0)
        for rows in ("{", "", '{"system_prompt": "s"}\n'):
            is_broken(watch.save({"test_data.jsonl": rows}), "", None)
        is_broken(watch.save({"test_data.jsonl": None}), "", None)
        assert rewards(watch.save({"test_data.jsonl": dataset("answer a", "answer b")})) == [0.5, 0.5]
        assert watch.requests() == 4


@pytest.mark.parametrize(
    ("command", "broken"),
    [
        ("test", {"mcp/main.py": "import no_such_module\n"}),
        ("eval", {"reward_fn/rewards.py": "def broken(:\n"}),
        ("test", {"test_data.jsonl": "{"}),
    ],
)
@pytest.mark.in_process
def test_a_repository_that_is_broken_from_the_start(
    command: str, broken: dict[str, str | None], tmp_path: Path
) -> None:
    whole = {"mcp/main.py": server('"1"'), "reward_fn/rewards.py": REWARD, "test_data.jsonl": dataset("answer")}
    with watching(repository(tmp_path, {**whole, **broken}), command=command) as watch:
        (file,) = broken
        is_broken(watch.next(), file, 1 if file.endswith(".py") else None)
        assert watch.endpoint.requests == []
        line = watch.save({file: whole[file]})
        assert redone(line) == (1, 1, 0)
        assert line["iteration"]["number"] == 1
        # And broken again, ended while it is.
        is_broken(watch.save(broken), file, 1 if file.endswith(".py") else None)
        watch.command.interrupt()
        assert watch.command.wait().code == 130


def test_what_no_save_can_mend_is_said_at_once(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        nobody = osmosis("test", "--watch", "--base-url", address, "--model", "m", cwd=repo)
    assert (nobody.code, nobody.stdout) == (2, "")
    assert address in nobody.stderr
    for options in (["--workers", "0"], ["--resume"], ["-d", "missing.jsonl"]):
        done = osmosis("test", "--watch", "--model", "offline/oracle", *options, cwd=repo)
        assert (done.code, done.stdout) == (2, ""), done
        assert done.stderr.startswith("error:")
    assert osmosis("eval", "--watch", "--eval-fn", "nothing", "--model", "offline/oracle", cwd=repo).code == 2


@contextmanager
def held(root: Path, *options: str) -> Iterator[tuple[Watching, Gate]]:
    """A command that is running its second iteration."""
    gate = Gate()

    def script(request: Request) -> Reply:
        last = request.messages[-1]
        reply = calls_the_tool(request)
        return reply.after(gate) if last["role"] == "tool" and last["content"] == "2" else reply

    with watching(repository(root), *options, script=script) as watch:
        watch.next()
        write(root, {"mcp/main.py": server('"2"')})
        assert gate.reached.wait(30)
        yield watch, gate


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_it(ended_by: signal.Signals, tmp_path: Path) -> None:
    with held(tmp_path) as (watch, _):
        os.kill(watch.command.process.pid, ended_by)
        # `wait` also waits for everything it started to end.
        finished = watch.command.wait()
        assert finished.code == (130 if ended_by == signal.SIGINT else -signal.SIGKILL)
        assert len(finished.stdout.splitlines()) == 1
        assert "Traceback" not in finished.stderr


@pytest.mark.in_process
def test_eval_with_several_runs_against_a_baseline(tmp_path: Path) -> None:
    def script(request: Request) -> Reply:
        return text("0") if request.model == "weak" else calls_the_tool(request)

    options = ("--n", "2", "--baseline-model", "weak", "--baseline-base-url", "{url}")
    with watching(repository(tmp_path), *options, script=script, command="eval") as watch:
        first = watch.next()
        assert first["config"]["baseline_model"] == "weak"
        assert redone(first) == (8, 8, 0)
        name = "reward_fn.rewards:exact"
        assert first["summary"]["eval_fns"][name]["mean"] == 1.0
        assert first["baseline"]["comparison"][name]["wins"] == 2
        assert watch.requests() == 12
        after = watch.save({"mcp/main.py": server('"2"')})
        # Four rollouts of the policy ask once more each; the baseline calls no tool, so nothing of it diverges.
        assert (redone(after), watch.requests()) == ((8, 8, 8), 4)
        assert after["baseline"]["comparison"][name]["ties"] == 2
        assert flipped(after) == ([], [0, 0, 1, 1])
        assert [flip["run_index"] for flip in after["iteration"]["flipped"]["failed"]] == [0, 1, 0, 1]
        assert redone(watch.save({"reward_fn/rewards.py": HALF})) == (0, 8, 0)


class Terminal:
    """The command on a terminal: screen output and key presses."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        import fcntl
        import pty
        import struct

        self._main, self.side = pty.openpty()
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
        self.settings = termios.tcgetattr(self.side)
        self._shown = b""
        self.process = subprocess.Popen(
            [str(COMMAND), *arguments],
            cwd=cwd,
            env=clean_environment(TERM="xterm-256color"),
            stdin=self.side,
            stdout=self.side,
            stderr=self.side,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while data := os.read(self._main, 65536):
                self._shown += data

    def press(self, key: str) -> None:
        os.write(self._main, key.encode())

    def since(self, mark: int) -> str:
        """Return the text shown since then, without colours."""
        import re

        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._shown[mark:].decode("utf-8", "replace"))

    def mark(self) -> int:
        return len(self._shown)

    def shows(self, *parts: str, since: int = 0) -> None:
        """Wait until it shows all of this."""
        eventually(lambda: all(part in self.since(since) for part in parts), lambda: self.since(since))

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.side)
        self._reader.join()
        os.close(self._main)


@contextmanager
def terminal(*arguments: str, cwd: Path) -> Iterator[Terminal]:
    screen = Terminal(*arguments, cwd=cwd)
    try:
        yield screen
    finally:
        screen.close()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_screen_and_its_keys(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    with ScriptedEndpoint(calls_the_tool).run_in_thread() as endpoint:
        options = ("test", "--watch", "--base-url", endpoint.url, "--model", "m", "--no-cache")
        with terminal(*options, cwd=repo) as screen:
            screen.shows("iteration 1: start", "reward_fn.rewards:exact", "1.000", "q quit")
            assert len(endpoint.chats) == 4

            mark = screen.mark()
            write(repo, {"reward_fn/rewards.py": HALF})
            screen.shows(
                "iteration 2: reward_fn/rewards.py", "-0.500", "exact: 2 now fail", "1.000 → 0.500", since=mark
            )
            screen.shows("2 rows below the pass threshold 1", "answer b  exact 0.500", since=mark)
            mark = screen.mark()
            screen.press("d")
            screen.shows("Use the tool.", "answer a", "iteration 2", since=mark)

            mark = screen.mark()
            write(repo, {"reward_fn/rewards.py": REWARD + "\ndef broken(:\n"})
            screen.shows("reward_fn/rewards.py:9", "def broken(:", "iteration 2", "last good", since=mark)
            mark = screen.mark()
            write(repo, {"reward_fn/rewards.py": HALF + "\n"})
            screen.shows("iteration 3", since=mark)
            assert len(endpoint.chats) == 4

            mark = screen.mark()
            screen.press("r")
            screen.shows("iteration 4: key r", "redone: 2 rollouts", since=mark)
            assert len(endpoint.chats) == 8
            mark = screen.mark()
            screen.press("f")
            screen.shows("iteration 5: key f", "redone: 2 rollouts", since=mark)
            assert len(endpoint.chats) == 12
            mark = screen.mark()
            write(repo, {"mcp/main.py": server('"1"') + '\n\n@mcp.tool\ndef more() -> str:\n    return ""\n'})
            screen.shows("iteration 6", "tools added: more", since=mark)

            assert termios.tcgetattr(screen.side) != screen.settings
            screen.press("q")
            assert screen.process.wait(30) == 0
            assert termios.tcgetattr(screen.side) == screen.settings
            # The cursor is shown again.
            assert screen._shown.rindex(b"\x1b[?25h") > screen._shown.rindex(b"\x1b[?25l")
            eventually(lambda: not _group(screen.process.pid))


def test_ctrl_c_gives_the_terminal_back(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    with terminal("test", "--watch", "--model", "offline/oracle", cwd=repo) as screen:
        screen.shows("iteration 1", "offline stand-in")
        screen.press("\x03")
        assert screen.process.wait(30) == 130
        assert termios.tcgetattr(screen.side) == screen.settings
        assert "Traceback" not in screen.since(0)


def _group(leader: int) -> list[int]:
    import psutil

    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(leader).children(recursive=True)]
    return []
