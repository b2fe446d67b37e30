"""Measure scores per second of `osmosis runs rescore`: stored trajectories, a cheap function, no model.

    python benchmarks/scores.py --rollouts 10000

For comparison, a plain loop in one process reads the same trajectories and calls the function, but records nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from measuring import OSMOSIS, Measured, adopt_orphans, run
from repository import EXACT, sums, write_repo

from osmosis_ai.records import Rollout, Row, ToolCall, Turn, Usage
from osmosis_ai.store.codec import decode_scoring_input
from osmosis_ai.store.reading import ScoringReader
from osmosis_ai.store.run_store import RunStore

TARGET = 20_000
AT_ONCE = 500


def typical(index: int) -> tuple[Rollout, Row]:
    """Return a rollout of two turns and one tool call, as in the other benchmarks, and its row."""
    prompt = "You are a careful calculator. Use the tools for every step of the calculation."
    row = Row(index, f"row{index}", prompt, f"What is {index} + 2?", "3")
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "system", "content": row.system_prompt},
        {"role": "user", "content": row.user_prompt},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    usage = Usage(100, 10, 110)
    turns = [Turn(0, "tool_calls", usage, 5.0, "scripted"), Turn(1, "stop", usage, 5.0, "scripted")]
    calls = [ToolCall(0, "call_0", "add", '{"a": 1, "b": 2}', 1.0)]
    rollout = Rollout(
        f"rollout{index}", index, row.id, 0, "policy", messages, "stop", 12.0, None, Usage(200, 20, 220), turns, calls
    )
    return rollout, row


async def fill(root: Path, rollouts: int) -> None:
    """Store a finished run with this number of rollouts."""
    with RunStore.open(root) as store:
        run_id = await store.create_run("test", identity={}, config={})
        for start in range(0, rollouts, AT_ONCE):
            batch = map(typical, range(start, min(start + AT_ONCE, rollouts)))
            await asyncio.gather(*(store.save_rollout(run_id, rollout, row) for rollout, row in batch))
        await store.mark(run_id, "finished")


def plain_loop(repo: Path) -> float:
    """Return the seconds that one process takes to read and score every trajectory, without limits or records."""
    store = repo / ".osmosis" / "runs.db"
    space: dict[str, Any] = {}
    exec(EXACT, space)
    with closing(sqlite3.connect(store)) as db:
        keys = [key for (key,) in db.execute("SELECT pk FROM rollouts")]
    started = perf_counter()
    reader = ScoringReader(store)
    for start in range(0, len(keys), AT_ONCE):
        for found in map(decode_scoring_input, reader.read(keys[start : start + AT_ONCE])):
            space["exact"](found.messages[-1]["content"], found.ground_truth, {})
    return perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000, help="stored trajectories (default: 10000)")
    parser.add_argument("--runs", type=int, default=3, help="the median of how many runs (default: 3)")
    options = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        repo = write_repo(Path(folder) / "repo", sums(1))
        asyncio.run(fill(repo, options.rollouts))

        def rescore() -> Measured:
            return run([OSMOSIS, "runs", "rescore"], cwd=repo)

        rescore()
        seconds, cpu, starts, plain = [], [], [], []
        for number in range(options.runs):
            nothing = rescore()
            # Other code, so that every score is out of date.
            (repo / "reward_fn" / "rewards.py").write_text(f"{EXACT}# {number}\n", encoding="utf-8")
            everything = rescore()
            starts.append(nothing.wall)
            seconds.append(everything.wall - nothing.wall)
            cpu.append(everything.cpu - nothing.cpu)
            plain.append(plain_loop(repo))
    rate = options.rollouts / median(seconds)
    each = median(cpu) / options.rollouts * 1e6
    print(f"{options.rollouts} stored trajectories, one function; median of {options.runs} runs")
    print(f"  {rate:,.0f} scores/s in {median(seconds):.2f} s (target: at least {TARGET:,} on two CPUs)")
    print(f"  a plain loop in one process that records nothing: {options.rollouts / median(plain):,.0f} scores/s")
    print(f"  {each:.0f} µs of CPU each; a run with nothing to score takes {median(starts):.2f} s")


if __name__ == "__main__":
    main()
