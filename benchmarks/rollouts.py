"""Measure rollouts per second, CPU per rollout and start-up, against a raw aiohttp loop that makes the same requests.

    python benchmarks/rollouts.py --rollouts 1000

Both sides run against the same scripted endpoint, in a separate process whose CPU time isn't counted. See
benchmarks/README.md for the meaning of each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import NamedTuple

import msgspec
import psutil
from measuring import OSMOSIS, Measured, adopt_orphans, clean_environment, run
from repository import sums, write_repo
from startup import measure as measure_startup

from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_call

HERE = Path(__file__).parent
LIBRARIES = ("aiohttp", "fastmcp", "mcp", "litellm", "msgspec")
START_SECONDS = 60.0


class Side(NamedTuple):
    """One side's measurements: seconds for the rollouts, and CPU seconds of the whole process tree."""

    seconds: float
    cpu: float
    wall: float


class Endpoint(NamedTuple):
    """The scripted endpoint, in a separate process."""

    url: str
    process: psutil.Process

    def cpu(self) -> float:
        """CPU seconds used so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def scripted_endpoint(folder: Path, latency_ms: float, turns: int = 2) -> Iterator[Endpoint]:
    """Start the endpoint: every conversation calls the tool in each turn but the last and then answers.

    Args:
        folder: The folder for its files.
        latency_ms: The delay before each reply.
        turns: Model calls per conversation.
    """
    delay = {"delay": latency_ms / 1000} if latency_ms else {}
    calling = {"tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}], **delay}
    script, port_file = folder / "script.json", folder / "port"
    port_file.unlink(missing_ok=True)
    script.write_text(json.dumps({"turns": [calling] * (turns - 1) + [{"text": "3", **delay}]}), encoding="utf-8")
    command = [sys.executable, "-m", "osmosis_ai.testing.endpoint", "--script", script, "--port-file", port_file]
    process = subprocess.Popen(command, env=clean_environment())
    try:
        deadline = monotonic() + START_SECONDS
        while not port_file.exists():
            if process.poll() is not None or monotonic() > deadline:
                raise SystemExit("the scripted endpoint did not start")
            sleep(0.02)
        port = int(port_file.read_text(encoding="utf-8"))
        yield Endpoint(f"http://127.0.0.1:{port}/v1", psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()


def write_body(repo: Path) -> Path:
    """Write the request body that the command sends besides the messages, so that a plain loop can send the same."""
    with ScriptedEndpoint(by_turn(tool_call("add", a=1, b=2), text("3"))).run_in_thread() as endpoint:
        run(osmosis_command(endpoint.url, 1, 1, None), cwd=repo)
        body = dict(endpoint.chats[0].body)
    del body["messages"]
    file = repo / "body.json"
    file.write_bytes(msgspec.json.encode(body))
    return file


def raw_command(url: str, repo: Path, rollouts: int, batch_size: int) -> list[str]:
    """Return the command of the raw loop over a repository's rows; call `write_body` first."""
    arguments = [HERE / "raw_loop.py", url, repo / "body.json", repo / "test_data.jsonl", rollouts, batch_size]
    return [sys.executable, *map(str, arguments)]


def osmosis_command(url: str, rollouts: int, batch_size: int, workers: int | None) -> list[str]:
    """Return the `osmosis` command to measure."""
    command = [OSMOSIS, "test", "--base-url", url, "--model", "scripted", "--limit", str(rollouts)]
    command += ["--batch-size", str(batch_size), "--json", "--quiet"]
    return command if workers is None else [*command, "--workers", str(workers)]


def ours(measured: Measured, rollouts: int) -> Side:
    """Measure the `osmosis` command.

    Raises:
        SystemExit: A rollout failed or got a wrong score, which would make the measurement meaningless.
    """
    if not measured.stdout:
        raise SystemExit("the command printed no results to stdout")
    summary = json.loads(measured.stdout)["summary"]
    means = [function["mean"] for function in summary["functions"].values()]
    if (summary["passed"], summary["scoring_errors"], means) != (rollouts, 0, [1.0]):
        raise SystemExit(f"not every rollout was right: {json.dumps(summary)[:2000]}")
    return Side(summary["wall_ms"] / 1000, measured.cpu, measured.wall)


