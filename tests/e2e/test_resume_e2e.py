"""Resume continues an interrupted run where it stopped, but refuses a run with different options."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import Command, Finished, run_osmosis
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, status, text, tool_call
from repos import EXACT, write_repo
from running import run_whole, running

FUNCTION = "reward_fn.rewards:exact"
ROWS = [
    {"system_prompt": "s", "user_prompt": f"What is {number} + 1?", "ground_truth": str(number + 1)}
    for number in range(8)
]


def add_one(request: Request) -> Reply:
    """A model that adds with the tool, and gets every fourth row wrong."""
    number = int(request.messages[1]["content"].split()[2])
    if request.turn == 0:
        return tool_call("add", a=number, b=1)
    return text("wrong" if number % 4 == 3 else request.messages[-1]["content"])


def asked(endpoint: ScriptedEndpoint) -> list[str]:
    """The prompts of the started rollouts."""
    return sorted(request.messages[1]["content"] for request in endpoint.chats if request.turn == 0)


def held_from(number: int, gate: Gate, script: Callable[[Request], Reply] = add_one) -> Callable[[Request], Reply]:
    """The same model, except that rows from this one on get no answer while the gate is shut."""

    def held(request: Request) -> Reply:
        reply = script(request)
        return reply.after(gate) if int(request.messages[1]["content"].split()[2]) >= number else reply

    return held


def scores_in(store: Path) -> int:
    """Count the scores that are durable."""
    with closing(sqlite3.connect(store)) as db:
        return int(db.execute("SELECT count(*) FROM scores").fetchone()[0])


@contextmanager
def started(root: Path, endpoint: ScriptedEndpoint, done: int, in_flight: int, *options: str) -> Iterator[Command]:
    """Start a run, and wait until this many rollouts are recorded and this many held by the endpoint."""
    model = ["--base-url", endpoint.url, "--model", "scripted", "--batch-size", str(in_flight)]
    with running("eval", *model, *options, cwd=root) as command:
        # A slot asks for its next rollout only when its last one is durable.
        command.until(lambda: len(asked(endpoint)) == done + in_flight)
        yield command


def kill_at(root: Path, endpoint: ScriptedEndpoint, done: int, in_flight: int, *options: str) -> None:
    """Kill a run at this point."""
    with started(root, endpoint, done, in_flight, *options) as command:
        command.process.kill()
        command.wait()


def interrupt_at(root: Path, endpoint: ScriptedEndpoint, gate: Gate, done: int, in_flight: int) -> None:
    """Interrupt a run at this point, and let what is held by the gate finish."""
    with started(root, endpoint, done, in_flight) as command:
        command.interrupt()
        gate.open()
        assert command.wait().code == 130


def comparable(done: Finished) -> dict[str, Any]:
    """Return a run's results without the parts that differ between runs."""
    found = done.json
    for part in ("run_id", "dataset", "base_url"):
        del found["config"][part]
    for part in ("total_duration_ms", "wall_ms", "tools"):
        del found["summary"][part]
    for row in found["rows"]:
        for run in row["runs"]:
            del run["duration_ms"]
    return found


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = write_repo(tmp_path / "whole", rows=ROWS)
    cut = write_repo(tmp_path / "cut", rows=ROWS)
    gate = Gate()
    with (
        ScriptedEndpoint(add_one).run_in_thread() as steady,
        ScriptedEndpoint(held_from(3, gate)).run_in_thread() as endpoint,
    ):
        kill_at(cut, endpoint, 6, 4, "--n", "2")
        gate.open()
        before = asked(endpoint)
        options = ["--model", "scripted", "--n", "2", "--json"]
        resumed = run_osmosis("eval", "--base-url", endpoint.url, *options, "--resume", cwd=cut)
        uninterrupted = run_osmosis("eval", "--base-url", steady.url, *options, cwd=whole)
        assert comparable(resumed) == comparable(uninterrupted)
        assert "resuming run" in resumed.stderr
        # Only the four that were in flight were asked for again.
        assert len(before) == 6 + 4
        assert len(asked(endpoint)) == 16 + 4
        # What is finished is not resumed.
        again = run_osmosis("eval", "--base-url", endpoint.url, *options, "--resume", cwd=cut)
        assert (again.code, again.stdout) == (2, "")
        assert "no unfinished run" in again.stderr


