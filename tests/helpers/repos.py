"""Git-sync repositories for tests: generated ones, and copies of those in `tests/repos`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

REPOS = Path(__file__).parents[1] / "repos"

ADDING = """
from fastmcp import FastMCP

mcp = FastMCP("adding")


@mcp.tool
def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.\"\"\"
    return a + b


if __name__ == "__main__":
    mcp.run()
"""

EXACT = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str.strip() == ground_truth else 0.0
"""

ROWS = [
    {"system_prompt": "Use the tools.", "user_prompt": f"What is {a} + {b}?", "ground_truth": str(a + b), "level": a}
    for a, b in ((1, 2), (3, 4), (5, 6))
]


def write_repo(
    root: Path, *, main: str = ADDING, rewards: str | None = EXACT, rows: list[dict[str, Any]] | None = None
) -> Path:
    """Write a git-sync repository.

    Args:
        root: The folder to write.
        main: The text of mcp/main.py.
        rewards: The text of reward_fn/rewards.py, None for no folder.
        rows: The dataset.
    """
    (root / "mcp").mkdir(parents=True)
    (root / "mcp" / "main.py").write_text(main, encoding="utf-8")
    if rewards is not None:
        (root / "reward_fn").mkdir()
        (root / "reward_fn" / "rewards.py").write_text(rewards, encoding="utf-8")
    lines = [json.dumps(row) for row in (ROWS if rows is None else rows)]
    (root / "test_data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def copy_repo(name: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Copy one of the test repositories and add a dataset."""
    root = folder / name
    shutil.copytree(REPOS / name, root, ignore=shutil.ignore_patterns("__pycache__"))
    write_rows(root, rows)
    return root


def write_rows(root: Path, rows: list[dict[str, Any]]) -> None:
    """Write a repository's dataset."""
    lines = (json.dumps({"system_prompt": "Do it.", "ground_truth": "done", **row}) for row in rows)
    (root / "test_data.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def seen(root: Path) -> list[tuple[str, int]]:
    """Return the calls that the repository's code recorded: a name and the process id."""
    file = root / "seen"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [(name, int(pid)) for name, pid in (line.split() for line in lines)]
