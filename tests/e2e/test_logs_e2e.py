"""User code's output goes to the run's log with its row, and nowhere else without `--debug`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import run_osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call
from repos import write_repo
from running import run_whole

KEY = "sk-a-key-that-nobody-may-see"

PRINTING = f'''
import os
import subprocess
import sys

from fastmcp import FastMCP

mcp = FastMCP("printing")
print("loading the tools")
print("no end of line", end="")


@mcp.tool
def add(a: int, b: int) -> int:
    """Print and add."""
    print(f"adding {{a}} and", end=" ")
    print(b)
    print("careful", file=sys.stderr)
    os.write(1, b"from below python\\n")
    subprocess.run(["sh", "-c", "echo from a child >&2"])
    print("the key is {KEY}, also", os.environ["SECRET_API_KEY"])
    print("unfinished", end="")
    if a == 5:
        print()
        print("last words")
        os._exit(1)
    return a + b
'''
REWARDS = """
from osmosis_ai import osmosis_reward

print("loading the functions")


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    print(f"scoring {solution_str}")
    return 1.0 if solution_str.strip() == ground_truth else 0.0
"""


def add(request: Request) -> Reply:
    if request.turn > 0:
        return text(request.messages[-1]["content"])
    words = request.messages[1]["content"].split()
    return tool_call("add", a=int(words[2]), b=int(words[4].strip("?")))


@pytest.mark.parametrize("isolation", ["session", "rollout"])
@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["", "debug"])
def test_output_is_logged_with_its_row(isolation: str, debug: list[str], tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=PRINTING, rewards=REWARDS)
    with ScriptedEndpoint(add).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted", "--api-key", KEY, "--isolation", isolation]
        # With --debug, output goes to the terminal that the workers' own fork server has.
        run = run_whole if debug else run_osmosis
        done = run("test", *options, *debug, "--json", cwd=root, env={"SECRET_API_KEY": "another-secret-value"})
    assert [row["reward"] for row in done.json["results"]] == [1.0, 1.0, None]
    (file,) = (root / ".osmosis" / "logs").glob("*.log")
    log = file.read_text(encoding="utf-8")
    lines = log.splitlines()
    for row, (a, b) in enumerate([(1, 2), (3, 4)]):
        assert f"[row {row} run 0 stdout] adding {a} and {b}" in lines
        assert f"[row {row} run 0 stderr] careful" in lines
        assert f"[row {row} run 0 stdout] the key is [masked], also [masked]" in lines
        assert f"[row {row} run 0 stdout] unfinished" in lines
        assert f"[row {row} scores stdout] scoring {a + b}" in lines
    assert "[row 2 run 0 stdout] last words" in lines
    # Those of the third row may be lost with the process.
    assert len(re.findall(r"^\[worker \d+ stdout\] from below python$", log, re.MULTILINE)) >= 2
    assert len(re.findall(r"^\[worker \d+ stderr\] from a child$", log, re.MULTILINE)) >= 2
    assert re.search(r"^\[worker \d+ (stdout|output)\] no end of line$", log, re.MULTILINE)
    assert re.search(r"^\[worker \d+ (stdout|output)\] loading the tools$", log, re.MULTILINE)
    assert re.search(r"^\[worker \d+ (stdout|output)\] loading the functions$", log, re.MULTILINE)
    assert file.stat().st_mode & 0o077 == 0

    for secret in (KEY, "another-secret-value"):
        assert secret not in log + done.stdout + done.stderr
    shown = set(lines) & set(done.stderr.splitlines())
    if debug:
        # The third row's process may end itself while a line is on its way from the log to the terminal.
        lost = [line for line in lines if line not in shown]
        assert all(re.fullmatch(r"\[worker \d+ std(out|err)\] from (below python|a child)", line) for line in lost), (
            lost
        )
    else:
        assert not shown
        assert "adding" not in done.stderr


def test_without_workers_output_goes_to_stderr(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=PRINTING.replace("os._exit(1)", "pass"), rewards=REWARDS)
    with ScriptedEndpoint(add).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted", "--workers", "0", "--json", "-q"]
        done = run_whole("test", *options, cwd=root, env={"SECRET_API_KEY": "another-secret-value"})
    assert [row["reward"] for row in done.json["results"]] == [1.0, 1.0, 1.0]
    for line in ("loading the tools", "adding 1 and 2", "from below python", "from a child", "scoring 7"):
        assert line in done.stderr
