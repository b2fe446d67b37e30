"""A run never mixes two versions of the code, even if files are saved while it runs and its workers are replaced."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import stdio_tools
from commands import run_osmosis
from repos import write_repo

VERSIONED = '''
import os
from pathlib import Path

from fastmcp import FastMCP
from version import VERSION

mcp = FastMCP("versioned")
HERE = Path(__file__).parent


@mcp.tool
def version() -> int:
    """Return the version of the code."""
    return VERSION


@mcp.tool
def save() -> str:
    """Save new versions of this file, of a module that it imports, and of the reward function."""
    (HERE / "version.py").write_text("VERSION = 2\\n")
    main = Path(__file__)
    main.write_text(main.read_text().replace("return VERSION", "return -VERSION"))
    rewards = HERE.parent / "reward_fn" / "rewards.py"
    rewards.write_text(rewards.read_text().replace("0.25", "0.75"))
    return "saved"


@mcp.tool
def remove() -> str:
    """Remove a module."""
    (HERE / "version.py").unlink()
    return "removed"


@mcp.tool
def crash() -> str:
    """End this process."""
    os._exit(7)
'''

REWARDS = """
import os

from osmosis_ai import osmosis_reward


@osmosis_reward
def quarter(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    if solution_str == "crash the scorer":
        os._exit(8)
    return 0.25
"""

STDIO = (
    stdio_tools.PREAMBLE
    + '''
import os
import signal


def save_and_crash() -> None:
    """Save a new version of this file, and kill the worker that has started it."""
    with open(__file__, "a") as file:
        file.write("# changed\\n")
    os.kill(os.getppid(), signal.SIGKILL)


serve(save_and_crash)
'''
)
ALONE = ["--model", "offline/oracle", "--workers", "1", "--batch-size", "1", "-q"]


def calling(*steps: str) -> list[dict[str, Any]]:
    """A row for each step, which is a tool to call; the answer is the tool's result, or else the step."""
    return [
        {
            "system_prompt": "s",
            "user_prompt": step,
            "ground_truth": "x",
            "solution": [step] if " " in step else [{"tool": step, "arguments": {}}, "{{result[0]}}"],
        }
        for step in steps
    ]


def write_versioned(root: Path, *steps: str) -> Path:
    write_repo(root, main=VERSIONED, rewards=REWARDS, rows=calling(*steps))
    (root / "mcp" / "version.py").write_text("VERSION = 1\n", encoding="utf-8")
    return root


@pytest.mark.parametrize("isolation", ["session", "rollout"])
def test_a_replaced_worker_has_the_code_of_the_start(isolation: str, tmp_path: Path) -> None:
    root = write_versioned(tmp_path / "repo", "version", "save", "crash", "crash the scorer", "version")
    done = run_osmosis("eval", *ALONE, "--isolation", isolation, cwd=root)
    assert done.code == 1, done.stderr
    assert (
        "changed during the run: mcp/main.py, mcp/version.py, reward_fn/rewards.py; "
        "the results are those of the version loaded at the start"
    ) in done.stderr
    exported = run_osmosis("runs", "export", "-o", "-", cwd=root)
    rollouts = [json.loads(line) for line in exported.stdout.splitlines()]
    answers = [rollout["messages"][-1]["content"] for rollout in rollouts]
    assert (answers[0], answers[-1]) == ("1", "1")
    assert {rollout["reward"] for rollout in rollouts} == {0.25, None}


def test_without_the_code_of_the_start_a_run_is_interrupted(tmp_path: Path) -> None:
    root = write_versioned(tmp_path / "repo", "version", "remove", "crash", "version")
    done = run_osmosis("eval", *ALONE, cwd=root)
    assert done.code == 130, done.stderr
    assert "stopped: a worker was lost, and mcp/version.py changed since the start" in done.stderr
    assert "2 of 4 rollouts completed, 2 not run" in done.stdout
    # The version that the run started with can continue it.
    (root / "mcp" / "version.py").write_text("VERSION = 2\n", encoding="utf-8")
    refused = run_osmosis("eval", *ALONE, "--resume", cwd=root)
    assert refused.code == 2
    assert "the tools' code changed" in refused.stderr
    (root / "mcp" / "version.py").write_text("VERSION = 1\n", encoding="utf-8")
    resumed = run_osmosis("eval", *ALONE, "--resume", cwd=root)
    assert "3 of 4 rollouts completed, 1 failed" in resumed.stdout, resumed.stderr


def test_a_program_of_an_mcp_json_is_code_too(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rewards=REWARDS, rows=calling("save_and_crash", "save_and_crash"))
    (root / "server.py").write_text(STDIO, encoding="utf-8")
    servers = {"separate": {"command": sys.executable, "args": ["server.py"]}}
    (root / "mcp.json").write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    done = run_osmosis("eval", *ALONE, "--mcp", "mcp.json", cwd=root)
    assert done.code == 130, done.stderr
    assert "stopped: a worker was lost, and server.py changed since the start" in done.stderr