def replace(file: str, old: str, new: str) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        text = (root / file).read_text(encoding="utf-8")
        assert old in text
        (root / file).write_text(text.replace(old, new), encoding="utf-8")

    return change


@pytest.mark.in_process
def test_changed_rows_and_tools_are_refused_and_told(tmp_path: Path) -> None:
    cut = write_repo(tmp_path / "cut", rows=ROWS)
    gate = Gate()
    with ScriptedEndpoint(held_from(3, gate)).run_in_thread() as endpoint:
        interrupt_at(cut, endpoint, gate, 3, 2)
        before = len(endpoint.chats)
        replace("test_data.jsonl", "What is 7", "What's 7")(cut)
        replace("mcp/main.py", "return a + b", "return b + a")(cut)
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        done = run_whole("eval", *model, "--resume", "-q", cwd=cut)
        assert (done.code, done.stdout, len(endpoint.chats)) == (2, "", before)
    assert "the dataset's content changed, the tools' code changed;" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.in_process
def test_other_reward_code_scores_again_and_asks_no_model(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rows=ROWS)
    gate = Gate()
    with ScriptedEndpoint(held_from(3, gate)).run_in_thread() as endpoint:
        interrupt_at(root, endpoint, gate, 3, 2)
        before = asked(endpoint)
        (root / "reward_fn" / "rewards.py").write_text(EXACT.replace("else 0.0", "else 0.25"), encoding="utf-8")
        replace("reward_fn/rewards.py", "return 1.0", "return 0.75")(root)
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        done = run_whole("eval", *model, "--resume", "--json", cwd=root)
        scores = [row["runs"][0]["scores"][FUNCTION] for row in done.json["rows"]]
        assert scores == [0.25 if number % 4 == 3 else 0.75 for number in range(8)]
        again = asked(endpoint)
        for prompt in before:
            assert again.count(prompt) == 1


def test_failed_rollouts_are_run_again_when_asked(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rows=ROWS)
    refused: list[str] = []

    def script(request: Request) -> Reply:
        prompt = request.messages[1]["content"]
        if prompt in ("What is 2 + 1?", "What is 5 + 1?") and refused.count(prompt) < 1:
            refused.append(prompt)
            return status(400)
        return add_one(request)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted", "--json"]
        first = run_osmosis("eval", *options, cwd=root)
        assert (first.code, first.json["summary"]["failed"]) == (1, 2)
        before = len(asked(endpoint))
        second = run_osmosis("eval", *options, "--retry-failed", cwd=root)
        assert (second.code, second.json["summary"]["failed"]) == (0, 0)
        assert second.json["config"]["run_id"] == first.json["config"]["run_id"]
        assert len(asked(endpoint)) == before + 2
        scores = [row["runs"][0]["scores"][FUNCTION] for row in second.json["rows"]]
        assert scores == [0.0 if number % 4 == 3 else 1.0 for number in range(8)]


def test_a_named_run_is_resumed_and_others_are_left_alone(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rows=ROWS)
    gate = Gate()
    with ScriptedEndpoint(held_from(3, gate)).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted"]
        kill_at(root, endpoint, 3, 2)
        kill_at(root, endpoint, 5 + 3, 2)
        gate.open()
        newer, older = run_osmosis("runs", "--json", cwd=root).json["runs"]
        assert [newer["status"], older["status"]] == ["killed", "killed"]
        done = run_osmosis("eval", *options, "--resume-run", older["id"][:-1], "--json", cwd=root)
        assert done.json["config"]["run_id"] == older["id"]
        assert done.json["summary"]["missing"] == 0
        runs = run_osmosis("runs", "--json", cwd=root).json["runs"]
        assert [(run["id"], run["status"]) for run in runs] == [(newer["id"], "killed"), (older["id"], "finished")]


