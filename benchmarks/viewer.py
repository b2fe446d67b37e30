"""Measure the viewer: the pages of a run of 100,000 rows, and the cost of following a running run.

    python benchmarks/viewer.py pages
    python benchmarks/viewer.py watched

`pages` measures a real server over HTTP and, if installed (`make test-browser` installs Playwright and Chromium), a
real browser from the request to the painted page. `watched` alternates `osmosis test` alone and with a page that
follows every change.
"""

from __future__ import annotations

import argparse
import asyncio
import http.cookiejar
import json
import random
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import psutil
from measuring import OSMOSIS, clean_environment, run
from repository import sums, write_repo
from scores import AT_ONCE, typical

from osmosis_ai.records import Score
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_call

PAGES = {
    "runs": "/",
    "run": "/runs/{repo}/latest",
    "figures": "/runs/{repo}/latest/figures",
    "rows 50,000 on": "/runs/{repo}/latest/table?offset=50000&limit=100",
    "not passed": "/runs/{repo}/latest/table?status=not-passed&offset=20000",
    "by score": "/runs/{repo}/latest/table?sort=score&offset=50000",
    "score from 0.2 to 0.4": "/runs/{repo}/latest/table?min=0.2&max=0.4",
    "tool": "/runs/{repo}/latest/table?tool=add&offset=70000",
    "text": "/runs/{repo}/latest/table?q=is+77777",
    "row": "/runs/{repo}/latest/rows/50000",
}
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


async def fill(root: Path, rows: int) -> None:
    """Store a finished run with this number of rows, each with a score."""
    draw = random.Random(1)
    with RunStore.open(root) as store:
        config = {"model": "m", "dataset": "/data/rows.jsonl", "n": 1, "functions": ["r:score"], "planned": rows}
        run_id = await store.create_run("eval", identity={}, config=config)
        for start in range(0, rows, AT_ONCE):
            batch = [typical(index) for index in range(start, min(start + AT_ONCE, rows))]
            keys = await asyncio.gather(*(store.save_rollout(run_id, rollout, row) for rollout, row in batch))
            await store.save_scores({key: [Score("r:score", round(draw.random(), 2))] for key in keys})
        await store.mark(run_id, "finished", {"functions": {"r:score": 0.5}})


@contextmanager
def viewer(root: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start the viewer; yield its URL with the token, and its process."""
    command = [OSMOSIS, "view", "--root", str(root), "--json", "--no-open"]
    with subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], psutil.Process(process.pid)
        finally:
            process.terminate()


def pages(rows: int, runs: int) -> None:
    """Measure each page: the first time, and the median of the times after."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repo"
        root.mkdir()
        asyncio.run(fill(root, rows))
        with viewer(root) as (url, process):
            base = url.partition("/?")[0]
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
            )
            opener.open(url).read()
            print(f"a run of {rows:,} rows; milliseconds from request to answer, the first time and again")
            for name, path in PAGES.items():
                took = []
                for _ in range(runs + 1):
                    started = perf_counter()
                    size = len(opener.open(base + path.format(repo="repo")).read())
                    took.append((perf_counter() - started) * 1000)
                print(f"  {name:22} {took[0]:8.0f} {median(took[1:]):8.1f}   {size / 1024:.0f} KiB")
            print(f"  memory of the server: {process.memory_info().rss / 2**20:.0f} MiB")
            painted(url, runs)
            print(f"  memory of the server: {process.memory_info().rss / 2**20:.0f} MiB")


