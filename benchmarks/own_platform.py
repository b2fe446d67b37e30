"""Measure the latency and memory of a self-hosted platform, and check that it loses no submission.

    python benchmarks/own_platform.py --times 20 --runs 10000

Measures the time from a submission to its first rollout in a warm environment, the latency of long lists of runs and of
`/health` while runs are running, and the memory for uploading and checking a large dataset. Then a hundred submissions
arrive at once while the server is killed at random moments: each must become exactly one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
from measuring import OSMOSIS, clean_environment

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

from platforms import make_workspace, rows, submission

PATIENCE = 300.0
SUBMISSIONS = 100


class Server:
    """The server process, which can be killed and restarted."""

    def __init__(self, data: Path, workspace: Path) -> None:
        self._data = data
        self._workspace = workspace
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = ["--port", "8641", "--data", str(self._data), "--max-runs", "8"]
        self._process = subprocess.Popen(
            [OSMOSIS, "platform", "up", "--foreground", *options], env=clean_environment(), stderr=subprocess.DEVNULL
        )
        deadline = monotonic() + PATIENCE
        while monotonic() < deadline:
            try:
                return self.check_health()
            except OSError:
                sleep(0.02)
        raise SystemExit("the platform doesn't answer")

    def kill(self) -> None:
        """Kill the server."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def check_health(self) -> None:
        """Ask for its health."""
        with urlopen("http://127.0.0.1:8641/health", timeout=10) as answer:
            answer.read()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def ask(
        self, method: str, path: str, body: object = None, *, seconds: float = 60, **headers: str
    ) -> dict[str, Any]:
        """Send a request; return the answer's object."""
        token = (self._data / "token").read_text(encoding="ascii")
        known = {
            "Authorization": f"Bearer {token}",
            "X-Osmosis-Git": "acme/rollouts",
            "X-Osmosis-Path": str(self._workspace),
        }
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        url = path if path.startswith("http") else f"http://127.0.0.1:8641/api/cli/{path}"
        with urlopen(Request(url, data, {**known, **headers}, method=method), timeout=seconds) as answer:
            return json.loads(answer.read() or b"{}")

    def wait(self, name: str) -> dict[str, Any]:
        """Wait for a run's end."""
        deadline = monotonic() + PATIENCE
        while monotonic() < deadline:
            shown = self.ask("GET", f"eval-runs/{name}")
            if shown["eval_run"]["status"] in ("finished", "failed", "stopped"):
                return shown
            sleep(0.05)
        raise SystemExit(f"the run {name} doesn't end")


def upload(server: Server) -> None:
    """Upload the dataset."""
    data = rows(200)
    about = {"file_name": "sums", "file_size": len(data), "extension": "jsonl"}
    created = server.ask("POST", "datasets", about)
    server.ask("PUT", created["upload"]["presigned_url"], data)
    server.ask("POST", f"datasets/{created['id']}/complete", {})


def first_rollouts(server: Server, times: int) -> list[float]:
    """Return the seconds from a submission to the start of its first rollout, according to the log."""
    found = []
    for _ in range(times + 1):
        name = server.ask("POST", "eval-runs", submission())["name"]
        server.wait(name)
        entries = server.ask("GET", f"eval-runs/{name}/logs?limit=200")["logs"]
        at = {entry["step"]: entry["timestamp"] for entry in reversed(entries)}
        found.append(_seconds(at["rollout"]) - _seconds(at["submit"]))
    # The first one makes the clone.
    return found[1:]


def health(server: Server, runs: int) -> list[float]:
    """Return the latencies of requests in milliseconds while runs are running."""
    body = {**submission(), "evaluation_config": {"limit": 100}}
    names = [server.ask("POST", "eval-runs", body)["name"] for _ in range(runs)]
    found = []
    while any(server.ask("GET", f"eval-runs/{name}")["eval_run"]["status"] in ("pending", "running") for name in names):
        for _ in range(20):
            began = perf_counter()
            server.check_health()
            found.append((perf_counter() - began) * 1000)
            sleep(0.01)
    return found


