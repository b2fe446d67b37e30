"""A run on a Ray cluster of this machine: a head without CPUs and two nodes with one each; and each way to lose a node.

`make test-ray` runs these; they need the extra `ray`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import osmosis_ai
from commands import COMMAND, clean_environment, command_line
from osmosis_ai import Report, RunConfig
from osmosis_ai.runtime.run import events
from osmosis_ai.store.queries import Queries
from repos import write_repo
from waiting import eventually

pytestmark = pytest.mark.ray
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
MEMORY = 80 << 20

MAIN = '''
import os
import time
from pathlib import Path

from fastmcp import FastMCP

mcp = FastMCP("adding")
HELD = Path(os.environ["HOLD"])


@mcp.tool
def add(a: int, b: int) -> int:
    """Add two numbers; hold while there is a file of this process's actor."""
    if (HELD / "all").exists():
        (HELD / f"waits-{os.getpid()}").touch()
        while (HELD / "all").exists():
            time.sleep(0.01)
    return a + b


@mcp.tool
def end(a: int) -> int:
    """End the worker."""
    os._exit(7)
'''


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "system_prompt": "Use the tools.",
            "user_prompt": f"What is {number} + 1?",
            "ground_truth": str(number + 1),
            "solution": [{"tool": "add", "arguments": {"a": number, "b": 1}}, "{{result[0]}}"],
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra ray isn't installed")
    # Nodes that vanish are noticed in seconds.
    system = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}
    made = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": MEMORY,
            "include_dashboard": False,
            "_system_config": system,
        },
    )
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=MEMORY)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    os.environ.pop("RAY_ADDRESS")
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    made.shutdown()


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hold").mkdir()
    monkeypatch.setenv("HOLD", str(tmp_path / "hold"))
    return write_repo(tmp_path / "repo", main=MAIN, rows=rows(40))


def run(repo: Path, listener: Any = None, **options: object) -> Report:
    given = {"model": "offline/oracle", "batch_size": 8, "cluster": "auto", **options}
    return osmosis_ai.run(RunConfig.of(**given), directory=repo, listener=listener)  # type: ignore[arg-type]


def actors() -> list[psutil.Process]:
    """List the actors' processes, which are below the cluster's, and it below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # What an actor has just forked has its name for a moment.
            named = "RayHost" in command_line(process)
            if named and "raylet" in Path(psutil.Process(process.ppid()).exe()).name:
                found.append(process)
    return found


def records(report: Report) -> list[dict[str, Any]]:
    """Return every record, without ids and times."""
    found = []
    for scored in Queries(Path(report.store)).scored(report.run_id, with_trajectory=True):
        rollout = json.loads(msgspec.json.encode(scored.stored.rollout))
        found.append(
            {
                "row": scored.row.id,
                "messages": rollout["messages"],
                "finish": rollout["finish_reason"],
                "calls": [(call["name"], call["arguments"]) for call in rollout.get("tool_calls", [])],
                "scores": {name: score.value for name, score in scored.scores.items()},
                "failure": rollout.get("failure"),
            }
        )
    return found


class Holding:
    """Holds every tool call until both nodes have some, then does something to the cluster, and lets go."""

    def __init__(self, repo: Path) -> None:
        self.folder = repo.parent / "hold"
        self.said: list[str] = []
        (self.folder / "all").touch()

    def __call__(self, event: object) -> None:
        if isinstance(event, events.Notice):
            self.said.append(event.message)

    def until_lost(self, nodes: int) -> None:
        eventually(lambda: sum("was lost" in said for said in self.said) == nodes, lambda: str(self.said))

    def wait(self) -> None:
        # One after the other, because a busy machine takes its time.
        eventually(lambda: len(actors()) >= 2, lambda: str(self.said))
        eventually(lambda: len([*self.folder.glob("waits-*")]) >= 2, lambda: str(self.said))

    def run(self, repo: Path, action: Callable[[], None]) -> Report:
        """Run beside the test, whose thread alone may add a node."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run, repo, self)
            try:
                self.wait()
                action()
            finally:
                (self.folder / "all").unlink()
            return running.result()


def whole(report: Report, count: int = 40) -> None:
    assert report.whole
    assert [outcome.row_index for outcome in report.outcomes()] == list(range(count))


def test_500_rollouts_equal_the_local_run_record_for_record(cluster: Any, repo: Path) -> None:
    """One of them ends its worker, and is alone to blame for it."""
    killer = {**rows(1)[0], "user_prompt": "End.", "solution": [{"tool": "end", "arguments": {"a": 1}}]}
    lines = [*rows(250), killer, *rows(500)[250:499]]
    (repo / "test_data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines), encoding="utf-8")
    spread, local = run(repo, batch_size=50), run(repo, cluster=None, batch_size=50, workers=2)
    assert records(spread) == records(local)
    assert len(records(local)) == 500
    (failed,) = [outcome for outcome in spread.outcomes() if outcome.failure is not None]
    assert (failed.row_index, failed.failure and failed.failure.message) == (
        250,
        "exited with code 7 (while running end)",
    )


def test_nodes_are_lost_in_every_way_and_join_late(cluster: Any, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one run: an actor is killed, a node stands still without a reset, a node joins, and a raylet is killed."""
    monkeypatch.setenv("SOME_API_KEY", "sk-not-for-the-dashboard")
    holding = Holding(repo)
    stopped: list[psutil.Process] = []
    environments: list[str] = []

    def act() -> None:
        first, second = actors()
        environments.extend(json.dumps(actor.environ()) for actor in (first, second))
        first.kill()
        holding.until_lost(1)
        # Its connections stay open, and nobody answers.
        stopped.extend([*second.children(recursive=True), second, psutil.Process(second.ppid())])
        for process in stopped:
            process.suspend()
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        holding.until_lost(2)
        for node in cluster.list_all_nodes():
            if node is not cluster.head_node and node.node_id != cluster.list_all_nodes()[-1].node_id:
                cluster.remove_node(node, allow_graceful=False)

    try:
        whole(holding.run(repo, act))
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    # What Ray shows to whoever may see its dashboard.
    assert not any("sk-not-for-the-dashboard" in text for text in environments)


def test_the_head_is_killed_and_its_run_resumed(cluster: Any, repo: Path) -> None:
    (repo.parent / "hold" / "all").touch()
    command = subprocess.Popen(
        [COMMAND, "eval", "--cluster", "auto", "--model", "offline/oracle", "--batch-size", "4"],
        cwd=repo,
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    eventually(actors)
    eventually(lambda: [*(repo.parent / "hold").glob("waits-*")])
    command.send_signal(signal.SIGKILL)
    command.wait()
    (repo.parent / "hold" / "all").unlink()
    # Its actors end with it.
    eventually(lambda: not actors(), lambda: str(actors()))
    whole(run(repo, resume=True))
