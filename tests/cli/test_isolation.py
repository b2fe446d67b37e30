"""`--isolation`: rollouts share a worker, or nothing."""

from __future__ import annotations

import sys
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


SEARCHING = """
import re
from pathlib import Path

PLACE = re.compile(b"kept-elsewher[e]/run[s][.]db")


def look():
    places = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights, *_ = line.split()
            start, end = (int(part, 16) for part in area.split("-"))
            if rights.startswith("rw"):
                memory.seek(start)
                places += map(bytes.decode, PLACE.findall(memory.read(end - start)))
    return [place for place in places if "runs.db" in place]
"""
SEEING = f"""
from __future__ import annotations

from osmosis_ai import osmosis_reward

{SEARCHING}

@osmosis_reward
def unseen(solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs) -> float:
    found = look()
    assert not found, found
    return float(solution_str == "[]")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads its memory in /proc")
@pytest.mark.parametrize("isolation", ["session", "rollout"])
def test_no_process_with_user_code_knows_the_stores_file(isolation: str, tmp_path: Path) -> None:
    main = f'{ADDING}{SEARCHING}\n\n@mcp.tool\ndef seen() -> str:\n    """Look."""\n    return repr(look())\n'
    rows = [{"system_prompt": "s", "user_prompt": "u", "ground_truth": "[]"}]
    root = write_repo(tmp_path / "repo", main=main, rewards=SEEING, rows=rows)

    def script(request: Request) -> Reply:
        return tool_call("seen") if request.turn == 0 else text(request.messages[-1]["content"])

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--isolation", isolation]
        env = {"OSMOSIS_STORE": str(tmp_path / "kept-elsewhere")}
        done = run_osmosis("test", *model, "--json", cwd=root, env=env)
    assert (tmp_path / "kept-elsewhere" / "runs.db").is_file()
    (result,) = done.json["results"]
    assert result["reward"] == 1.0, result
