"""A run on a Ray cluster of this machine: a head without CPUs and two nodes with one each; and each way to lose a node.

`make test-ray` runs these; they need the extra `ray`. All share one cluster: tests that lose its nodes come late, and
the one that loses its head comes last.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import osmosis_ai
import waiting
from commands import COMMAND, clean_environment, command_line, run_osmosis
from osmosis_ai import Report, RunConfig
from osmosis_ai.errors import StartError
from osmosis_ai.runtime.run import events
from osmosis_ai.store.queries import Queries
from repos import write_repo

pytestmark = pytest.mark.ray
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# A client server forks while its threads call gRPC, whose handlers of forks hang now and then.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
MEMORY = 80 << 20
WORKFLOW = Path(__file__).parents[3] / "examples" / "workflow"

eventually = partial(waiting.eventually, patience=120.0)
"""On a busy machine an actor takes half a minute to start."""

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
def client_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def add_node(cluster: Any) -> Any:
    """Add and return a node with one CPU and, as on a machine of its own, its own place for the repository.

    Else every node that joins unpacks the repository over the one that the others use.
    """
    place = f"runtime_resources_{time.monotonic_ns()}"
    return cluster.add_node(num_cpus=1, object_store_memory=MEMORY, runtime_env_dir_name=place)


@pytest.fixture(scope="module")
def cluster(client_port: int) -> Iterator[Any]:
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra ray isn't installed")
    # Nodes that vanish are noticed in seconds, and on a busy machine those that only answer late are not lost.
    system = {"health_check_period_ms": 500, "health_check_failure_threshold": 10, "health_check_initial_delay_ms": 0}
    made = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": MEMORY,
            "include_dashboard": False,
            "ray_client_server_port": client_port,
            "_system_config": system,
        },
    )
    for _ in range(2):
        add_node(made)
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

    def wait(self, nodes: int) -> None:
        # One after the other, because a busy machine takes its time.
        eventually(lambda: len(actors()) >= nodes, lambda: f"{actors()}: {self.said}")
        eventually(lambda: len([*self.folder.glob("waits-*")]) >= nodes, lambda: str(self.said))

    def run(self, repo: Path, action: Callable[[], None], nodes: int = 2) -> Report:
        """Run beside the test, whose thread alone may add a node."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run, repo, self)
            try:
                self.wait(nodes)
                action()
            finally:
                (self.folder / "all").unlink()
            return running.result()


def whole(report: Report, count: int = 40, said: Sequence[str] = ()) -> None:
    assert report.whole, "\n".join(said)
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


def test_a_workflow_runs_on_a_cluster_that_is_reached_through_its_client_server(
    cluster: Any, client_port: int, tmp_path: Path
) -> None:
    """Nor does the user read what Ray's threads say when the connection ends."""
    ignored = shutil.ignore_patterns("__pycache__", ".osmosis", "evals")
    workspace = shutil.copytree(WORKFLOW, tmp_path / "workflow", ignore=ignored)
    config = "configs/eval/products-openai.toml"
    place = ("--cluster", f"ray://127.0.0.1:{client_port}", "--nodes", "1", "--workers-per-node", "1")
    done = run_osmosis("eval", "run", config, "--model", "offline/oracle", *place, "--json", cwd=workspace)
    assert done.code == 0, done.stderr
    assert [row["runs"][0]["scores"]["products-openai"] for row in done.json["rows"]] == [1.0] * 6
    assert not any(said in done.stderr for said in ("Traceback", "Future", "Warning")), done.stderr


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
        newest = add_node(cluster)
        holding.until_lost(2)
        for node in cluster.list_all_nodes():
            if node is not cluster.head_node and node is not newest:
                cluster.remove_node(node, allow_graceful=False)

    try:
        whole(holding.run(repo, act), said=holding.said)
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    # What Ray shows to whoever may see its dashboard.
    assert not any("sk-not-for-the-dashboard" in text for text in environments)


