"""Send a rollout's requests from a bare aiohttp loop, as the lower bound for all other measurements.

Each rollout makes two model calls and calls the tool as a plain function in between. Without MCP, scores, a store,
limits or retries, only the cost of the HTTP client and JSON remains.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import msgspec


def add(a: int, b: int) -> int:
    """The tool of the benchmark's repository."""
    return a + b


async def rollout(session: aiohttp.ClientSession, url: str, body: dict[str, Any], row: dict[str, Any]) -> None:
    """Call the model until a reply calls no tool.

    Args:
        session: The connection pool.
        url: The endpoint's chat completions.
        body: The request as the command sends it, without its messages.
        row: The dataset row.
    """
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": row["system_prompt"]},
        {"role": "user", "content": row["user_prompt"]},
    ]
    while True:
        data = msgspec.json.encode({**body, "messages": messages})
        async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
            reply = msgspec.json.decode(await response.read())
        message = reply["choices"][0]["message"]
        messages.append(message)
        calls = message.get("tool_calls")
        if not calls:
            return
        for call in calls:
            result = add(**msgspec.json.decode(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})


async def run(url: str, body: dict[str, Any], rows: list[dict[str, Any]], batch_size: int) -> float:
    """Run every row, `batch_size` at a time, and return the seconds it took."""
    waiting = iter(rows)

    async def slot() -> None:
        for row in waiting:
            await rollout(session, url, body, row)

    connector = aiohttp.TCPConnector(limit=batch_size)
    async with aiohttp.ClientSession(connector=connector) as session:
        started = perf_counter()
        await asyncio.gather(*(slot() for _ in range(batch_size)))
        return perf_counter() - started


def main() -> None:
    """Run `raw_loop.py BASE_URL BODY.json ROWS.jsonl LIMIT BATCH_SIZE`, and print the milliseconds it took."""
    base_url, body_file, rows_file, limit, batch_size = sys.argv[1:]
    body = msgspec.json.decode(Path(body_file).read_bytes())
    lines = Path(rows_file).read_bytes().splitlines()[: int(limit)]
    rows = [msgspec.json.decode(line) for line in lines]
    seconds = asyncio.run(run(f"{base_url}/chat/completions", body, rows, int(batch_size)))
    print(seconds * 1000)


if __name__ == "__main__":
    main()
