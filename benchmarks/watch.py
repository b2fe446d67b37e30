"""Measure watch mode's latency from saving a file to seeing the changes, by stage.

    python benchmarks/watch.py --trajectories 1000

The saved code records when it is imported and called, so the command itself isn't instrumented. See
benchmarks/README.md for the meaning of each figure.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import psutil
from measuring import OSMOSIS, clean_environment
from repository import sums, write_repo
from rollouts import scripted_endpoint

REWARD_TARGET_MS = 500
TOOL_TARGET_MS = 150

NOTE = '''
import os
import time


def note(event):
    """Append what happens, and when, in milliseconds."""
    file = os.open({file!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{{event}} {{time.monotonic() * 1000}}\\n".encode())
    os.close(file)


note("importing")
'''
MAIN = """
from fastmcp import FastMCP

mcp = FastMCP("adding")


@mcp.tool
def add(a: int, b: int) -> int:
    note("called")
    return {version} + a + b


note("imported")
"""
REWARD = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    note("called")
    return 1.0 + {version} if solution_str.strip() == ground_truth else 0.0


note("imported")
"""


class Watched(NamedTuple):
    """A running command, and the file in which the code it runs records its times."""

    process: subprocess.Popen[str]
    notes: Path

    def next(self) -> dict[str, Any]:
        """Return the JSON object on the next line.

        Raises:
            SystemExit: There is no further line, or it reports an error.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "the command ended"}
        if "error" in found:
            raise SystemExit(f"no results: {found['error']}")
        return found

    def moments(self, event: str) -> list[float]:
        """Return the times at which this happened, in milliseconds, in order."""
        lines = (line.split() for line in self.notes.read_text(encoding="utf-8").splitlines())
        return sorted(float(when) for what, when in lines if what == event)

    def cpu(self) -> float:
        """Return the CPU milliseconds used by the command itself."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system) * 1000


class Stages(NamedTuple):
    """Milliseconds from one moment to the next, by name, and the command's own CPU time."""

    spans: dict[str, float]
    cpu: float

    @property
    def whole(self) -> float:
        """Milliseconds from the save to the last stage."""
        return sum(self.spans.values())


def change_reward(watched: Watched, save: Callable[[], None], rows: int) -> Stages:
    """Save a reward function; return the time until the new scores are printed, by stage."""
    watched.notes.unlink()
    cpu, saved = watched.cpu(), monotonic() * 1000
    save()
    line = watched.next()
    shown = monotonic() * 1000
    redone = line["iteration"]["redone"]
    if (redone["rollouts"], redone["scores"]) != (0, rows):
        raise SystemExit(f"not exactly the scores were redone: {redone}")
    began = shown - line["iteration"]["took_ms"]
    calls = watched.moments("called")
    return Stages(
        {
            "debounce, noticing": began - saved,
            "worker start": watched.moments("importing")[0] - began,
            "user's import": watched.moments("imported")[0] - watched.moments("importing")[0],
            "to the first score": calls[0] - watched.moments("imported")[0],
            "reading, scoring, saving": calls[-1] - calls[0],
            "the last saves, report, line": shown - calls[-1],
        },
        watched.cpu() - cpu,
    )


def change_tool(watched: Watched, save: Callable[[], None]) -> Stages:
    """Save a tool; return the time until the new code's first call, by stage."""
    watched.notes.unlink()
    cpu, saved = watched.cpu(), monotonic() * 1000
    save()
    line = watched.next()
    began = monotonic() * 1000 - line["iteration"]["took_ms"]
    importing, imported = watched.moments("importing")[0], watched.moments("imported")[0]
    return Stages(
        {
            "debounce, noticing": began - saved,
            "worker start": importing - began,
            "user's import": imported - importing,
            "server, session, reply, call": watched.moments("called")[0] - imported,
        },
        watched.cpu() - cpu,
    )


def show(title: str, runs: list[Stages], target: int, apart: str | None = None) -> None:
    """Print the median of each stage.

    Args:
        title: The heading.
        runs: The measured saves.
        target: The target in milliseconds.
        apart: The stage that doesn't count towards the target.
    """
    wholes = [run.whole - (run.spans[apart] if apart else 0) for run in runs]
    without = f", without the {apart}" if apart else ""
    print(f"\n{title}: {median(wholes):.0f} ms{without} (target {target}; best {min(wholes):.0f})")
    for name in runs[0].spans:
        print(f"  {name:<30} {median(run.spans[name] for run in runs):>7.1f} ms")
    print(f"  {'(CPU of the command itself)':<30} {median(run.cpu for run in runs):>7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1000, help="stored trajectories (default: 1000)")
    parser.add_argument("--saves", type=int, default=7, help="saves of each kind, medians are shown (default: 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = write_repo(Path(folder).resolve() / "repo", sums(options.trajectories))
        notes = Path(folder) / "notes"
        note = NOTE.format(file=str(notes))

        def save(name: str, text: str, version: int) -> Callable[[], None]:
            content = note + text.format(version=version)
            return lambda: (root / name).write_text(content, encoding="utf-8") and None

        save("mcp/main.py", MAIN, 0)()
        save("reward_fn/rewards.py", REWARD, 0)()
        with scripted_endpoint(Path(folder), 0.0) as endpoint:
            command = [OSMOSIS, "test", "--watch", "--json", "--base-url", endpoint.url, "--model", "scripted"]
            command += ["--batch-size", "16"]
            process = subprocess.Popen(
                command, cwd=root, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )
            try:
                watched = Watched(process, notes)
                watched.next()
                scores = [
                    change_reward(watched, save("reward_fn/rewards.py", REWARD, number), options.trajectories)
                    for number in range(1, options.saves + 1)
                ]
                calls = [
                    change_tool(watched, save("mcp/main.py", MAIN, number)) for number in range(1, options.saves + 1)
                ]
                process.send_signal(signal.SIGINT)
                process.wait()
            finally:
                process.kill()
                process.wait()
    print(f"{psutil.cpu_count()} CPUs, load {psutil.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    show(f"a reward function over {options.trajectories} trajectories, to the new scores", scores, REWARD_TARGET_MS)
    show("a tool, to the first call of the new code", calls, TOOL_TARGET_MS, apart="user's import")


if __name__ == "__main__":
    main()
