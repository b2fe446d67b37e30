"""No byte that a run writes holds a secret of its environment, whatever user code does with it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from commands import run_osmosis
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_call
from repos import write_repo

SECRETS = {
    "OSMOSIS_API_KEY": "sk-distinct-model",
    "GITHUB_PAT": "ghp-distinct-1",
    "OPENAI_KEY_2": "distinct\\back'quote",
    "STRIPE_KEYS": "rk-distinct-1,rk-distinct-2",
    "DATABASE_URL": "postgres://me:distinct-pw@db/x",
    "ADMIN_PASS": "distinct-pass",
    "LONG_KEY": "distinct-" * 30,
    "BANK_ACCOUNT": "distinct-account",
    "OSMOSIS_MASK": "BANK_*",
}
TOOLS = """
import json
import os
import sys

from fastmcp import FastMCP

mcp = FastMCP("t")
NAMES = {names!r}


@mcp.tool
def tell(how: str) -> str:
    \"\"\"Tell every secret.\"\"\"
    for name in NAMES:
        print(name, os.environ[name], repr(os.environ[name]))
        print(os.environ[name].encode(), file=sys.stderr)
        print(os.environ[name].split(","))
    everything = {{name: os.environ[name] for name in NAMES}}
    if how == "raise":
        raise ValueError(everything)
    return json.dumps(everything)
"""
REWARD = """
import os

from osmosis_ai import osmosis_reward


@osmosis_reward
def telling(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float:
    print(dict(os.environ))
    raise KeyError(os.environ["GITHUB_PAT"])
"""


@pytest.mark.parametrize("workers", ["1", "0"])
def test_no_byte_written_holds_a_secret(workers: str, tmp_path: Path) -> None:
    names = [name for name in SECRETS if name not in ("OSMOSIS_MASK", "OSMOSIS_API_KEY")]
    root = write_repo(tmp_path / "repo", main=TOOLS.format(names=names), rewards=REWARD)
    script = by_turn(tool_call("tell", how="raise"), tool_call("tell", how="return"), text("ghp-distinct-1"))
    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        done = run_osmosis(
            *("eval", "--eval-fn", "reward_fn.rewards:telling", "--base-url", endpoint.url, "--model", "any"),
            *("--limit", "1", "--workers", workers, "--debug", "--cache", "-o", "out.json"),
            cwd=root,
            env=SECRETS,
        )
    logged = "".join(log.read_text(encoding="utf-8") for log in (root / ".osmosis" / "logs").glob("*"))
    assert "ValueError" in logged + done.stderr
    for database in (root / ".osmosis").glob("*.db"):
        # What the write-ahead log holds is folded into the file.
        sqlite3.connect(database).execute("VACUUM").connection.close()
    run_osmosis("runs", "export", "-o", "export.jsonl", cwd=root, env=SECRETS)
    written = {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file() and path.suffix != ".py"}
    assert {"out.json", "export.jsonl", "runs.db", "cache.db"} <= {Path(path).name for path in written}
    for where, data in {**written, "stdout": done.stdout.encode(), "stderr": done.stderr.encode()}.items():
        place = data.find(b"distinct")
        assert place < 0, (where, data[max(0, place - 100) : place + 100])
