"""Run many concurrent rollouts behind the rollout server; check that none is lost or doubled and memory is freed.

    python benchmarks/serve.py                     the loop in the server's process (serve_agent_loop)
    python benchmarks/serve.py --server command    the loop in workers (osmosis serve)

All rollouts are requested at once, and a trainer double in a separate process delays its answer to each model call, so
that all rollouts run concurrently. Each makes two model calls and one tool call. A third process polls /health all the
time. There are two rounds: one without faults, and one in which a share of the trainer's answers, to model calls and to
results, fails with 503 or a dropped connection.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import psutil
from measuring import OSMOSIS, clean_environment

from osmosis_ai.rollout.testing import Reply, Request, TrainerDouble, by_turn, raw_json, text, tool_call, with_faults

HEALTH_TARGET_MS = 50.0
PATIENCE = 300.0
POLL_SECONDS = 0.01

SERVER = """\
import sys

from osmosis_ai.rollout import (
    RolloutAgentLoop,
    create_tool_result,
    execute_tool_calls,
    get_tool_call_info,
    serialize_tool_result,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


async def add(call):
    call_id, _, arguments = get_tool_call_info(call)
    return create_tool_result(call_id, serialize_tool_result(arguments["a"] + arguments["b"]))


class Adding(RolloutAgentLoop):
    name = "adding"

    def get_tools(self, request):
        return [ADD]

    async def run(self, ctx):
        messages = list(ctx.request.messages)
        for _ in range(ctx.request.max_turns):
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(result.message)
            if not result.has_tool_calls:
                break
            messages.extend(await execute_tool_calls(result.tool_calls, add))
            ctx.record_tool_call()
        return ctx.complete(messages)


agent_loop = Adding()

if __name__ == "__main__":
    from osmosis_ai.rollout import serve_agent_loop

    serve_agent_loop(agent_loop, port=int(sys.argv[1]), local_debug=True, log_level="warning")
"""


class Round(NamedTuple):
    """The results of one round. Latencies are in milliseconds, memory in bytes."""

    accepted: Counter[str]
    statuses: Counter[str]
    requests: int
    deliveries: int
    wall: float
    health: list[float]
    peak: int


def trainer_process(pipe: Connection, latency: float) -> None:
    """Run the trainer: play the script until told to stop; messages set the fault rate and request counts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    script = by_turn(tool_call("add", a=1, b=2).after(latency), text("3").after(latency))
    current: list[Any] = [script, lambda request: raw_json({})]

    def play(request: Request) -> Reply:
        return current[0](request)

    def acknowledge(request: Request) -> Reply:
        return current[1](request)

    trainer = TrainerDouble(play, completed=acknowledge)
    with trainer.run_in_thread():
        pipe.send(trainer.server_url)
        while (order := pipe.recv()) is not None:
            if order == "figures":
                done = list(trainer.completions)
                accepted = Counter(result.rollout_id for result in done)
                statuses = Counter(result.status.value for result in done)
                pipe.send((accepted, statuses, len(trainer.requests), len(trainer.deliveries)))
            elif order == "count":
                pipe.send(len(trainer.completions))
            else:
                trainer.requests.clear()
                trainer.deliveries.clear()
                trainer.completions.clear()
                current[0] = with_faults(script, order, seed=1)
                current[1] = with_faults(lambda request: raw_json({}), order, seed=2)
                pipe.send(None)


def health_process(pipe: Connection, url: str) -> None:
    """Poll /health over one connection, from `begin` to `end`, and report the latencies in milliseconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while pipe.recv() is not None:
        # A new one for each round: the server closes those that are idle.
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        latencies = []
        pipe.send(None)
        while not pipe.poll():
            started = perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            latencies.append((perf_counter() - started) * 1000)
            sleep(POLL_SECONDS)
        pipe.recv()
        connection.close()
        pipe.send(latencies)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def memory(process: psutil.Process) -> int:
    """Return the memory that the server's process tree would free if it ended, in bytes."""
    total = 0
    for found in (process, *process.children(recursive=True)):
        try:
            total += found.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return total


def cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of the server's process tree."""
    total = 0.0
    for found in (process, *process.children(recursive=True)):
        try:
            times = found.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def figures(url: str) -> dict[str, Any]:
    """Return the counts in the server's health."""
    import json

    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.request("GET", "/health")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return found


def wait_until_served(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = monotonic() + PATIENCE
    while True:
        try:
            figures(url)
        except OSError:
            if server.poll() is not None or monotonic() > deadline:
                raise SystemExit("the server did not start") from None
            sleep(0.1)
        else:
            return


async def ask_for(url: str, trainer_url: str, ids: list[str]) -> None:
    """Request all rollouts at once."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=100)) as session:

        async def one(rollout_id: str) -> None:
            messages = [{"role": "user", "content": "What is 1 + 2?"}]
            body = {"rollout_id": rollout_id, "server_url": trainer_url, "messages": messages}
            async with session.post(f"{url}/v1/rollout/init", json=body) as response:
                if response.status != 202:
                    raise SystemExit(f"the server answered {response.status}: {await response.text()}")

        await asyncio.gather(*(one(rollout_id) for rollout_id in ids))


def one_round(
    url: str, trainer_url: str, trainer: Connection, health: Connection, server: psutil.Process, count: int, rate: float
) -> Round:
    trainer.send(rate)
    trainer.recv()
    health.send("begin")
    health.recv()
    ids = [uuid.uuid4().hex for _ in range(count)]
    peak = memory(server)
    started = perf_counter()
    asyncio.run(ask_for(url, trainer_url, ids))
    deadline = monotonic() + PATIENCE
    while monotonic() < deadline:
        peak = max(peak, memory(server))
        trainer.send("count")
        if trainer.recv() >= count:
            break
        sleep(0.1)
    wall = perf_counter() - started
    # Whatever came twice has come by now: the server has nothing left to send.
    while (found := figures(url))["active_rollouts"] or found["queued_rollouts"]:
        sleep(0.05)
    health.send("end")
    latencies = health.recv()
    trainer.send("figures")
    accepted, statuses, requests, deliveries = trainer.recv()
    missing = set(ids) - set(accepted)
    if missing:
        print(f"  LOST: {len(missing)}")
    return Round(accepted, statuses, requests, deliveries, wall, latencies, peak)


def show(title: str, count: int, found: Round, seconds: float) -> bool:
    """Print a round's results; return True if they are as expected."""
    doubled = sum(times > 1 for times in found.accepted.values())
    lost = count - len(found.accepted)
    cuts = statistics.quantiles(found.health, n=100, method="inclusive")
    print(f"{title}")
    print(f"  results    {len(found.accepted)} accepted, {lost} lost, {doubled} doubled; {dict(found.statuses)}")
    print(f"  requests   {found.requests} model calls, {found.deliveries} deliveries in {found.wall:.1f} s")
    print(f"  server CPU {seconds * 1000 / count:.2f} ms per rollout")
    print(
        f"  /health    median {cuts[49]:.1f} ms, 99th percentile {cuts[98]:.1f} ms, worst {max(found.health):.1f} ms "
        f"of {len(found.health)} (target {HEALTH_TARGET_MS:g} ms at the 99th)"
    )
    return lost == 0 and doubled == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=["app", "command"], default="app")
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--latency", type=float, default=1.0, help="seconds per model call (default: 1)")
    parser.add_argument("--fault-rate", type=float, default=0.05)
    parser.add_argument("--ttl", type=float, default=5.0, help="seconds a finished rollout is remembered (default: 5)")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    trainer, theirs = context.Pipe()
    trainer_runs = context.Process(target=trainer_process, args=(theirs, options.latency), daemon=True)
    trainer_runs.start()
    trainer_url = trainer.recv()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "server.py").write_text(SERVER, encoding="utf-8")
        concurrent = str(options.rollouts)
        command = [sys.executable, "server.py", str(port)]
        if options.server == "command":
            command = [OSMOSIS, "serve", "-m", "server:agent_loop", "--local", "-p", str(port)]
            command += ["--max-concurrent", concurrent, "--log-level", "warning"]
        env = clean_environment(
            OSMOSIS_ROLLOUT_SERVER_RECORD_TTL_SECONDS=str(options.ttl),
            OSMOSIS_ROLLOUT_SERVER_MAX_CONCURRENT_ROLLOUTS=concurrent,
        )
        server = subprocess.Popen(command, cwd=folder, env=env)
        try:
            wait_until_served(url, server)
            right = measure(url, trainer_url, trainer, psutil.Process(server.pid), options)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
            trainer.send(None)
            trainer_runs.join(10)
    if not right:
        raise SystemExit(1)


