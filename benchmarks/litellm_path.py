"""Measure CPU per rollout through LiteLLM, against a bare loop of `litellm.acompletion` that makes the same calls.

    python benchmarks/litellm_path.py

The provider is the scripted endpoint, as `openai/scripted` with its address in OPENAI_BASE_URL. The bare loop calls the
tool as a plain function: no MCP, scores, store or limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from measuring import OSMOSIS, Measured, adopt_orphans, run
from repository import sums, write_repo
from rollouts import scripted_endpoint, write_body

MODEL = "openai/scripted"
TARGET = 1.15


async def rollout(acompletion: Any, tools: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Call the model until a reply calls no tool."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": row["system_prompt"]},
        {"role": "user", "content": row["user_prompt"]},
    ]
    while True:
        reply = await acompletion(model=MODEL, messages=messages, tools=tools, num_retries=0, max_retries=0)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = arguments["a"] + arguments["b"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def bare(body: dict[str, Any], rows: list[dict[str, Any]], batch_size: int) -> float:
    """Run every row, `batch_size` at a time, and return the seconds it took."""
    import litellm

    waiting = iter(rows)

    async def slot() -> None:
        for row in waiting:
            await rollout(litellm.acompletion, body["tools"], row)

    started = perf_counter()
    await asyncio.gather(*(slot() for _ in range(batch_size)))
    return perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=500, help="rollouts per run, at least 2 (default: 500)")
    parser.add_argument("--batch-size", type=int, default=32, help="concurrent rollouts (default: 32)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side, in turns (default: 3)")
    parser.add_argument("--bare", nargs=2, metavar=("BODY", "DATASET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        body, dataset = (Path(file).read_text(encoding="utf-8") for file in options.bare)
        rows = [json.loads(line) for line in dataset.splitlines()[: options.rollouts]]
        print(asyncio.run(bare(json.loads(body), rows, options.batch_size)))
        return
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        repo = write_repo(Path(folder) / "repo", sums(options.rollouts))
        body_file = write_body(repo)
        with scripted_endpoint(Path(folder), 0.0) as endpoint:
            provider = {
                "OPENAI_BASE_URL": endpoint.url,
                "OPENAI_API_KEY": "none",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            }
            os.environ.pop("OPENAI_API_BASE", None)

            def ours(rollouts: int) -> Measured:
                size = min(options.batch_size, rollouts)
                command = [OSMOSIS, "test", "--model", MODEL, "--limit", str(rollouts), "--batch-size", str(size)]
                # One process on each side, because what LiteLLM needs to be imported is far more than a rollout.
                measured = run([*command, "--json", "--quiet"], cwd=repo, spare=[endpoint.process.pid], **provider)
                if json.loads(measured.stdout)["summary"]["passed"] != rollouts:
                    raise SystemExit("not every rollout was right")
                return measured

            def loop(rollouts: int) -> Measured:
                command = [
                    sys.executable,
                    __file__,
                    "--rollouts",
                    str(rollouts),
                    "--batch-size",
                    str(options.batch_size),
                ]
                command += ["--bare", str(body_file), str(repo / "test_data.jsonl")]
                return run(command, cwd=repo, spare=[endpoint.process.pid], **provider)

            figures: dict[str, list[float]] = {"osmosis": [], "bare loop": []}
            for _ in range(options.runs):
                for name, side in (("bare loop", loop), ("osmosis", ours)):
                    # As many workers on both, so that what a worker needs once is in both.
                    few, many = side(2), side(options.rollouts)
                    figures[name].append((many.cpu - few.cpu) / (options.rollouts - 2) * 1000)
    print(f"{options.rollouts} rollouts of two model calls and one tool call, batch size {options.batch_size}")
    for name, each in figures.items():
        print(f"  {name:<10} {median(each):>6.2f} ms of CPU per rollout beyond start")
    ratio = median(a / b for a, b in zip(figures["osmosis"], figures["bare loop"], strict=True))
    print(f"  osmosis / bare loop {ratio:.2f} (target: at most {TARGET})")


if __name__ == "__main__":
    main()
