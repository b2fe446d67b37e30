"""The pytest plugin in real runs of pytest: what passes, what fails and how, recordings, and its cost to others."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import clean_environment
from osmosis_ai.pytest_plugin.rollouts import Call, Calls
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call
from repos import write_repo
from waiting import PATIENCE, eventually

TESTS = '''
import asyncio

import pytest

from osmosis_ai.testing import by_turn, text, tool_call

WRONG = by_turn(tool_call("add", a=1, b=2), text("4"))


def test_tools(tools):
    assert tools.names == ["add"]
    assert tools.call("add", a=1, b=2) == "3"
    assert tools.call("add", '{"a": 1, "b": "x"}').error == "schema"
    assert tools.call("add", a=1, b=2).failure is None
    assert tools.call("subtract").error == "unknown_tool"
    assert sorted(tools.schema("add")["required"]) == ["a", "b"]
    assert tools.description("add") == "Add two numbers."


def test_failing_tool(tools):
    result = tools.call("add", a=0, b=0)
    assert result.error == "exception"
    assert (result.failure.file, result.failure.message) == ("mcp/main.py", "ValueError: nothing to add")


def test_patched(tools, monkeypatch):
    import main

    monkeypatch.setattr(main, "EXTRA", 40)
    assert tools.call("add", a=1, b=2) == "43"


def test_each_test_has_its_own_session(tools):
    async def called_from_a_loop():
        return tools.call("add", a=1, b=1)

    assert asyncio.run(called_from_a_loop()) == "2"


@pytest.mark.osmosis(model=by_turn(tool_call("add", a=1, b=2), text("3")))
def test_rollout(rollout):
    r = rollout(row=0)
    assert r.calls == [("add", {"a": 1, "b": 2})]
    assert {"add"} <= r.calls.names
    assert r.calls["add"][0].result == "3"
    assert (r.finish, r.turns, r.failure, r.answer) == ("stop", 2, None, "3")
    assert r.score("exact") == 1.0
    assert [message["role"] for message in r.messages] == ["system", "user", "assistant", "tool", "assistant"]
    mine = rollout(user="What is 1 + 2?", ground_truth="4")
    assert mine.score("exact") == 0.0


@pytest.mark.osmosis(model=WRONG)
def test_wrong_answer(rollout):
    assert rollout(row=0).score("exact") == 1.0


@pytest.mark.osmosis(model=WRONG, rows=[{"system_prompt": "s", "user_prompt": "u", "ground_truth": "4"}])
def test_rows_of_the_mark(rollout):
    assert rollout().score("exact") == 1.0


class Sometimes:
    """Right for the even rows, in whatever order the rollouts arrive."""

    def __call__(self, request):
        return text("3" if request.messages[0]["content"] in ("row 0", "row 2") else "4")


ROWS = [{"system_prompt": f"row {i}", "user_prompt": "What is 1 + 2?", "ground_truth": "3"} for i in range(4)]


@pytest.mark.osmosis(rows=ROWS)
def test_thresholds(evaluate):
    good = evaluate(model=by_turn(text("3")), n=2)
    good.assert_at_least("exact", 0.4)
    bad = evaluate(model=by_turn(text("4")), n=2)
    with pytest.raises(pytest.fail.Exception, match=r"below 0\\.9\\nto see it: osmosis runs show"):
        bad.assert_at_least("exact", 0.9)
    unsure = evaluate(model=Sometimes(), n=1)
    with pytest.raises(pytest.fail.Exception, match=r"4 rows × 2: undecided about 0\\.5"):
        unsure.assert_at_least("exact", 0.5, max_n=2)
    good.assert_not_worse_than(bad)
    with pytest.raises(pytest.fail.Exception, match="exact: worse by 1.000 on 4 rows"):
        bad.assert_not_worse_than(good)


@pytest.mark.osmosis(model=WRONG)
def test_subtests(evaluate):
    evaluate(limit=1, subtests=True)
'''
RECORDED = """
import pytest


@pytest.mark.osmosis(model="scripted", base_url="{url}")
@pytest.mark.parametrize("row", [0, 1])
def test_recorded(rollout, row):
    assert rollout(row=row).score("exact") == 1.0
"""
MAIN = '''
from fastmcp import FastMCP

EXTRA = 0
mcp = FastMCP("adding")


@mcp.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a == b == 0:
        raise ValueError("nothing to add")
    return a + b + EXTRA
'''


def run_pytest(repo: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a repository, as its users do: with the plugins that are installed."""
    # Another run of pytest would remove the folder that it chooses itself, sooner or later.
    folder = f"--basetemp={repo.parent / 'base'}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    command += ["-rA", "--tb=short", folder, *arguments]
    environ = {**clean_environment(), "CI": "", "PYTEST_ADDOPTS": "", "OSMOSIS_WORKERS": "1", **env}
    return subprocess.run(command, cwd=repo, env=environ, capture_output=True, encoding="utf-8", timeout=180)