def large_dataset(server: Server, folder: Path, megabytes: int) -> tuple[float, float, float]:
    """Upload a dataset; return the server's extra MB, the check's MB, and the seconds of upload and check."""
    file = folder / "large.jsonl"
    block = rows(1000, "{n} + 0 " + "x" * 900)
    with file.open("wb") as target:
        while target.tell() < megabytes * 1_000_000:
            target.write(block)
    size = file.stat().st_size
    created = server.ask("POST", "datasets", {"file_name": "large", "file_size": size, "extension": "jsonl"})
    process = psutil.Process(server.pid)
    before, most, checks = process.memory_info().rss, [0.0], [0.0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            most[0] = max(most[0], process.memory_info().rss - before)
            for child in process.children():
                with suppress(psutil.Error):
                    if any("dataset_check" in word for word in child.cmdline()):
                        checks[0] = max(checks[0], child.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = perf_counter()
    with file.open("rb") as stream:
        headers = {"Content-Length": str(size)}
        with urlopen(Request(created["upload"]["presigned_url"], stream, headers, method="PUT"), timeout=3600):
            pass
    server.ask("POST", f"datasets/{created['id']}/complete", {}, seconds=3600)
    seconds = perf_counter() - began
    done.set()
    watcher.join()
    file.unlink()
    return most[0] / 1e6, checks[0] / 1e6, seconds


def many(server: Server, database: Path, runs: int) -> dict[str, float]:
    """Return the latencies in milliseconds of requests to a list of many runs, which are copies of the first."""
    with sqlite3.connect(database) as db:
        db.row_factory = sqlite3.Row
        first = dict(db.execute("SELECT * FROM runs WHERE results IS NOT NULL LIMIT 1").fetchone())
        del first["pk"]
        columns = ", ".join(first)
        copies = ({**first, "id": str(uuid.uuid4()), "name": f"copy-{number}"} for number in range(runs))
        db.executemany(
            f"INSERT INTO runs ({columns}) VALUES ({', '.join(f':{name}' for name in first)})",
            copies,
        )
    found = {}
    for title, path in {
        "list": "eval-runs?limit=50",
        "end of the list": f"eval-runs?limit=50&offset={runs - 50}",
        "info by name": f"eval-runs/copy-{runs // 2}",
        "logs": f"eval-runs/{first['id']}/logs",
    }.items():
        times = []
        for _ in range(30):
            began = perf_counter()
            server.ask("GET", path)
            times.append((perf_counter() - began) * 1000)
        found[title] = max(times)
    return found


def submitted_once(server: Server, moment: float) -> tuple[int, int]:
    """Submit a hundred runs at once, kill the server after `moment` seconds; return the runs, and the lost ones."""
    before = server.ask("GET", "eval-runs?limit=1")["total_count"]
    # No such commit: the run fails at once.
    body = submission(commit_sha="0" * 40)

    def submit(number: int) -> str:
        key = {"Idempotency-Key": f"{moment}-{number}"}
        while True:
            try:
                return str(server.ask("POST", "eval-runs", body, **key)["id"])
            except HTTPError:
                raise
            except (OSError, HTTPException):
                # Killed before or during its answer.
                sleep(0.02)

    with ThreadPoolExecutor(SUBMISSIONS) as pool:
        futures = [pool.submit(submit, number) for number in range(SUBMISSIONS)]
        sleep(moment)
        server.kill()
        server.start()
        names = {future.result() for future in futures}
    after = server.ask("GET", "eval-runs?limit=1")["total_count"]
    return after - before, SUBMISSIONS - len(names)


def _seconds(timestamp: str) -> float:
    whole, _, fraction = timestamp.rstrip("Z").partition(".")
    return time.mktime(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction or 0}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="kills")
    parser.add_argument("--runs", type=int, default=10_000, help="runs in the list")
    parser.add_argument("--first", type=int, default=5, help="runs whose start is measured")
    parser.add_argument("--at-work", type=int, default=8, help="runs that work while /health is asked for")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the large dataset")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "platform")
        server = Server(data, make_workspace(Path(folder, "workspace")))
        server.start()
        try:
            upload(server)
            found = first_rollouts(server, options.first)
            print(f"submission to first rollout: {statistics.median(found):.2f} s, at most {max(found):.2f} s")
            times = health(server, options.at_work)
            worst = sorted(times)[int(len(times) * 0.99)]
            print(f"/health while {options.at_work} runs work: 99 % within {worst:.1f} ms, at most {max(times):.1f} ms")
            more, check, seconds = large_dataset(server, Path(folder), options.megabytes)
            print(
                f"a dataset of {options.megabytes:,} MB: {seconds:.0f} s, {more:.0f} MB more in the server, "
                f"{check:.0f} MB in its check"
            )
            for title, most in many(server, data / "platform.db", options.runs).items():
                print(f"{title}, {options.runs:,} runs: at most {most:.1f} ms")
            wrong = 0
            for _ in range(options.times):
                moment = random.uniform(0, 0.6)
                runs, lost = submitted_once(server, moment)
                wrong += runs != SUBMISSIONS or lost != 0
            print(f"{SUBMISSIONS} submissions at once, server killed, {options.times} times: wrong {wrong} times")
        finally:
            server.kill()
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    os.environ.setdefault("OSMOSIS_WORKERS", "1")
    main()
