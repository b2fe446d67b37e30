"""What a node of a Ray cluster costs beside workers of this machine, and what a second node brings.

    python benchmarks/cluster.py

- cost: milliseconds of CPU per rollout, scores and store included, on one node of a cluster of this machine, beside the
  same run without a cluster; the cost of starting, measured by runs of few rollouts, is taken off both;
- nodes: rollouts per second on two nodes with one worker each beside one, when each tool call is bound by the CPU.

Both need the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

from measuring import OSMOSIS, Measured, adopt_orphans, run
from repository import sums, write_repo
from scaling import WORKING, tasks, working

from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call

FEW = 50


def adding(request: Request) -> Reply:
    return tool_call("add", a=1, b=2) if request.turn == 0 else text("3")


def once(root: Path, url: str, rollouts: int, *options: str, **env: str) -> Measured:
    command = [OSMOSIS, "test", "--base-url", url, "--model", "scripted", "--json", "--quiet"]
    return run([*command, "--limit", str(rollouts), *options], cwd=root, **env)


def cost(folder: Path, rollouts: int, runs: int) -> None:
    with ScriptedEndpoint(adding, record=False).run_in_thread() as endpoint:
        root = write_repo(folder / "sums", sums(rollouts))
        sides = {
            "local": ("--workers", "1", "--batch-size", "50"),
            "cluster": ("--cluster", "local", "--nodes", "1", "--workers-per-node", "1", "--batch-size", "50"),
        }
        found: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(runs):
            for side, options in sides.items():
                many, few = (once(root, endpoint.url, count, *options) for count in (rollouts, FEW))
                found[side].append((many.cpu - few.cpu) / (rollouts - FEW) * 1000)
    middle = {side: median(each) for side, each in found.items()}
    for side, each in middle.items():
        print(f"{side:8} {each:.2f} ms of CPU per rollout")
    print(f"cluster / local: {middle['cluster'] / middle['local']:.2f}")


def nodes(folder: Path, rollouts: int, runs: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        with ScriptedEndpoint(working(400_000), record=False).run_in_thread() as endpoint:
            root = write_repo(folder / "work", tasks(rollouts), tools=WORKING)
            rates: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(runs):
                for count, found in rates.items():
                    options = ("--cluster", "auto", "--nodes", str(count), "--batch-size", "8")
                    done = once(root, endpoint.url, rollouts, *options, RAY_ADDRESS=cluster.address)
                    found.append(rollouts / json.loads(done.stdout)["summary"]["wall_ms"] * 1000)
    finally:
        cluster.shutdown()
    one, two = (median(found) for found in rates.values())
    print(f"one node {one:.1f}/s, two {two:.1f}/s: {two / one:.2f}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["cost", "nodes"])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory() as made:
        if "cost" in given.what:
            cost(Path(made), given.rollouts, given.runs)
        if "nodes" in given.what:
            nodes(Path(made), given.rollouts // 5, given.runs)
