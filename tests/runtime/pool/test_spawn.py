"""Processes that start and end at the same time."""

from __future__ import annotations

import asyncio
import socket

import anyio

from osmosis_ai.runtime.pool.spawn import _start


def test_many_start_while_others_end() -> None:
    async def one() -> int | None:
        first, second = socket.socketpair()
        with first, second:
            # Writes its arguments and ends.
            spawned = await _start(print, first, second, b"")
        await spawned.exited.wait()
        return spawned.exit_code

    async def several() -> list[int | None]:
        return [await one() for _ in range(10)]

    async def test() -> None:
        with anyio.fail_after(120):
            codes = await asyncio.gather(*(several() for _ in range(8)))
        assert codes == [[0] * 10] * 8

    asyncio.run(test())
