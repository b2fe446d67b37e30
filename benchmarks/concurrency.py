"""Wall time with a slow model and many rollouts at a time, beside the ideal and beside the raw loop.

    python benchmarks/concurrency.py

Ideal is what the model's delays alone take when every slot is always busy. What the machine does otherwise counts too,
so the raw loop's figure in the same run tells how much of the difference is its.
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
    """So many rollouts, so many at a time, each of whose two replies takes so long; how close to the ideal to come."""

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
    """Print one setting's figures."""
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
