"""Measure how cost grows with the number of rows, turns, and stored rollouts.

    python benchmarks/growth.py rows turns runs

- rows: rollouts per second, CPU per rollout and peak memory of the command and its workers, for runs of 100, 1,000 and
  10,000 rows (and of 100,000 with --large), beside the raw loop's rate;
- turns: CPU per turn of long conversations, which every request carries whole, beside the raw loop's;
- runs: seconds of `osmosis runs show`, `compare` and `rescore` on 1,000, 10,000 and 100,000 stored rollouts, beside
  those of a plain loop that reads the records of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import psutil
from measuring import OSMOSIS, adopt_orphans, clean_environment, run
from repository import sums, write_repo
from rollouts import Side, osmosis_command, ours, raw, raw_command, scripted_endpoint, write_body
from scores import fill

SAMPLE_SECONDS = 0.1
BATCH_SIZE = 32
READ = """
    SELECT rollouts.*, scores.* FROM rollouts LEFT JOIN scores ON scores.rollout = rollouts.pk
    WHERE rollouts.run = (SELECT max(pk) FROM runs) ORDER BY row_index
"""


def peak_memory(command: list[str], cwd: Path) -> tuple[float, float]:
    """Run a command; return the peak memory in MiB of the command and of the largest of its processes.

    Raises:
        SystemExit: The command failed.
    """
    process = subprocess.Popen(
        command, cwd=cwd, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    tree = psutil.Process(process.pid)
    own = largest = 0
    while process.poll() is None:
        try:
            own = max(own, tree.memory_info().rss)
            for child in tree.children(recursive=True):
                largest = max(largest, child.memory_info().rss)
        except psutil.Error:
            pass  # one that has just ended
        sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return own / (1 << 20), largest / (1 << 20)


def measure_rows(folder: Path, options: argparse.Namespace) -> None:
    sizes = [100, 1_000, 10_000, *([100_000] if options.large else [])]
    repo = write_repo(folder / "rows", sums(sizes[-1]))
    write_body(repo)
    floor: dict[int, list[float]] = {size: [] for size in sizes}
    sides: dict[int, list[Side]] = {size: [] for size in sizes}
    print(f"rows: {'':>8} {'rollouts':>10} {'raw loop':>10} {'share':>8} {'CPU each':>10} {'command':>10} a worker")
    with scripted_endpoint(folder, 0.0) as endpoint:
        spare = [endpoint.process.pid]
        start = run(osmosis_command(endpoint.url, 1, BATCH_SIZE, None), cwd=repo, spare=spare).cpu
        # In rounds, so that other load hits all sizes alike; the largest is long enough to be its own mean.
        for number in range(options.runs):
            for size in sizes if number == 0 else sizes[:3]:
                loop = raw_command(endpoint.url, repo, size, BATCH_SIZE)
                floor[size].append(size / raw(run(loop, cwd=repo, spare=spare)).seconds)
                command = osmosis_command(endpoint.url, size, BATCH_SIZE, None)
                sides[size].append(ours(run(command, cwd=repo, spare=spare), size))
        for size in sizes:
            own, worker = peak_memory(osmosis_command(endpoint.url, size, BATCH_SIZE, None), repo)
            rate = median(size / side.seconds for side in sides[size])
            cpu = median(side.cpu - start for side in sides[size])
            # Of few rollouts the start is a hundred times the rest, and varies by more than that.
            each = f"{cpu / size * 1000:.2f} ms" if size >= 1_000 else "–"
            bare = median(floor[size])
            print(
                f"  {size:>10,} {rate:>9,.0f}/s {bare:>9,.0f}/s {rate / bare:>8.1%} {each:>10} {own:>6.0f} MiB "
                f"{worker:>6.0f} MiB",
                flush=True,
            )


def measure_turns(folder: Path, options: argparse.Namespace) -> None:
    repo = write_repo(folder / "turns", sums(options.rollouts))
    write_body(repo)
    for turns in (2, 10, 50):
        with scripted_endpoint(folder, 0.0, turns) as endpoint:
            url, spare = endpoint.url, [endpoint.process.pid]

            def command(rollouts: int, url: str = url, spare: list[int] = spare) -> float:
                line = [*osmosis_command(url, rollouts, BATCH_SIZE, None), "--max-turns", "60"]
                return ours(run(line, cwd=repo, spare=spare), rollouts).cpu

            def loop(rollouts: int, url: str = url, spare: list[int] = spare) -> float:
                return run(raw_command(url, repo, rollouts, BATCH_SIZE), cwd=repo, spare=spare).cpu

            beyond = [median(side(options.rollouts) - side(1) for _ in range(options.runs)) for side in (command, loop)]
        each, floor = (seconds / (options.rollouts - 1) / turns * 1000 for seconds in beyond)
        print(
            f"turns: {turns:>3} in each of {options.rollouts} rollouts: {each:.2f} ms of CPU per turn, "
            f"raw loop {floor:.2f} ms",
            flush=True,
        )


def measure_runs(folder: Path, options: argparse.Namespace) -> None:
    for size in (1_000, 10_000, 100_000):
        repo = write_repo(folder / f"runs{size}", sums(1))
        for _ in range(2):
            asyncio.run(fill(repo, size))
        rescore = run([OSMOSIS, "runs", "rescore"], cwd=repo)
        listed = json.loads(run([OSMOSIS, "runs", "--json"], cwd=repo).stdout)["runs"]
        first, second = (info["id"] for info in listed)
        run([OSMOSIS, "runs", "rescore", second], cwd=repo)
        figures = {
            "show": run([OSMOSIS, "runs", "show"], cwd=repo),
            "show --row": run([OSMOSIS, "runs", "show", "--row", str(size // 2)], cwd=repo),
            "compare": run([OSMOSIS, "runs", "compare", first, second], cwd=repo),
            "rescore": rescore,
        }
        said = ", ".join(f"{name} {took.wall:.2f} s ({took.cpu:.2f} s of CPU)" for name, took in figures.items())
        print(f"runs: {size:>7,} rollouts: {said}; a bare loop over the records {bare_read(repo):.2f} s", flush=True)


def bare_read(repo: Path) -> float:
    """Return the seconds that a plain loop takes to read the rollouts and scores of one run."""
    started = perf_counter()
    with closing(sqlite3.connect(repo / ".osmosis" / "runs.db")) as db:
        for _ in db.execute(READ):
            pass
    return perf_counter() - started


MEASURES = {"rows": measure_rows, "turns": measure_turns, "runs": measure_runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", nargs="*", default=list(MEASURES), help=f"default: {' '.join(MEASURES)}")
    parser.add_argument("--large", action="store_true", help="also 100,000 rows, which takes minutes")
    parser.add_argument("--rollouts", type=int, default=100, help="rollouts for turns (default: 100)")
    parser.add_argument("--runs", type=int, default=3, help="the median of how many runs (default: 3)")
    options = parser.parse_args()
    unknown = set(options.measure) - MEASURES.keys()
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.measure:
            MEASURES[name](Path(folder), options)


if __name__ == "__main__":
    main()
