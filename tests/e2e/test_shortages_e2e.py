"""Limits of the system on the command itself: open files and threads."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

from commands import COMMAND, Finished, clean_environment
from repos import write_repo

ROLLOUTS = 24
WAITING = '''
import time

from fastmcp import FastMCP

mcp = FastMCP("waiting")


@mcp.tool
def wait() -> str:
    """Take long enough for other rollouts to start meanwhile."""
    time.sleep(1.5)
    return "waited"
'''


def run_limited(kind: int, soft: int, *arguments: str, cwd: Path) -> Finished:
    """Run the installed command with a limit of the system."""
    hard = resource.getrlimit(kind)[1]
    done = subprocess.run(
        [COMMAND, "test", "--model", "offline/oracle", *arguments],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(kind, (soft, hard)),
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def test_rollouts_wait_for_descriptors_instead_of_failing(tmp_path: Path) -> None:
    solution = [{"tool": "wait", "arguments": {}}, "done"]
    rows = [{"system_prompt": "s", "user_prompt": "u", "solution": solution}] * ROLLOUTS
    root = write_repo(tmp_path / "repo", main=WAITING, rewards=None, rows=rows)
    arguments = ["--isolation", "rollout", "--batch-size", str(ROLLOUTS)]
    done = run_limited(resource.RLIMIT_NOFILE, 50, *arguments, cwd=root)
    assert done.code == 0, done.stderr
    assert f"{ROLLOUTS} of {ROLLOUTS} rollouts completed" in done.stdout
    assert "some workers start later: the system lets this command open no more files" in done.stderr


def test_without_any_thread_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    # The stack of every thread would have this size.
    done = run_limited(resource.RLIMIT_STACK, 1 << 46, cwd=root)
    assert done.code == 2
    assert done.stderr.splitlines()[-1].startswith("error: the system allows no more processes and threads; raise")
    assert "Traceback" not in done.stderr
