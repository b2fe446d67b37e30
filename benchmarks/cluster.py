"""Measure the overhead of a Ray cluster node over local workers, and the gain from a second node.

    python benchmarks/cluster.py

- cost: milliseconds of CPU per rollout, scores and store included, on one node of a cluster of this machine, beside the
  same run without a cluster, both without start and end;
- nodes: rollouts per second on two nodes with one worker each beside one, when each tool call keeps a CPU busy for some
  hundred milliseconds: the head shares these CPUs, and a tool that is worth a cluster costs far more than the head.

Both need the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import sleep
from typing import NamedTuple

import psutil
from measuring import OSMOSIS, adopt_orphans, clean_environment
from repository import sums, write_repo
from scaling import WORKING, tasks, working

from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call

WARM = 0.4
"""The part of the rollouts before the first sample: until then, some of Ray's processes still start."""
SAMPLE_SECONDS = 0.1
ROUNDS = 4_000_000


class Adding:
    """A model that calls the tool once, and counts the rollouts that have started."""

    def __init__(self) -> None:
        self.begun = 0

    def __call__(self, request: Request) -> Reply:
        if request.turn:
            return text("3")
        self.begun += 1
        return tool_call("add", a=1, b=2)


def command(url: str, rollouts: int, *options: str) -> list[str]:
    asked = [OSMOSIS, "test", "--base-url", url, "--model", "scripted", "--json", "--quiet"]
    return [*asked, "--limit", str(rollouts), *options]


class Cpu(NamedTuple):
    """CPU seconds per rollout: of the command's own process, and of all."""

    head: float
    every: float


def cpu_each(command: list[str], root: Path, model: Adding, rollouts: int) -> Cpu:
    """Run a command and measure all processes below it, without their start and their end.

    Processes are sampled while they run: Ray doesn't wait for those that it ends, so no parent gets their CPU time.
    """
    model.begun = 0
    # Not by time of creation, too: as seconds since the epoch it moves with the clock, and a process would count twice.
    seen: dict[int, float] = {}
    samples: list[tuple[int, float, float]] = []
    process = subprocess.Popen(
        command, cwd=root, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None:
        begun = model.begun
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = child.cpu_times()
                seen[child.pid] = times.user + times.system
        if rollouts * WARM <= begun < rollouts:
            samples.append((begun, seen.get(process.pid, 0.0), sum(seen.values())))
        sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    first, last = samples[0], samples[-1]
    head, every = ((last[part] - first[part]) / (last[0] - first[0]) for part in (1, 2))
    return Cpu(head, every)


def cost(folder: Path, rollouts: int, runs: int) -> None:
    model = Adding()
    with ScriptedEndpoint(model, record=False).run_in_thread() as endpoint:
        root = write_repo(folder / "sums", sums(rollouts))
        sides = {
            "local": ("--workers", "1", "--batch-size", "50"),
            "cluster": ("--cluster", "local", "--nodes", "1", "--workers-per-node", "1", "--batch-size", "50"),
        }
        found: dict[str, list[Cpu]] = {side: [] for side in sides}
        for _ in range(runs):
            for side, options in sides.items():
                asked = command(endpoint.url, rollouts, *options)
                found[side].append(cpu_each(asked, root, model, rollouts))
    for side, each in found.items():
        every, head = (median(one.every for one in each), median(one.head for one in each))
        print(f"{side:8} {every * 1000:.2f} ms of CPU per rollout, {head * 1000:.2f} ms of them in the command itself")
    # Of neighbouring runs, because a machine's speed changes within minutes.
    pairs = zip(found["cluster"], found["local"], strict=True)
    ratios = sorted(cluster.every / local.every for cluster, local in pairs)
    print(f"cluster / local: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); load {os.getloadavg()[0]:.1f}")


def nodes(folder: Path, rollouts: int, runs: int) -> None:
    # Read when Ray is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for number in range(2):
            # Each node unpacks the repository in its own place, as a machine of its own does.
            cluster.add_node(num_cpus=1, runtime_env_dir_name=f"runtime_resources_{number}")
        with ScriptedEndpoint(working(ROUNDS), record=False).run_in_thread() as endpoint:
            root = write_repo(folder / "work", tasks(rollouts), tools=WORKING)
            rates: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(runs):
                for count, found in rates.items():
                    options = ("--cluster", "auto", "--nodes", str(count), "--batch-size", "8")
                    asked = command(endpoint.url, rollouts, *options)
                    # Not `measuring.run`, which waits for all children, and the cluster is one.
                    env = clean_environment(RAY_ADDRESS=cluster.address)
                    done = subprocess.run(asked, cwd=root, env=env, capture_output=True, check=True)
                    found.append(rollouts / json.loads(done.stdout)["summary"]["wall_ms"] * 1000)
    finally:
        cluster.shutdown()
    one, two = (median(found) for found in rates.values())
    print(f"one node {one:.1f}/s, two {two:.1f}/s: {two / one:.2f}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["cost", "nodes"])
    parser.add_argument("--rollouts", type=int, default=6000)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory() as made:
        if "cost" in given.what:
            cost(Path(made), given.rollouts, given.runs)
        if "nodes" in given.what:
            nodes(Path(made), given.rollouts // 40, given.runs)
