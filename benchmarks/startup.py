"""Measure start-up time: help, the import of the decorator, and one row from start to exit."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from measuring import run

DECORATOR = "from time import perf_counter as t; s = t(); from osmosis_ai import osmosis_reward; print(t() - s)"
FASTMCP = "import fastmcp; from fastmcp import FastMCP, Client"
TARGETS = {"help": 0.3, "decorator": 0.05, "one row": 1.3}


def measure(osmosis: str, repo: Path, runs: int) -> None:
    """Print start-up times: the median of warm runs, and one run without any compiled bytecode.

    Args:
        osmosis: The command's path.
        repo: The repository whose first row to run.
        runs: The number of warm runs.
    """
    python = sys.executable
    one_row = [osmosis, "test", "--limit", "1", "--model", "offline/oracle", "--quiet"]
    commands = {
        "python -c pass": [python, "-c", "pass"],
        "osmosis --help": [osmosis, "--help"],
        f'python -c "{FASTMCP}"': [python, "-c", FASTMCP],
        "osmosis test, one row, offline/oracle": one_row,
    }

    def wall(name: str, **env: str) -> float:
        return run(commands[name], cwd=repo, **env).wall

    def decorator(**env: str) -> float:
        return float(run([python, "-c", DECORATOR], cwd=repo, **env).stdout)

    measures: dict[str, Callable[..., float]] = {name: _of(wall, name) for name in commands}
    measures["from osmosis_ai import osmosis_reward (inside a running python)"] = decorator
    warm: dict[str, list[float]] = {name: [] for name in measures}
    for name in measures:
        measures[name]()  # what the disk and the bytecode cache didn't have yet
    # One after the other in each round, so that whatever else the machine does hits all of them alike.
    for _ in range(runs):
        for name, seconds in warm.items():
            seconds.append(measures[name]())
    cold = {}
    for name in measures:
        with tempfile.TemporaryDirectory() as empty:
            cold[name] = measures[name](PYTHONPYCACHEPREFIX=empty)

    print(f"\nstart-up: median of {runs} warm runs; cold is one run without compiled bytecode, as right after install")
    for name, seconds in warm.items():
        print(f"  {name:<62} {_ms(median(seconds)):>9}   cold {_ms(cold[name]):>9}")
    imported, row = warm[f'python -c "{FASTMCP}"'], warm["osmosis test, one row, offline/oracle"]
    ratio = median(a / b for a, b in zip(row, imported, strict=True))
    print(f"  one row / fastmcp import {ratio:.2f} (target at most {TARGETS['one row']}); ", end="")
    print(f"targets: help {_ms(TARGETS['help'])}, decorator {_ms(TARGETS['decorator'])}")


def _of(wall: Callable[..., float], name: str) -> Callable[..., float]:
    return lambda **env: wall(name, **env)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
