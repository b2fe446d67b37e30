"""`--isolation`: rollouts share a worker, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import run_osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call
from repos import ADDING, write_repo

COUNTING = '''
from fastmcp import FastMCP

mcp = FastMCP("counting")
CALLS = []


@mcp.tool
def count() -> int:
    """Count the calls of this process."""
    CALLS.append(1)
    return len(CALLS)
'''


@pytest.mark.parametrize(("isolation", "counts"), [("session", [1, 2, 3, 4]), ("rollout", [1, 1, 1, 1])])
def test_isolation_decides_whether_globals_start_fresh(isolation: str, counts: list[int], tmp_path: Path) -> None:
    rows = [{"system_prompt": "s", "user_prompt": "u", "ground_truth": str(count)} for count in counts]
    root = write_repo(tmp_path / "repo", main=COUNTING, rows=rows)

    def script(request: Request) -> Reply:
        return tool_call("count") if request.turn == 0 else text(request.messages[-1]["content"])

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--workers", "1", "--batch-size", "1"]
        done = run_osmosis("test", *model, "--isolation", isolation, "--json", "-q", cwd=root)
        assert [result["reward"] for result in done.json["results"]] == [1.0] * 4, done.stdout


STOPPING = '''
import os
import signal

from fastmcp import FastMCP

mcp = FastMCP("stopping")


@mcp.tool
def stop() -> str:
    """Stop the process that this one was forked from."""
    os.kill(os.getppid(), signal.SIGSTOP)
    return "stopped"
'''


def test_a_stopped_process_that_forks_for_each_rollout_goes_on(tmp_path: Path) -> None:
    stop = {"system_prompt": "s", "user_prompt": "u", "solution": [{"tool": "stop", "arguments": {}}, "done"]}
    root = write_repo(tmp_path / "repo", main=STOPPING, rewards=None, rows=[stop] * 4)
    offline = ["--model", "offline/oracle", "--batch-size", "1", "-q"]
    done = run_osmosis("test", *offline, "--isolation", "rollout", cwd=root)
    assert "4 of 4 rollouts completed" in done.stdout, done.stderr


LOOKING = """
import os
import sys
from pathlib import Path


def look() -> None:
    with Path("forked").open("a") as file:
        file.write(f"{'litellm' in sys.modules}\\n")


os.register_at_fork(after_in_child=look)
"""


def test_what_the_model_needs_is_imported_once_and_not_for_each_rollout(tmp_path: Path) -> None:
    """This holds even if only `.env` names the model, so that the fork server could not know it."""
    root = write_repo(tmp_path / "repo", main=LOOKING + ADDING)

    def script(request: Request) -> Reply:
        return tool_call("add", a=1, b=2) if request.turn == 0 else text("3")

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        env = f"OSMOSIS_MODEL=openai/scripted\nOPENAI_API_KEY=sk-1\nOPENAI_API_BASE={endpoint.url}\n"
        (root / ".env").write_text(env, encoding="utf-8")
        done = run_osmosis("test", "--isolation", "rollout", "--json", "-q", cwd=root)
        assert [result["error"] for result in done.json["results"]] == [None] * 3
    forked = (root / "forked").read_text(encoding="utf-8").split()
    assert len(forked) >= 3
    assert set(forked) == {"True"}


def test_tools_are_not_told_where_the_store_is(tmp_path: Path) -> None:
    main = (
        ADDING
        + """
import os


@mcp.tool
def told() -> str:
    \"\"\"Say what the environment says of the store.\"\"\"
    return repr([value for value in os.environ.values() if "kept-elsewhere" in value])
"""
    )
    root = write_repo(tmp_path / "repo", main=main, rows=[{"system_prompt": "s", "user_prompt": "u"}])

    def script(request: Request) -> Reply:
        return tool_call("told") if request.turn == 0 else text(request.messages[-1]["content"])

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--workers", "1"]
        run_osmosis("test", *model, cwd=root, env={"OSMOSIS_STORE": str(tmp_path / "kept-elsewhere")})
        assert (tmp_path / "kept-elsewhere" / "runs.db").is_file()
        (end,) = [request.messages[-1]["content"] for request in endpoint.requests if request.turn == 1]
    assert end == "[]"