def measure(
    url: str, trainer_url: str, trainer: Connection, server: psutil.Process, options: argparse.Namespace
) -> bool:
    """Run both rounds, and measure the memory between them."""
    context = multiprocessing.get_context("spawn")
    health, theirs = context.Pipe()
    health_runs = context.Process(target=health_process, args=(theirs, url), daemon=True)
    health_runs.start()
    fresh = memory(server)
    right = True

    def run(title: str | None, rate: float) -> Round:
        before = cpu(server)
        found = one_round(url, trainer_url, trainer, health, server, options.rollouts, rate)
        seconds = cpu(server) - before
        sleep(options.ttl + 1)
        nonlocal right
        if title is not None:
            right = show(title, options.rollouts, found, seconds) and right
        return found

    print(f"{options.rollouts} rollouts at once of two model calls, {options.latency:g} s each; {os.cpu_count()} CPUs")
    # The first round fills what stays: imported modules, pools, the allocator's arenas.
    run(None, 0.0)
    start = memory(server)
    without = run("without faults", 0.0)
    between = memory(server)
    faulty = run(f"with {options.fault_rate:.0%} of the trainer's answers failing", options.fault_rate)
    end = memory(server)
    mega = 1024 * 1024
    print(
        f"memory       {fresh / mega:.0f} MB before any rollout, {start / mega:.1f} MB after a round and its TTL, "
        f"{without.peak / mega:.1f} MB and {faulty.peak / mega:.1f} MB at most, "
        f"{between / mega:.1f} MB and {end / mega:.1f} MB after the TTL of the next two"
    )
    health.send(None)
    health_runs.join(10)
    return right


if __name__ == "__main__":
    main()