def painted(url: str, runs: int) -> None:
    """Measure in a browser: the run's page until it is painted, and jumps and filters until their rows are."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("  no browser: make test-browser installs Playwright")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        # What asks the page for its times is evaluated text, which its policy forbids.
        page = browser.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)
        page.goto(url)
        base = url.partition("/?")[0]
        took: dict[str, list[float]] = {"run": [], "filter": [], "jump": []}
        for number in range(runs):
            page.goto(f"{base}/runs/repo/latest", wait_until="load")
            took["run"].append(page.wait_for_function(PAINTED).json_value())
            page.goto(f"{base}/runs/repo/latest?status=not-passed&sort=-score", wait_until="load")
            took["filter"].append(page.wait_for_function(PAINTED).json_value())
            page.goto(f"{base}/runs/repo/latest", wait_until="networkidle")
            took["jump"].append(page.evaluate(JUMP, (number + 1) / (runs + 1)))
        print("in a browser, to the first paint (run, filter) or to the rows (jump); median and worst")
        for name, each in took.items():
            print(f"  {name:22} {median(each):8.0f} {max(each):8.0f}")
        print(f"  rows in the page: {page.evaluate('document.querySelectorAll(`#window tr`).length')}")
        browser.close()


PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
JUMP = """async (part) => {
  const box = document.getElementById("window");
  const started = performance.now();
  box.scrollTop = box.scrollHeight * part;
  const seen = () => {
    const at = box.getBoundingClientRect();
    const row = document.elementFromPoint(at.left + 60, at.top + at.height / 2)?.closest("tr[data-row]");
    return row !== undefined && row !== null;
  };
  await new Promise((done) => requestAnimationFrame(done));
  while (!seen()) await new Promise((done) => requestAnimationFrame(done));
  return performance.now() - started;
}"""


def watched(rollouts: int, runs: int) -> None:
    """Compare a run alone with one that a page follows."""
    script = by_turn(tool_call("add", a=1, b=2), text("3"))
    with tempfile.TemporaryDirectory() as folder, ScriptedEndpoint(script).run_in_thread() as endpoint:
        repo = write_repo(Path(folder) / "repo", sums(rollouts))
        command = [OSMOSIS, "test", "--model", "m", "--base-url", endpoint.url, "--quiet"]
        run([*command, "--limit", "10"], cwd=repo)
        alone, seen, shares, used_each = [], [], [], []
        for _ in range(runs):
            alone.append(run(command, cwd=repo))
            with viewer(repo) as (url, process), following(url) as answers:
                before = sum(process.cpu_times()[:2])
                seen.append(run(command, cwd=repo, spare=[process.pid]))
                used_each.append(sum(process.cpu_times()[:2]) - before)
                shares.append(used_each[-1] / seen[-1].wall / len(psutil.Process().cpu_affinity() or [0]))
            assert answers
        print(f"{rollouts:,} rollouts, median of {runs} alternating runs")
        for name in ("wall", "cpu"):
            one, two = (median(getattr(each, name) for each in found) for found in (alone, seen))
            print(f"  {name} time alone {one:.2f} s, watched {two:.2f} s: {two / one - 1:+.1%}")
        share = median(used / each.cpu for used, each in zip(used_each, seen, strict=True))
        print(f"  the viewer used {median(used_each):.2f} s of CPU time, {share:.1%} of the run's")
        print(f"  and {median(shares):.1%} of the machine's")
        print(f"  the page read itself {len(answers)} times in the last run")


@contextmanager
def following(url: str) -> Iterator[list[int]]:
    """Follow the latest run as a page does: read it again after each change, at most once a second."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    )
    opener.open(url).read()
    base, answers, ended = url.partition("/?")[0], [], threading.Event()

    def follow() -> None:
        with opener.open(f"{base}/live") as events:
            for line in events:
                if ended.is_set():
                    return
                if line.startswith(b"event"):
                    started = perf_counter()
                    again = urllib.request.Request(f"{base}/runs/repo/latest", headers={"x-without-rows": "1"})
                    answers.append(len(opener.open(again).read()))
                    opener.open(f"{base}/runs/repo/latest/table?offset=0&limit=100").read()
                    # As in view.js.
                    ended.wait(min(max(1.0, 25 * (perf_counter() - started)), 10.0))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    yield answers
    ended.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pages", "watched"])
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the run (default: 100000)")
    parser.add_argument("--rollouts", type=int, default=2000, help="rollouts of the watched run (default: 2000)")
    parser.add_argument("--runs", type=int, default=5, help="the median of how many (default: 5)")
    options = parser.parse_args()
    if options.what == "pages":
        pages(options.rows, options.runs)
    else:
        watched(options.rollouts, options.runs)


if __name__ == "__main__":
    main()
