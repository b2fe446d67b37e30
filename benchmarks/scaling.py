"""Measure the gain from a second worker, and the cost of many rows, isolation and durable records.

    python benchmarks/scaling.py

- workers: rollouts per second with two workers against one, when each rollout's tool is CPU-bound; and the machine's
  own speed-up at that time, from the same work in plain processes;
- memory: the command's peak memory with many rows against few;
- isolation: wall and CPU milliseconds that `--isolation rollout` and `--isolation sandbox` add to a rollout and its
  score, one rollout at a time;
- durability: the time that waiting for the disk adds to a run, against the same run on an in-memory file system.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from measuring import OSMOSIS, adopt_orphans, clean_environment, run
from repository import write_repo

from osmosis_ai.errors import UsageError
from osmosis_ai.runtime.bubblewrap import find_bwrap
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call

MEMORY_FILE_SYSTEM = Path("/dev/shm")
SAMPLE_SECONDS = 0.05
TARGETS = {"rollout": 25, "sandbox": 250}

WORKING = '''\
from fastmcp import FastMCP

mcp = FastMCP("work")


@mcp.tool
def work(rounds: int) -> int:
    """Keep a CPU busy."""
    total = 0
    for number in range(rounds):
        total = (total + number * number) % 1_000_003
    return total
'''


def tasks(count: int) -> Iterable[dict[str, str]]:
    """Return rows whose answer is always `done`."""
    for index in range(count):
        yield {"system_prompt": "Work.", "user_prompt": f"Task {index}", "ground_truth": "done"}


def working(rounds: int) -> Callable[[Request], Reply]:
    """A model that calls the tool once and then says `done`."""
    call, answer = tool_call("work", rounds=rounds), text("done")
    return lambda request: call if request.turn == 0 else answer


def summary_of(root: Path, url: str, *options: str) -> dict[str, Any]:
    """Run the command; return its summary and, if the system reports it, its own peak memory in bytes."""
    command = [OSMOSIS, "test", "--base-url", url, "--model", "scripted", "--json", "--quiet", *options]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=root, env=clean_environment(), stdout=output)
        peak = 0
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            sleep(SAMPLE_SECONDS)
        output.seek(0)
        summary: dict[str, Any] = json.loads(output.read())["summary"]
    if summary["failed"] or summary["scoring_errors"]:
        raise SystemExit(f"not every rollout was right: {json.dumps(summary)[:2000]}")
    return {**summary, "peak": peak}


def peak_memory(pid: int) -> int:
    """Return a process's peak memory so far in bytes; 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def seconds(root: Path, url: str, *options: str) -> float:
    """Return the wall seconds from the first rollout to the last record."""
    return float(summary_of(root, url, *options)["wall_ms"]) / 1000


def plain_seconds(processes: int, calls: int, rounds: int) -> float:
    """Return the seconds that a number of calls of the tool's function take in a number of otherwise idle processes."""
    work = WORKING.partition("@mcp.tool\n")[2]
    program = f"{work}\nfor _ in range({calls // processes}):\n    work({rounds})"
    started = perf_counter()
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(processes)]
    for process in running:
        process.wait()
    return perf_counter() - started


def measure_workers(folder: Path, options: argparse.Namespace) -> None:
    root = write_repo(folder / "workers", tasks(options.rollouts), tools=WORKING)
    ours: list[float] = []
    plain: list[float] = []
    rates: list[list[float]] = [[], []]
    with ScriptedEndpoint(working(options.rounds), record=False).run_in_thread() as endpoint:
        # In turns, so that other load hits all of them alike.
        for _ in range(options.runs):
            one, two = (
                seconds(root, endpoint.url, "--batch-size", "16", "--workers", workers) for workers in ("1", "2")
            )
            ours.append(one / two)
            for taken, its_rates in zip((one, two), rates, strict=True):
                its_rates.append(options.rollouts / taken)
            plain_one, plain_two = (plain_seconds(number, options.rollouts, options.rounds) for number in (1, 2))
            plain.append(plain_one / plain_two)
    slow, fast = (median(its_rates) for its_rates in rates)
    print(f"workers: {slow:.1f} /s with one worker, {fast:.1f} /s with two, {median(ours):.2f} times as many ", end="")
    print(f"(target: 1.7 on two CPUs); two plain processes beside one: {median(plain):.2f}", flush=True)