@contextmanager
def node_of_another_network(address: str, said: Path) -> Iterator[Callable[[], None]]:
    """Add a node in a network namespace; yield what takes its network away, so that nothing ever says goodbye."""
    name, number = f"osmosis-{os.getpid()}", os.getpid() % 250

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def inside(*words: str) -> list[str]:
        return ["ip", "netns", "exec", name, *words]

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    node: subprocess.Popen[bytes] | None = None
    try:
        ip("link", "add", f"osm{number}", "type", "veth", "peer", "name", "outside", "netns", name)
        ip("address", "add", f"10.213.{number}.1/24", "dev", f"osm{number}")
        ip("link", "set", f"osm{number}", "up")
        ip("-n", name, "address", "add", f"10.213.{number}.2/24", "dev", "outside")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "outside", "up")
        ip("-n", name, "route", "add", "default", "via", f"10.213.{number}.1")
        ray = str(Path(sys.executable).with_name("ray"))
        given = ["--address", address, "--node-ip-address", f"10.213.{number}.2", "--num-cpus", "1"]
        with said.open("wb") as output:
            node = subprocess.Popen(
                inside(ray, "start", *given, "--object-store-memory", str(MEMORY), "--disable-usage-stats", "--block"),
                stdout=output,
                stderr=output,
            )
        eventually(lambda: b"Ray runtime started" in said.read_bytes(), lambda: said.read_text("utf-8"))
        yield lambda: ip("link", "set", f"osm{number}", "down")
    finally:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in map(int, pids.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if node is not None:
            node.wait()
        ip("netns", "delete", name)


def test_a_node_whose_network_vanishes_is_lost(cluster: Any, repo: Path) -> None:
    holding = Holding(repo)
    with node_of_another_network(cluster.address, repo.parent / "said") as vanish:

        def act() -> None:
            vanish()
            holding.until_lost(1)

        whole(holding.run(repo, act, nodes=len(cluster.list_all_nodes())), said=holding.said)


def started(repo: Path, *command: str | Path, cluster: str = "auto", **variables: str) -> subprocess.Popen[str]:
    """Start a command, and wait until a tool call of its run is held."""
    (repo.parent / "hold" / "all").touch()
    process = subprocess.Popen(
        [*command, "eval", "--cluster", cluster, "--model", "offline/oracle", "--batch-size", "4"],
        cwd=repo,
        env=clean_environment(**variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )

    def held() -> bool:
        if process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode}: {process.communicate()[1]}")
        return any((repo.parent / "hold").glob("waits-*"))

    eventually(held)
    return process


def test_a_cluster_of_the_command_s_own_reports_no_usage_to_ray_s_makers(cluster: Any, repo: Path) -> None:
    """Ray's processes decide by their environment, whatever the user's says."""
    with started(repo, COMMAND, cluster="local", RAY_USAGE_STATS_ENABLED="1") as command:
        below = psutil.Process(command.pid).children(recursive=True)
        # Not Python's, whose titles overwrite their environments.
        made = {process.name(): process for process in below if process.name() in ("gcs_server", "raylet")}
        said = {name: process.environ().get("RAY_USAGE_STATS_ENABLED") for name, process in made.items()}
        (repo.parent / "hold" / "all").unlink()
    assert command.returncode == 0
    assert said == {"gcs_server": "0", "raylet": "0"}


def test_what_git_ignores_is_not_on_the_nodes(cluster: Any, repo: Path) -> None:
    (repo / ".gitignore").write_text("words.py\n", encoding="utf-8")
    (repo / "mcp" / "words.py").touch()
    main = (repo / "mcp" / "main.py").read_text(encoding="utf-8")
    (repo / "mcp" / "main.py").write_text(f"import words\n{main}", encoding="utf-8")
    with pytest.raises(StartError) as refused:
        run(repo)
    assert "isn't used: mcp/main.py:1: ModuleNotFoundError: No module named 'words'" in str(refused.value)
    assert "Nodes don't have mcp/words.py, because .gitignore names it" in str(refused.value)


def test_the_command_is_killed_and_its_run_resumed(cluster: Any, repo: Path) -> None:
    with started(repo, COMMAND) as command:
        command.send_signal(signal.SIGKILL)
    (repo.parent / "hold" / "all").unlink()
    # Its actors end with it.
    eventually(lambda: not actors(), lambda: str(actors()))
    whole(run(repo, resume=True))


def test_the_head_of_the_cluster_is_killed_and_the_run_resumed_on_another_cluster(cluster: Any, repo: Path) -> None:
    """Ray itself would end the command after a minute, without a word of its own."""
    impatient = "import sys; from osmosis_ai.runtime.pool import ray; ray.HEAD_SECONDS = 10.0; "
    impatient += "from osmosis_ai.__main__ import main; main()"
    with started(repo, sys.executable, "-c", impatient) as command:
        (head,) = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("gcs_server")]
        head.kill()
        _, said = command.communicate(timeout=120)
    (repo.parent / "hold" / "all").unlink()
    assert "stopped: the cluster was lost (its head hasn't answered for 10 s); use --resume to continue" in said
    assert "Traceback" not in said
    assert command.returncode == 130, said
    whole(run(repo, resume=True, cluster="local", nodes=1, workers_per_node=1))
