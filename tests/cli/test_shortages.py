"""What the system lacks for a moment costs time, and no rollout or score."""

from __future__ import annotations

from pathlib import Path

from commands import run_osmosis
from repos import write_repo

# A thread with such a stack can't be started.
NO_THREADS = "threading.stack_size(1 << 46)"

REWARDS = f"""
import threading
from pathlib import Path

from osmosis_ai import osmosis_reward


@osmosis_reward
async def a_first(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    if not Path("seen").exists():
        Path("seen").touch()
        {NO_THREADS}
    return 1.0


@osmosis_reward
def in_a_thread(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0
"""

TOOLS = f'''
import asyncio
import threading

from fastmcp import FastMCP

mcp = FastMCP("threads")
TASKS = []


async def later() -> None:
    await asyncio.sleep(0.3)
    threading.stack_size(0)


@mcp.tool
async def take_threads() -> str:
    """Let no thread start for a while."""
    {NO_THREADS}
    TASKS.append(asyncio.create_task(later()))
    return "taken"


@mcp.tool
def in_a_thread() -> str:
    """Run in a thread."""
    return "run"
'''


def test_a_score_that_gets_no_thread_is_made_by_another_worker(tmp_path: Path) -> None:
    row = {"system_prompt": "s", "user_prompt": "u", "ground_truth": "x"}
    root = write_repo(tmp_path / "repo", rewards=REWARDS, rows=[row])
    done = run_osmosis("eval", "--model", "offline/oracle", "--workers", "1", "--json", "-q", cwd=root)
    assert (done.code, done.json["summary"]["scoring_errors"]) == (0, 0), done.stderr
    assert "some workers start later: the system allows no more processes and threads" in done.stderr


def test_a_tool_that_gets_no_thread_is_called_again(tmp_path: Path) -> None:
    calls = [{"tool": "take_threads", "arguments": {}}, {"tool": "in_a_thread", "arguments": {}}, "done"]
    row = {"system_prompt": "s", "user_prompt": "u", "solution": calls}
    root = write_repo(tmp_path / "repo", main=TOOLS, rewards=None, rows=[row])
    done = run_osmosis("test", "--model", "offline/oracle", "--workers", "1", "--json", "-q", cwd=root)
    assert done.json["summary"]["tools"]["in_a_thread"]["errors"] == {}, done.stdout
