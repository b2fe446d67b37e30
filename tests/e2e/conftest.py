"""Drives the installed command against real loopback endpoints and real FastMCP servers."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import msgspec
import pytest

from osmosis_ai.schemas import SCHEMAS

COMMAND = Path(sys.executable).with_name("osmosis")
PUBLISHED = Path(__file__).parents[2] / "docs" / "schemas"


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


class Finished(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        lines = self.stdout.splitlines()
        assert len(lines) == 1, f"more than one line on stdout: {self.stdout!r} {self.stderr!r}"
        return json.loads(lines[0])


Osmosis = Callable[..., Finished]


def documented(name: str, data: str) -> dict[str, Any]:
    """JSON that must be as its published schema says, and have no key besides."""
    value: dict[str, Any] = json.loads(data)
    schema = json.loads((PUBLISHED / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    known = msgspec.json.decode(data, type=SCHEMAS[name])
    assert msgspec.json.decode(msgspec.json.encode(known)) == value
    return value


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without anything that chooses a model or holds a key."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_MODEL"))}
    return {**kept, **extra}


def run_osmosis(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> Finished:
    """Run the installed command in a folder and return what it printed."""
    done = subprocess.run(
        [str(COMMAND), *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def osmosis(tmp_path: Path) -> Osmosis:
    """Runs the installed command in a folder and returns what it printed."""
    return functools.partial(run_osmosis, cwd=tmp_path)


@pytest.fixture(scope="module")
def beside() -> Iterator[Executor]:
    """Runs functions beside the tests: a module starts its many commands there, and its tests look at the results."""
    with ThreadPoolExecutor(max_workers=3) as executor:
        yield executor
        executor.shutdown(cancel_futures=True)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A small git-sync repository: one adding tool, one reward function, three rows."""
    return write_repo(tmp_path / "repo")


def write_repo(
    root: Path, *, main: str = ADDING, rewards: str | None = EXACT, rows: list[dict[str, Any]] | None = None
) -> Path:
    """Write a git-sync repository.

    Args:
        root: Where.
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
