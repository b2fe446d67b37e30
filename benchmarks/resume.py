"""Kill a run at random moments and resume it; the results must equal those of an uninterrupted run.

    python benchmarks/resume.py --times 20

Each round starts a new run, kills it with SIGKILL a random moment after a random request, and continues it with
`--resume`. The requests at the endpoint show which rollouts were started twice.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from measuring import OSMOSIS, clean_environment
from repository import write_repo

from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call

NOTHING_TO_RESUME = 2
PATIENCE = 120.0


def rows(count: int) -> Iterable[dict[str, str]]:
    """Return rows with different answers."""
    for index in range(count):
        yield {"system_prompt": "Add.", "user_prompt": f"What is {index} + 1?", "ground_truth": str(index + 1)}


class Model:
    """A model that adds with the tool after 20 ms, gets every seventh row wrong, and counts requests."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._left = 0

    def count_down(self, requests: int) -> None:
        """Set an event after this many further requests."""
        self._left = requests
        self.reached.clear()

    def __call__(self, request: Request) -> Reply:
        self._left -= 1
        if self._left <= 0:
            self.reached.set()
        number = int(request.messages[1]["content"].split()[2])
        if request.turn == 0:
            return tool_call("add", a=number, b=1).after(0.02)
        return text("wrong" if number % 7 == 3 else request.messages[-1]["content"]).after(0.02)


def command(url: str, options: argparse.Namespace, *more: str) -> list[str]:
    """Return the command to kill and resume."""
    arguments = [OSMOSIS, "eval", "--base-url", url, "--model", "scripted", "--json", "--quiet"]
    return [*arguments, "--batch-size", str(options.batch_size), "--n", "2", *more]


def finish(arguments: list[str], root: Path) -> tuple[int, str]:
    """Run a command to its end; return its exit code and its output."""
    done = subprocess.run(arguments, cwd=root, env=clean_environment(), stdout=subprocess.PIPE, encoding="utf-8")
    return done.returncode, done.stdout


def outcome(output: str) -> Any:
    """Return a run's results, without the parts that differ between runs."""
    results = json.loads(output)
    rows = [
        (row["row_index"], [(run["run_index"], run["scores"], run["error"], run["tokens"]) for run in row["runs"]])
        for row in results["rows"]
    ]
    summary = {name: results["summary"][name] for name in ("total_runs", "eval_fns", "total_tokens", "missing")}
    return rows, summary


def begun(endpoint: ScriptedEndpoint) -> Counter[str]:
    """Return how often each row's rollouts were started."""
    return Counter(request.messages[1]["content"] for request in endpoint.chats if request.turn == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    wrong = 0
    model = Model()
    with tempfile.TemporaryDirectory() as folder, ScriptedEndpoint(model).run_in_thread() as endpoint:
        root = write_repo(Path(folder) / "whole", rows(options.rows))
        started = monotonic()
        code, output = finish(command(endpoint.url, options), root)
        whole = monotonic() - started
        if code:
            raise SystemExit(f"the uninterrupted run ended with {code}")
        expected = outcome(output)
        print(f"{options.rows * 2} rollouts, batch size {options.batch_size}; an uninterrupted run takes {whole:.1f} s")
        for number in range(options.times):
            endpoint.requests.clear()
            root = write_repo(Path(folder) / str(number), rows(options.rows))
            requests = rng.randint(1, options.rows * 4)
            model.count_down(requests)
            process = subprocess.Popen(
                command(endpoint.url, options), cwd=root, env=clean_environment(), stdout=subprocess.DEVNULL
            )
            model.reached.wait(PATIENCE)
            sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed = sum(begun(endpoint).values())
            code, output = finish(command(endpoint.url, options, "--resume"), root)
            note = ""
            if code == NOTHING_TO_RESUME:
                note = ", nothing to resume: run anew" if not killed else ", was finished already"
                code, output = finish(command(endpoint.url, options), root)
            again = sum(begun(endpoint).values()) - options.rows * 2
            if "finished" in note:
                again -= options.rows * 2
            right = code == 0 and outcome(output) == expected and 0 <= again <= options.batch_size
            wrong += not right
            print(
                f"  killed after request {requests:3} with {killed:3} begun: {again} begun twice, "
                f"results {'equal' if code == 0 and outcome(output) == expected else 'DIFFER'}{note}",
                flush=True,
            )
    print(f"{options.times - wrong} of {options.times} as they should be")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
