"""Measure workflows on a released SDK: throughput against the vendor's own `osmosis eval run`, faults, and start-up.

    python benchmarks/workflows.py throughput     rollouts per second, and latency that the bridge adds to a model call;
                                                  with `--clients each`, rollouts don't share an HTTP client
    python benchmarks/workflows.py faults         rollouts that raise, block their server or kill it
    python benchmarks/workflows.py startup        from the command's start to the first model call

The rollout makes two model calls with httpx and compares the answer. Its environment is built once, from the package
index, for Python 3.12.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, perf_counter_ns
from typing import NamedTuple

import aiohttp
from measuring import OSMOSIS, Measured, adopt_orphans, clean_environment, run

from osmosis_ai.models.choice import choose_model
from osmosis_ai.models.host import HostOptions, create_model
from osmosis_ai.records import Completion, JsonObject, Row
from osmosis_ai.runtime.worker.workflows.bridge import Bridge, ChatCall
from osmosis_ai.runtime.worker.workflows.environments import prepare_environment
from osmosis_ai.runtime.worker.workflows.listener import Listener
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text

VERSION = "0.3.7"
DECLARATION = f"""
[project]
name = "raw"
version = "0.1.0"
requires-python = ">=3.12,<3.13"
dependencies = ["osmosis-ai[eval]=={VERSION}", "httpx"]
"""
ROLLOUT = """\
import os
import time
from contextlib import nullcontext

import httpx
import uvicorn

from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowConfig, Grader, LocalBackend, get_rollout_context
from osmosis_ai.rollout.server import create_rollout_server


CLIENT = httpx.AsyncClient(timeout=60)
ONE_CLIENT = True


class Workflow(AgentWorkflow):
    async def run(self, ctx):
        rollout = get_rollout_context()
        messages = list(ctx.prompt)
        task = messages[-1]["content"].partition(" ")[0]
        if task == "raise":
            raise RuntimeError("the workflow broke")
        if task == "block":
            time.sleep(3600)
        if task == "kill":
            os._exit(3)
        headers = {"Authorization": f"Bearer {rollout.api_key}"}
        async with nullcontext(CLIENT) if ONE_CLIENT else httpx.AsyncClient(timeout=60) as client:
            for turn in range(2):
                if turn:
                    messages.append({"role": "user", "content": "Are you sure?"})
                body = {"model": "openai/osmosis-rollout", "messages": messages, "stream": False}
                url = f"{rollout.chat_completions_url}/chat/completions"
                answer = await client.post(url, json=body, headers=headers)
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
        return messages


class Exact(Grader):
    async def grade(self, ctx):
        ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label))


if __name__ == "__main__":
    backend = LocalBackend(workflow=Workflow, workflow_config=AgentWorkflowConfig(name="raw"), grader=Exact)
    port = int(os.environ["_OSMOSIS_ROLLOUT_PORT"])
    uvicorn.run(create_rollout_server(backend=backend), host="127.0.0.1", port=port, log_level="warning")
"""
CONFIG = """
[experiment]
rollout = "raw"
entrypoint = "main.py"
model_path = "openai/scripted"
dataset = "rows"

