"""Run with tools that die, block and flood all the time; measure the cost, and check that no other rollout pays for it.

    python benchmarks/faults.py --rollouts 1000

5 % of the rollouts kill their process, 5 % block (half of them the event loop, half a thread) and 5 % write four
megabytes to stdout. The ideal is the wall time of the same run without faults, plus the time that blocked calls take
until their limit, spread over all workers (for the event loop) or slots (for a thread).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measuring import OSMOSIS, clean_environment
from repository import write_repo

from osmosis_ai.store.queries import Queries
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call

SHARE = 20
TARGET = 1.5

FAULTY = '''\
import os
import time

from fastmcp import FastMCP

mcp = FastMCP("faults")


@mcp.tool
def fine() -> str:
    """Behave."""
    return "fine"


@mcp.tool
def dies() -> str:
    """End the process."""
    os._exit(1)


@mcp.tool
async def blocks_the_loop() -> str:
    """Block the event loop."""
    time.sleep(3600)


@mcp.tool
def blocks_a_thread() -> str:
    """Block a thread."""
    time.sleep(3600)


@mcp.tool
def floods() -> str:
    """Write four megabytes to stdout."""
    for _ in range(400):
        print("x" * 10_000)
    return "flooded"
'''
ENDS = {"dies": "worker", "blocks_the_loop": "timeout"}
"""The tools that end a rollout, and where their failure comes from."""


def tools_for(rollouts: int, *, faults: bool) -> list[str]:
    """The tool that each row calls."""
    tools = ["fine"] * rollouts
    if faults:
        tools[3::SHARE] = ["dies"] * len(tools[3::SHARE])
        blocked = ["blocks_the_loop", "blocks_a_thread"] * rollouts
        tools[8::SHARE] = blocked[: len(tools[8::SHARE])]
        tools[14::SHARE] = ["floods"] * len(tools[14::SHARE])
    return tools


def rows(tools: Iterable[str]) -> Iterable[dict[str, str]]:
    """A row for each tool."""
    for tool in tools:
        yield {"system_prompt": "Call it.", "user_prompt": tool, "ground_truth": "done"}


def script(request: Request) -> Reply:
    """A model that calls the tool its prompt names, and then says `done`."""
    return tool_call(request.messages[1]["content"]) if request.turn == 0 else text("done")


def measure(root: Path, tools: list[str], url: str, options: argparse.Namespace) -> tuple[float, dict[str, Any]]:
    """Run the command; return the seconds from the first rollout to the last record, and the results."""
    write_repo(root, rows(tools), tools=FAULTY)
    command = [OSMOSIS, "test", "--base-url", url, "--model", "scripted", "--json", "--quiet"]
    command += ["--batch-size", str(options.batch_size), "--workers", str(options.workers)]
    command += ["--tool-timeout", str(options.tool_timeout)]
    # Ends with 1, because rollouts fail.
    done = subprocess.run(command, cwd=root, env=clean_environment(), stdout=subprocess.PIPE, check=False)
    results = json.loads(done.stdout)
    return results["summary"]["wall_ms"] / 1000, results


def check(root: Path, tools: list[str], results: dict[str, Any]) -> list[str]:
    """Return the problems with the records."""
    wrong = []
    rows = results["results"]
    if [row["row_index"] for row in rows] != list(range(len(tools))):
        wrong.append(f"{len(rows)} records for {len(tools)} rows")
    for row, tool in zip(rows, tools, strict=False):
        origin = row["error"].partition(":")[0] if row["error"] else None
        if origin != ENDS.get(tool) or (row["reward"] == 1.0) != (origin is None):
            wrong.append(f"row {row['row_index']} ({tool}): {row['error']}, reward {row['reward']}")
    queries = Queries(root / ".osmosis" / "runs.db")
    stored = [found.stored for found in queries.scored(results["config"]["run_id"])]
    again = sum(rollout.attempt > 1 for rollout in stored)
    if again or len(stored) != len(tools):
        wrong.append(f"{len(stored)} stored, {again} of them recorded more than once")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tool-timeout", type=float, default=5.0, help="seconds (default: 5)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedEndpoint(script, record=False).run_in_thread() as endpoint,
    ):
        fine = tools_for(options.rollouts, faults=False)
        faulty = tools_for(options.rollouts, faults=True)
        base, results = measure(Path(folder) / "fine", fine, endpoint.url, options)
        wrong = check(Path(folder) / "fine", fine, results)
        wall, results = measure(Path(folder) / "faulty", faulty, endpoint.url, options)
        wrong += check(Path(folder) / "faulty", faulty, results)
    counts = Counter(faulty)
    blocked = counts["blocks_the_loop"] / options.workers + counts["blocks_a_thread"] / options.batch_size
    ideal = base + blocked * options.tool_timeout
    print(f"{len(faulty)} rollouts: {', '.join(f'{count} {tool}' for tool, count in counts.most_common())}")
    print(f"  without faults {base:.1f} s; blocked calls until their limit {ideal - base:.1f} s; ideal {ideal:.1f} s")
    print(f"  with faults {wall:.1f} s, {wall / ideal:.2f} times the ideal (target: {TARGET:g})")
    print(f"  records: {'all as they should be' if not wrong else ''}")
    for line in wrong[:20]:
        print(f"    {line}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