def raw(measured: Measured) -> Side:
    """Measure the raw loop."""
    return Side(float(measured.stdout) / 1000, measured.cpu, measured.wall)


def print_throughput(name: str, sides: Sequence[Side], start: Side, rollouts: int) -> None:
    """Print one side's medians.

    Args:
        name: The side's name.
        sides: Its measured runs.
        start: A run of one rollout, which measures the start-up cost.
        rollouts: The number of rollouts of each run.
    """
    rate = median(rollouts / side.seconds for side in sides)
    cpu = median(side.cpu for side in sides)
    each = (cpu - start.cpu) / (rollouts - 1) * 1000
    wall = median(side.wall for side in sides)
    print(f"  {name:<10} {rate:>8,.0f} /s {each:>8.2f} ms {cpu / rollouts * 1000:>8.2f} ms {start.cpu:>8.2f} s", end="")
    print(f" {wall:>8.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000, help="rollouts per run, at least 2 (default: 1000)")
    parser.add_argument("--batch-size", type=int, default=32, help="concurrent rollouts (default: 32)")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="the endpoint's delay per reply (default: 0)")
    parser.add_argument("--workers", type=int, help="passed on to the command when given")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side, the median counts (default: 3)")
    parser.add_argument("--startup-runs", type=int, default=5, help="runs of each start-up command, 0 for none")
    options = parser.parse_args()
    if options.rollouts < 2 or options.batch_size < 1 or options.runs < 1:
        parser.error("--rollouts needs 2 or more, --batch-size and --runs 1 or more")

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    print(f"{usable} CPUs, {platform.system()}, Python {platform.python_version()}; {libraries}")
    if not adopt_orphans():
        print(
            "this system can't count the CPU time of processes that outlive the command: workers' time may be missing"
        )

    with tempfile.TemporaryDirectory() as folder:
        repo = write_repo(Path(folder) / "repo", sums(options.rollouts))
        write_body(repo)
        with scripted_endpoint(Path(folder), options.latency_ms) as endpoint:
            spare = [endpoint.process.pid]

            def run_ours(rollouts: int) -> Side:
                command = osmosis_command(endpoint.url, rollouts, options.batch_size, options.workers)
                return ours(run(command, cwd=repo, spare=spare), rollouts)

            def run_raw(rollouts: int) -> Side:
                command = raw_command(endpoint.url, repo, rollouts, options.batch_size)
                return raw(run(command, cwd=repo, spare=spare))

            start_ours, start_raw = run_ours(1), run_raw(1)
            our_sides, raw_sides, busy = [], [], []
            for _ in range(options.runs):
                raw_sides.append(run_raw(options.rollouts))
                before = endpoint.cpu()
                our_sides.append(run_ours(options.rollouts))
                busy.append((endpoint.cpu() - before) / our_sides[-1].seconds)

        workers = "default" if options.workers is None else options.workers
        print(
            f"\n{options.rollouts} rollouts of two model calls and one tool call, batch size {options.batch_size}, "
            f"workers {workers}, {options.latency_ms:g} ms per reply; median of {options.runs} runs"
        )
        print(f"  {'':<10} {'rollouts':>11} {'CPU each':>11} {'with start':>11} {'start CPU':>10} {'command':>10}")
        print_throughput("osmosis", our_sides, start_ours, options.rollouts)
        print_throughput("raw loop", raw_sides, start_raw, options.rollouts)
        share = median(a.seconds / b.seconds for a, b in zip(raw_sides, our_sides, strict=True))
        print(f"  osmosis reaches {share:.0%} of the raw loop's rate; the endpoint used {median(busy):.0%} of a CPU")
        if options.startup_runs:
            measure_startup(OSMOSIS, repo, options.startup_runs)


if __name__ == "__main__":
    main()