[secrets]
required = []
"""
SHARE = 20
FAULTS = {3: "raise", 8: "block", 14: "kill"}
ORIGINS = {"raise": "agent", "block": "timeout", "kill": "worker"}


class Side(NamedTuple):
    """One run of a command. Times are in seconds; `calls` is the time from the first model call to the last."""

    calls: float
    wall: float
    cpu: float


def write_workspace(root: Path, tasks: Iterable[str], *, one_client: bool = True) -> Path:
    """Write a workspace that both sides accept; return the interpreter of the rollout's environment."""
    folder = root / "rollouts" / "raw"
    folder.mkdir(parents=True)
    rollout = ROLLOUT.replace("ONE_CLIENT = True", f"ONE_CLIENT = {one_client}")
    (folder / "main.py").write_text(rollout, encoding="utf-8")
    (folder / "pyproject.toml").write_text(DECLARATION, encoding="utf-8")
    for name in ("configs/eval", "configs/training", "data"):
        (root / name).mkdir(parents=True)
    (root / "configs" / "eval" / "raw.toml").write_text(CONFIG, encoding="utf-8")
    rows = [
        {"system_prompt": "Compute.", "user_prompt": f"{task} {place}", "ground_truth": "42"}
        for place, task in enumerate(tasks)
    ]
    (root / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return prepare_environment(folder)


def ours(root: Path, url: str, *options: str) -> tuple[JsonObject, Measured]:
    """Run our command; return its results and its measurements."""
    command = [OSMOSIS, "eval", "--rollout", "rollouts/raw", "-d", "data/rows.jsonl", "--json", "--quiet"]
    # 1 says that not every rollout passed.
    measured = run([*command, "--model", "scripted", "--base-url", url, *options], cwd=root, codes=(0, 1))
    return json.loads(measured.stdout), measured


def vendors(root: Path, python: Path, url: str, name: str, *options: str) -> tuple[JsonObject, Measured]:
    """Run the vendor's command; return its metrics and its measurements."""
    given = {"OPENAI_API_BASE": url, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "UV_PYTHON": str(python)}
    # Its own start of a server runs `uv`, which its environment has.
    given["PATH"] = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    command = [str(python.with_name("osmosis")), "eval", "run", "configs/eval/raw.toml", "-y", "--name", name]
    command += ["--dataset-file", "data/rows.jsonl", *options]
    measured = run(command, cwd=root, LITELLM_LOCAL_MODEL_COST_MAP="True", **given)
    return json.loads((root / ".osmosis" / "evals" / name / "metrics.json").read_bytes()), measured


def throughput(root: Path, options: argparse.Namespace) -> None:
    """Print the rollouts per second of both commands, and the latency that the bridge adds to a model call."""
    # One each, because the vendor's command writes an environment and a lock file into its own.
    tasks, one_client = ["row"] * options.rollouts, options.clients == "one"
    write_workspace(root / "ours", tasks, one_client=one_client)
    python = write_workspace(root / "theirs", tasks, one_client=one_client)
    in_flight = str(options.in_flight)

    def run_ours(url: str, *given: str) -> tuple[int, Measured]:
        results, measured = ours(root / "ours", url, "--batch-size", in_flight, *given)
        return results["summary"]["passed"], measured

    def run_theirs(url: str, *given: str) -> tuple[int, Measured]:
        name = f"run-{perf_counter_ns()}"
        metrics, measured = vendors(root / "theirs", python, url, name, "--max-in-flight", in_flight, *given)
        return metrics["summary"]["passed"], measured

    commands = {"osmosis": run_ours, f"osmosis-ai {VERSION}": run_theirs}
    sides: dict[str, list[Side]] = {name: [] for name in commands}
    for place in range(-1, options.runs):
        # The order alternates, because other work on the machine changes.
        for name in sorted(commands, reverse=place % 2 == 1):
            with ScriptedEndpoint(by_turn(text("hm"), text("42"))).run_in_thread() as endpoint:
                passed, measured = commands[name](endpoint.url, *(["--rows", "0"] if place < 0 else ()))
                # Neither command's check of the model has a system prompt.
                times = [chat.time for chat in endpoint.chats if chat.messages[0]["role"] == "system"]
            # The first time makes the environments.
            if place >= 0:
                if passed < options.rollouts:
                    print(f"  (in a run of {name}, {options.rollouts - passed} rollouts failed)")
                sides[name].append(Side(times[-1] - times[0], measured.wall, measured.cpu))
    print(
        f"{options.rollouts} rollouts, {in_flight} in flight, {options.clients} client, median of {options.runs} runs"
    )
    count = options.rollouts
    for name, runs in sides.items():
        calls, wall, cpu = (median(values) for values in zip(*runs, strict=True))
        each = cpu / count * 1000
        print(f"  {name:<18} {count / calls:>6.1f} rollouts/s, {each:>5.1f} ms of CPU each; {wall:.0f} s in all")
    mine, other = (median(side.calls for side in runs) for runs in sides.values())
    print(f"  {other / mine:.1f} times; target: at least 3")
    with ScriptedEndpoint(by_turn(text("hm"), text("42")), record=False).run_in_thread() as endpoint:
        added = asyncio.run(added_latency(endpoint.url, options.calls))
    print(f"the bridge adds {added:.2f} ms to a model call, median of {options.calls}; target: at most 5")


async def added_latency(url: str, calls: int) -> float:
    """Return the milliseconds that the bridge adds to a model call, with one call at a time."""
    spec = choose_model(model="scripted", base_url=url, api_key=None, params={}, request_timeout=60.0, environ={})
    host = create_model(spec, HostOptions())
    model = host.for_rollout(Row(0, "row", "Compute.", "6 × 7?", "42"), 0)

    async def complete(call: ChatCall, listen: object) -> Completion:
        return await model.complete(call.messages, call.tools, call.params)

    listener = Listener()
    await listener.start()
    taken: dict[str, list[float]] = {}
    async with aiohttp.ClientSession() as session:
        with listener.host("r1", Bridge(complete).answer) as hosted:
            ways = {"direct": (url, ""), "bridge": (hosted.url, hosted.key)}
            body = {"model": "scripted", "messages": [{"role": "user", "content": "6 × 7?"}], "stream": False}
            for _ in range(calls):
                for name, (base, key) in ways.items():
                    started = perf_counter()
                    headers = {"Authorization": f"Bearer {key}"}
                    async with session.post(f"{base}/chat/completions", json=body, headers=headers) as answer:
                        await answer.read()
                        assert answer.status == 200
                    taken.setdefault(name, []).append((perf_counter() - started) * 1000)
    await listener.aclose()
    await host.aclose()
    return median(taken["bridge"]) - median(taken["direct"])


def faults(root: Path, options: argparse.Namespace) -> None:
    """Check that every rollout without a fault of its own completed; print the result and the time."""
    tasks = [FAULTS.get(place % SHARE, "row") for place in range(options.rollouts)]
    write_workspace(root, tasks)
    given = ["--batch-size", str(options.in_flight), "--workers", "2", "--timeout", "2"]
    with ScriptedEndpoint(by_turn(text("hm"), text("42")), record=False).run_in_thread() as endpoint:
        results, measured = ours(root, endpoint.url, *given)
    rows = results["rows"]
    assert isinstance(rows, list)
    wrong = []
    for row, task in zip(rows, tasks, strict=True):
        (attempt,) = row["runs"]
        origin = attempt["error"].partition(":")[0] if attempt["error"] else None
        if origin != ORIGINS.get(task) or (origin is None) != (attempt["scores"] == {"raw": 1.0}):
            wrong.append(f"row {row['row_index']} ({task}): {attempt['error']}, {attempt['scores']}")
    faulty = len(tasks) - tasks.count("row")
    print(f"{len(tasks)} rollouts, {faulty} of them faulty: {measured.wall:.0f} s, {measured.cpu:.0f} s of CPU")
    print("\n".join(f"  {line}" for line in wrong) or "  every other one completed, none twice, none missing")


def startup(root: Path, options: argparse.Namespace) -> None:
    """Print the seconds until the first model call, and the seconds for importing the rollout's packages."""
    python = write_workspace(root, ["row"])
    folder = root / "rollouts" / "raw"
    env = clean_environment(LITELLM_LOCAL_MODEL_COST_MAP="True")
    imported, called = [], []
    for _ in range(options.runs + 1):
        imported.append(timed(lambda: subprocess.run([python, "-c", "import main"], cwd=folder, env=env, check=True)))
        with ScriptedEndpoint(by_turn(text("hm"), text("42"))).run_in_thread() as endpoint:
            started = monotonic()
            ours(root, endpoint.url)
            called.append(next(each.time for each in endpoint.chats if not each.is_probe) - started)
    # The first start fills the disk's cache.
    beyond = median(each - base for each, base in zip(called[1:], imported[1:], strict=True))
    print(
        f"to the first model call: {median(called[1:]):.2f} s, of which the imports take {median(imported[1:]):.2f} s"
    )
    print(f"beyond them: {beyond:.2f} s; target: at most 1.5 s")


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    started = perf_counter()
    action()
    return perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["throughput", "faults", "startup"])
    parser.add_argument("--rollouts", type=int, help="default: 500, with faults 1000")
    parser.add_argument("--in-flight", type=int, help="default: 64, with faults 16")
    parser.add_argument("--clients", choices=["one", "each"], default="one", help="each: one for each rollout")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--calls", type=int, default=500, help="model calls of each way (default: 500)")
    options = parser.parse_args()
    is_faults = options.figure == "faults"
    options.rollouts = options.rollouts or (1000 if is_faults else 500)
    options.in_flight = options.in_flight or (16 if is_faults else 64)
    adopt_orphans()
    folder = Path(tempfile.mkdtemp())
    try:
        {"throughput": throughput, "faults": faults, "startup": startup}[options.figure](folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
