"""Write the repositories that benchmarks run: a tool, a reward function, rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

ADDING = '''\
from fastmcp import FastMCP

mcp = FastMCP("adding")


@mcp.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''
EXACT = """\
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str.strip() == ground_truth else 0.0
"""


def write_repo(root: Path, rows: Iterable[dict[str, str]], *, tools: str = ADDING, reward: str = EXACT) -> Path:
    """Write a repository.

    Args:
        root: The folder to create.
        rows: The rows of its dataset.
        tools: Its `mcp/main.py`.
        reward: Its `reward_fn/rewards.py`.

    Returns:
        The root.
    """
    for folder, file, content in (("mcp", "main.py", tools), ("reward_fn", "rewards.py", reward)):
        (root / folder).mkdir(parents=True)
        (root / folder / file).write_text(content, encoding="utf-8")
    with (root / "test_data.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return root


def sums(count: int) -> Iterable[dict[str, str]]:
    """Return rows that ask for a sum; the scripted endpoint always answers 3, so that is their ground truth."""
    prompt = "You are a careful calculator. Use the tools for every step of the calculation."
    for index in range(count):
        yield {"system_prompt": prompt, "user_prompt": f"What is {index} + 2?", "ground_truth": "3"}