def outcomes(output: str) -> dict[str, str]:
    return dict(reversed(pair) for pair in re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(\S+)", output, re.MULTILINE))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    repo = write_repo(tmp_path / "repo", main=MAIN)
    (repo / "tests").mkdir()
    return repo


def test_fixtures_in_one_run(project: Path) -> None:
    (project / "tests" / "test_adding.py").write_text(TESTS, encoding="utf-8")
    done = run_pytest(project)
    found = outcomes(done.stdout)
    failed = {name for name, outcome in found.items() if outcome != "PASSED"}
    expected = {"test_wrong_answer"} | ({"test_subtests"} if int(pytest.__version__.split(".")[0]) >= 9 else set())
    assert failed == expected, done.stdout
    assert len(found) == 9
    # The failing test shows its rollout, and the command that opens it.
    shown = done.stdout.partition("osmosis rollout")[2]
    assert '→ add {"a":1,"b":2}' in shown
    assert "score reward_fn.rewards:exact: 0.000" in shown
    command = re.search(r"to see it: osmosis (runs show \S+ --row 0 --store (\S+))", shown)
    assert command is not None
    assert Path(command[2], "runs.db").is_file()
    # Nothing is left in the repository.
    assert not (project / ".osmosis").exists()


def adding(request: Request) -> Reply:
    if request.turn:
        return text(request.messages[-1]["content"])
    a, b = request.messages[1]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
    return tool_call("add", a=int(a), b=int(b))


def test_recordings_are_made_replayed_and_missed(project: Path) -> None:
    file = project / "tests" / "test_recorded.py"
    with ScriptedEndpoint(adding).run_in_thread() as endpoint:
        file.write_text(RECORDED.format(url=endpoint.url), encoding="utf-8")
        unrecorded = run_pytest(project)
        assert "there are no recordings in tests/cassettes/test_recorded/test_recorded_0_.jsonl" in unrecorded.stdout
        assert "pytest 'tests/test_recorded.py::test_recorded[0]' --osmosis-record=new" in unrecorded.stdout
        assert not endpoint.requests
        # A setting for everybody records nothing in CI.
        in_ci = run_pytest(project, CI="true", PYTEST_ADDOPTS="--osmosis-record=new")
        assert set(outcomes(in_ci.stdout).values()) == {"FAILED"}
        assert not endpoint.requests
        recorded = run_pytest(project, "--osmosis-record=new", "-n", "2")
        assert recorded.returncode == 0, recorded.stdout
        cassettes = project / "tests" / "cassettes" / "test_recorded"
        first = cassettes / "test_recorded_0_.jsonl"
        kept, asked = first.read_text(encoding="utf-8"), len(endpoint.requests)
        first.write_text(kept + (cassettes / "test_recorded_1_.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
        # What another test recorded is asked for by none, and goes.
        anew = run_pytest(project, "--osmosis-record=all", "--osmosis-keep", "-k", "0")
        assert anew.returncode == 0, anew.stdout
        assert first.read_text(encoding="utf-8").count("\n") == kept.count("\n")
        assert len(endpoint.requests) > asked
        assert (project / ".osmosis" / "runs.db").is_file()
    assert len(list(cassettes.iterdir())) == 2

    changed = cassettes / "test_recorded_1_.jsonl"
    changed.write_bytes(changed.read_bytes() + (cassettes / "test_recorded_0_.jsonl").read_bytes())
    replayed = run_pytest(project, "-n", "2")
    assert replayed.returncode == 0, replayed.stdout
    assert "osmosis: 2 recordings in test_recorded_1_.jsonl were not used" in replayed.stdout

    main = project / "mcp" / "main.py"
    main.write_text(MAIN.replace("EXTRA = 0", "EXTRA = 1"), encoding="utf-8")
    missed = run_pytest(project, "-k", "0")
    assert missed.returncode == 1
    assert 'messages[3] differs: recorded "3", now "4"; record it with: pytest' in missed.stdout
    assert "not used" not in missed.stdout


def test_rollouts_are_shown_in_the_browser_until_ctrl_c(project: Path) -> None:
    shown, log = project.parent / "opened", project.parent / "log"
    browser = project.parent / "browser"
    browser.write_text(f'#!/bin/sh\ncp "${{1#file://}}" {shown}.new && mv {shown}.new {shown}\n', encoding="utf-8")
    browser.chmod(0o755)
    (project / "tests" / "test_one.py").write_text(
        "def test_one(rollout):\n    rollout(row=0).score('exact')\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pytest", "--osmosis-view", f"--basetemp={project.parent / 'base'}"]
    environ = {**clean_environment(), "PYTEST_ADDOPTS": "", "BROWSER": str(browser), "DISPLAY": ":9"}
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=project, env=environ, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            eventually(shown.exists, lambda: log.read_text(encoding="utf-8"))
            assert "http://127.0.0.1:" in shown.read_text(encoding="utf-8")
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(PATIENCE) == 0, log.read_text(encoding="utf-8")
        finally:
            process.kill()
    assert "1 passed" in log.read_text(encoding="utf-8")
    assert "Traceback" not in log.read_text(encoding="utf-8")


def test_calls_of_a_tool_that_was_not_called_say_what_was() -> None:
    calls = Calls([Call("add", {"a": 1}, "1", None)])
    assert calls["add"][0].result == "1"
    assert not calls["price"]
    with pytest.raises(IndexError, match="price was not called; called: add"):
        calls["price"][0]
    with pytest.raises(IndexError, match="add was called 1 time"):
        calls["add"][1]


def test_a_repository_that_cannot_be_loaded_fails_in_a_line(project: Path) -> None:
    (project / "tests" / "test_broken.py").write_text("def test_broken(tools): ...\n", encoding="utf-8")
    (project / "mcp" / "main.py").write_text("import nothing_like_it\n", encoding="utf-8")
    done = run_pytest(project)
    assert "mcp/main.py:1: ModuleNotFoundError: No module named 'nothing_like_it'" in done.stdout
    assert "harness.py" not in done.stdout
    shutil.rmtree(project / "mcp")
    assert "there is no mcp folder in" in run_pytest(project).stdout


def test_the_plugin_imports_nothing_until_a_fixture_is_used() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import osmosis_ai.pytest_plugin; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split() == ["osmosis_ai", "osmosis_ai.pytest_plugin"]