def measure_memory(folder: Path, options: argparse.Namespace) -> None:
    peaks = []
    with ScriptedEndpoint(working(1), record=False).run_in_thread() as endpoint:
        for rows in (100, options.rows):
            root = write_repo(folder / f"memory{rows}", tasks(rows), tools=WORKING)
            peaks.append(summary_of(root, endpoint.url, "--batch-size", "32")["peak"] / (1 << 20))
    few, many = peaks
    print(f"memory: {few:.0f} MiB at 100 rows, {many:.0f} MiB at {options.rows}: ", end="")
    print(f"{many - few:+.0f} MiB (target: within 50)", flush=True)


class Each(NamedTuple):
    """Milliseconds for each rollout: wall time, and CPU time of the command's whole process tree."""

    wall: float
    cpu: float


def one_at_a_time(root: Path, url: str, rollouts: int, isolation: str) -> Each:
    """Return the cost of a rollout, without the start of the command."""

    def measured(limit: int) -> tuple[float, float]:
        model = ["--base-url", url, "--model", "scripted", "--json", "--quiet"]
        options = ["--batch-size", "1", "--isolation", isolation, "--limit", str(limit)]
        done = run([OSMOSIS, "test", *model, *options], cwd=root)
        return json.loads(done.stdout)["summary"]["wall_ms"], done.cpu * 1000

    _, start_cpu = measured(1)
    wall, cpu = measured(rollouts)
    return Each(wall / rollouts, (cpu - start_cpu) / (rollouts - 1))


def measure_isolation(folder: Path, options: argparse.Namespace) -> None:
    adopt_orphans()
    root = write_repo(folder / "isolation", tasks(options.alone), tools=WORKING)
    found: dict[str, list[Each]] = {"session": [], "rollout": [], **({"sandbox": []} if can_sandbox() else {})}
    with ScriptedEndpoint(working(1), record=False).run_in_thread() as endpoint:
        for _ in range(options.runs):
            for isolation, runs in found.items():
                runs.append(one_at_a_time(root, endpoint.url, options.alone, isolation))
    # Other load can only add to either, so the least is nearest to the truth.
    least = {
        name: Each(min(each.wall for each in runs), min(each.cpu for each in runs)) for name, runs in found.items()
    }
    shared = least.pop("session")
    print(f"isolation: {shared.wall:.1f} ms a rollout in a shared worker, CPU {shared.cpu:.1f} ms", flush=True)
    for name, each in least.items():
        print(
            f"  {name}: {each.wall - shared.wall:+.1f} ms (target: at most {TARGETS[name]}), "
            f"CPU {each.cpu - shared.cpu:+.1f} ms",
            flush=True,
        )


def can_sandbox() -> bool:
    try:
        find_bwrap()
    except UsageError as error:
        print(f"isolation: not measured with sandboxes: {error}")
        return False
    return True


def measure_durability(folder: Path, options: argparse.Namespace) -> None:
    if not MEMORY_FILE_SYSTEM.is_dir():
        print("durability: this system has no file system in memory to compare with")
        return
    with (
        tempfile.TemporaryDirectory(dir=MEMORY_FILE_SYSTEM) as memory,
        ScriptedEndpoint(working(1), record=False).run_in_thread() as endpoint,
    ):
        roots = [
            write_repo(Path(place) / "durability", tasks(options.rollouts * 5), tools=WORKING)
            for place in (folder, memory)
        ]
        times: list[list[float]] = [[], []]
        for _ in range(options.runs):
            for root, taken in zip(roots, times, strict=True):
                taken.append(seconds(root, endpoint.url, "--batch-size", "16"))
    # Other load can only add to either, so the least is nearest to the truth.
    disk, without = (min(taken) for taken in times)
    print(f"durability: {disk:.2f} s on disk, {without:.2f} s in memory: {disk / without - 1:+.1%}", flush=True)


MEASURES = {
    "workers": measure_workers,
    "memory": measure_memory,
    "isolation": measure_isolation,
    "durability": measure_durability,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", nargs="*", default=list(MEASURES), help="which of them (default: all)")
    parser.add_argument(
        "--rollouts", type=int, default=200, help="for workers, five times as many for durability (default: 200)"
    )
    parser.add_argument("--rounds", type=int, default=1_000_000, help="how long the tool is busy (default: a million)")
    parser.add_argument("--rows", type=int, default=10_000, help="for memory (default: 10000)")
    parser.add_argument("--alone", type=int, default=100, help="rollouts for isolation (default: 100)")
    parser.add_argument("--runs", type=int, default=3, help="how many runs of each (default: 3)")
    options = parser.parse_args()
    unknown = set(options.measure) - MEASURES.keys()
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.measure:
            MEASURES[name](Path(folder), options)


if __name__ == "__main__":
    main()
