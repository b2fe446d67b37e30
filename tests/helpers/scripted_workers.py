"""A worker that plays a script behind a channel in memory, for tests of the code that runs workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio

from osmosis_ai.records import Turn, Usage
from osmosis_ai.runtime import protocol


class ScriptedWorker:
    """A worker and the channel to it: a Channel for the group, and what the life of a worker needs.

    Args:
        life: What it does; it gives how it ends.
    """

    def __init__(self, life: Life) -> None:
        self.ending = "it ended"
        self.output: list[str] = []
        self.jobs: list[str] = []
        self.open_jobs: set[str] = set()
        self._life = life
        self._orders: asyncio.Queue[protocol.Order] = asyncio.Queue()
        self._take: Callable[[protocol.Event], None]
        self._scope = anyio.CancelScope()

    async def read(self, take: Callable[[protocol.Event], None]) -> None:
        self._take = take
        with self._scope:
            self.ending = await self._life(self) or self.ending

    def send(self, order: protocol.Order) -> None:
        self._orders.put_nowait(order)

    def kill(self) -> None:
        self._scope.cancel()

    def memory(self) -> int:
        return 0

    def stopped(self) -> bool:
        return False

    def last_words(self) -> list[str]:
        return self.output

    async def next(self) -> protocol.Order:
        order = await self._orders.get()
        if isinstance(order, protocol.RolloutJob):
            self.jobs.append(order.id)
            self.open_jobs.add(order.id)
        return order

    def emit(self, event: protocol.Event) -> None:
        self._take(event)

    def call_tool(self, job: str) -> None:
        """Report that the job is now inside user code."""
        call = {"id": "c", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
        turn = Turn(0, "tool_calls", Usage(), 1.0)
        self.emit(protocol.TurnDone(job, turn, {"role": "assistant", "content": None, "tool_calls": [call]}))

    def done(self, job: str) -> None:
        self.open_jobs.discard(job)
        self.emit(protocol.RolloutDone(job, "stop", 1.0))

    async def serve(self) -> None:
        """Be ready and finish every job at once, until told to stop."""
        self.emit(protocol.Ready())
        while not isinstance(order := await self.next(), protocol.Stop):
            if isinstance(order, protocol.RolloutJob):
                self.done(order.id)


Life: TypeAlias = Callable[[ScriptedWorker], Awaitable[str | None]]
