"""Measure wall time with a slow model and many concurrent rollouts, against the ideal and the raw loop.

    python benchmarks/concurrency.py

The ideal is the time of the model's delays alone, with every slot always busy. Other load on the machine adds to the
measured time; the raw loop's figure from the same run shows how much.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from measuring import adopt_orphans, run
from repository import sums, write_repo
from rollouts import osmosis_command, ours, raw, raw_command, scripted_endpoint, write_body


class Setting(NamedTuple):
    """Number of rollouts, concurrency, delay of each of the two replies, and target relative to the ideal."""

    rollouts: int
    batch_size: int
    latency_ms: float
    target: float

    @property
    def ideal(self) -> float:
        """Seconds."""
        return math.ceil(self.rollouts / self.batch_size) * 2 * self.latency_ms / 1000


SETTINGS = (Setting(1280, 64, 50, 1.15), Setting(4000, 1000, 500, 1.2), Setting(10_000, 1000, 500, 1.2))


def measure(folder: Path, setting: Setting, runs: int) -> None:
    """Measure one setting and print the result."""
    repo = write_repo(folder / "repo", sums(setting.rollouts))
    write_body(repo)
    walls: dict[str, list[float]] = {"osmosis": [], "raw loop": []}
    with scripted_endpoint(folder, setting.latency_ms) as endpoint:
        spare = [endpoint.process.pid]
        raw_loop = raw_command(endpoint.url, repo, setting.rollouts, setting.batch_size)
        for _ in range(runs):
            command = osmosis_command(endpoint.url, setting.rollouts, setting.batch_size, None)
            walls["raw loop"].append(raw(run(raw_loop, cwd=repo, spare=spare)).seconds)
            walls["osmosis"].append(ours(run(command, cwd=repo, spare=spare), setting.rollouts).seconds)
    print(
        f"{setting.rollouts} rollouts, {setting.batch_size} at a time, {setting.latency_ms:g} ms per reply: "
        f"ideal {setting.ideal:.2f} s"
    )
    for name, seconds in walls.items():
        print(f"  {name:<10} {median(seconds):>6.2f} s, {median(seconds) / setting.ideal:.2f} of the ideal")
    print(f"  target: at most {setting.target} of the ideal", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each, the median counts (default: 3)")
    options = parser.parse_args()
    adopt_orphans()
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), setting, options.runs)


if __name__ == "__main__":
    main()
