"""Measure the overhead per turn of calling a policy with tokens: rendering, keeping and checking them.

The engine holds conversations with an endpoint in another process; then the bare client sends the same bodies. The two
alternate. The tokenizer has one token per byte, so prompts have more tokens than with a real model.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

from osmosis_ai.models.host import HostOptions, create_model
from osmosis_ai.models.policy.engine import PolicyClient
from osmosis_ai.records import Message, ModelSpec, Row
from token_models import END, TokenEndpoint, write_model

CALL = f'<tool_call>{{"name": "look_up", "arguments": {{"item": "bread"}}}}</tool_call>{END}'
RESULT = "The price of bread is 3.20 euros, and there are 14 in stock. " * 3
PARAMETERS = {"type": "object", "properties": {"item": {"type": "string", "description": "What to look up."}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Look an item up. " * 8, "parameters": PARAMETERS}}
    for name in ("look_up", "order", "cancel", "list_all", "describe")
]


def serve(ready: Connection) -> None:
    """Serve an endpoint in this process until the process is killed."""
    with TokenEndpoint(lambda _: CALL).run() as url:
        ready.send(url)
        ready.recv()


async def converse(spec: ModelSpec, turns: int) -> tuple[list[float], list[dict[str, Any]], float]:
    """Hold one conversation; return the seconds of each turn, the bodies that were sent, and CPU seconds."""
    host = create_model(spec, HostOptions())
    model = host.for_rollout(Row("row", 0, "", "go"), 0)
    messages: list[Message] = [
        {"role": "system", "content": "Answer with the tools. " * 40},
        {"role": "user", "content": "What is in stock?"},
    ]
    seconds, bodies = [], []
    await model.complete([{"role": "user", "content": "warm"}], [], {})
    cpu = time.process_time()
    for _ in range(turns):
        started = time.perf_counter()
        reply = await model.complete(messages, TOOLS, {})
        seconds.append(time.perf_counter() - started)
        assert reply.token_ids is not None
        bodies.append({"prompt": reply.token_ids.prompt_token_ids, "max_tokens": 1024})
        calls = reply.message["tool_calls"]
        messages += [reply.message, {"role": "tool", "tool_call_id": calls[0]["id"], "content": RESULT}]
    cpu = time.process_time() - cpu
    await host.aclose()
    return seconds, bodies, cpu


async def send(spec: ModelSpec, bodies: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Send the same requests; return the seconds of each, and CPU seconds."""
    client = PolicyClient(spec)
    stops = {"stop_token_ids": [], "logprobs": 0, "return_token_ids": True, "model": spec.model}
    await client.ask({"prompt": [1], "max_tokens": 1, **stops})
    seconds = []
    cpu = time.process_time()
    for body in bodies:
        started = time.perf_counter()
        await client.ask({**body, **stops})
        seconds.append(time.perf_counter() - started)
    cpu = time.process_time() - cpu
    await client.aclose()
    return seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, metavar="N", help="turns per conversation")
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="conversations of each side")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    url = ours.recv()
    wall: list[float] = []
    cpu: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec("policy", "policy", "policy", url, tokenizer=str(write_model(Path(folder))))
        longest = 0
        for _ in range(options.runs):
            engine, bodies, engine_cpu = asyncio.run(converse(spec, options.turns))
            bare, bare_cpu = asyncio.run(send(spec, bodies))
            wall.append(statistics.fmean(engine) - statistics.fmean(bare))
            cpu.append((engine_cpu - bare_cpu) / options.turns)
            longest = max(longest, len(bodies[-1]["prompt"]))
    ours.send(None)
    process.join(10)
    print(f"{options.turns} turns, the last prompt of {longest:,} tokens; medians of {options.runs}")
    beyond, busy = statistics.median(wall) * 1000, statistics.median(cpu) * 1000
    print(f"per turn beyond the bare request: {beyond:.2f} ms, CPU {busy:.2f} ms")


if __name__ == "__main__":
    main()