def test_two_runs_at_once_in_one_repository_that_git_does_not_see(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rows=ROWS)
    git = functools.partial(subprocess.run, cwd=root, check=True, capture_output=True, encoding="utf-8")
    git(["git", "init", "-q"])
    # The bytecode of the repository's own modules is not osmosis's business.
    (root / ".gitignore").write_text("__pycache__/\n", encoding="utf-8")
    git(["git", "add", "."])
    git(["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "rows"])
    gate = Gate()
    with ScriptedEndpoint(held_from(0, gate)).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted", "--json", "--batch-size", "4"]
        with running("eval", *options, cwd=root) as first, running("eval", *options, cwd=root) as second:
            first.until(lambda: len(endpoint.chats) == 8)
            # What another process is running can't be resumed.
            resumed = run_osmosis("eval", *options, "--resume", cwd=root)
            assert resumed.code == 2
            assert "no unfinished run" in resumed.stderr
            gate.open()
            ended = [first.wait(), second.wait()]
        for done in ended:
            assert done.code == 0, done.stderr
            assert (done.json["summary"]["missing"], done.json["summary"]["eval_fns"][FUNCTION]["mean"]) == (0, 0.75)
        assert len({done.json["config"]["run_id"] for done in ended}) == 2
        assert len(asked(endpoint)) == 16
    assert git(["git", "status", "--porcelain"]).stdout == ""


@pytest.mark.in_process
def test_a_run_whose_store_is_removed_stops_and_goes_on_from_a_copy(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rows=ROWS)
    gate = Gate()
    with ScriptedEndpoint(held_from(4, gate)).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted", "--json"]
        results = root / "results.json"
        with running("eval", *options, "--batch-size", "2", "-o", results, cwd=root) as command:
            command.until(lambda: len(asked(endpoint)) == 6 and scores_in(root / ".osmosis/runs.db") == 4)
            shutil.rmtree(root / ".osmosis")
            gate.open()
            done = command.wait()
        assert (done.code, done.stdout) == (1, ""), done.stderr
        assert "the file was removed or replaced while saving" in done.stderr
        assert "Traceback" not in done.stderr
        assert not results.exists()
        # The two in flight ended, perhaps one of the next two began.
        assert len(asked(endpoint)) <= 7
        (copy,) = (root / ".osmosis").glob("recovered-*")
        (run,) = run_whole("runs", "--json", "--store", copy, cwd=root).json["runs"]
        assert run["status"] == "interrupted"
        assert run["rollouts"] >= 5
        before = len(asked(endpoint))
        resumed = run_whole("eval", *options, "--resume", "--store", copy, cwd=root)
        assert (resumed.code, resumed.json["summary"]["missing"]) == (0, 0), resumed.stderr
        assert len(asked(endpoint)) == before + 8 - run["rollouts"]


@pytest.mark.in_process
@pytest.mark.parametrize("edit", ["the same length", "another length", "removed"])
def test_a_dataset_that_changes_during_a_run_does_not_change_the_run(edit: str, tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rows=ROWS)
    data = root / "test_data.jsonl"
    before = data.read_bytes()
    gate = Gate()
    with ScriptedEndpoint(held_from(2, gate)).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted", "--json"]
        with running("eval", *options, "--batch-size", "2", cwd=root) as command:
            command.until(lambda: len(asked(endpoint)) == 4)
            if edit == "removed":
                data.unlink()
            else:
                # In place, as many editors save.
                same = re.sub(rb'"ground_truth": "."', b'"ground_truth": "x"', before)
                data.write_bytes(same if edit == "the same length" else before.replace(b"{", b"not JSON"))
            gate.open()
            done = command.wait()
        assert (done.code, done.json["summary"]["missing"]) == (0, 0), done.stderr
        assert done.json["summary"]["eval_fns"][FUNCTION]["mean"] == 0.75
        assert done.json["summary"]["changed_files"] == ["test_data.jsonl"]
        assert "changed during the run: test_data.jsonl; the results are those of" in done.stderr


@pytest.mark.in_process
def test_an_interrupted_run_whose_dataset_changed_says_so_when_it_is_resumed(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rows=ROWS)
    gate = Gate()
    with ScriptedEndpoint(held_from(2, gate)).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted"]
        with running("eval", *options, "--batch-size", "2", cwd=root) as command:
            command.until(lambda: len(asked(endpoint)) == 4)
            (root / "test_data.jsonl").write_text("not JSON", encoding="utf-8")
            command.interrupt()
            gate.open()
            done = command.wait()
        assert done.code == 130, done.stderr
        assert "changed during the run: test_data.jsonl" in done.stderr
        (root / "test_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:7]), encoding="utf-8")
        again = run_whole("eval", *options, "--resume", "-q", cwd=root)
        assert (again.code, again.stdout) == (2, "")
        assert "the dataset's content changed" in again.stderr
