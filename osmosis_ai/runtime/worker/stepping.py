"""The worker's side of stepping through a rollout, which pauses at each step until the user continues it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

import msgspec

from osmosis_ai.records import Completion, Message, ToolCall, Turn
from osmosis_ai.runtime.protocol import CallDone, Called, Event, Paused, Resume, Reworded
from osmosis_ai.runtime.worker.deadlines import Deadlines

__all__ = ["Stepper"]


class Stepper:
    """The pauses of one rollout. They suspend its deadlines.

    `call` calls a tool by name and arguments (JSON text) in the rollout's session. `paused_seconds` is the total length
    of the pauses.
    """

    def __init__(
        self,
        job: str,
        emit: Callable[[Event], None],
        deadlines: Deadlines,
        call: Callable[[str, str], Awaitable[tuple[ToolCall, str]]],
    ) -> None:
        self.paused_seconds = 0.0
        self._job = job
        self._emit = emit
        self._deadlines = deadlines
        self._call = call
        self._orders: asyncio.Queue[Resume] = asyncio.Queue()
        self._index = 0
        self._conversation: list[Message] = []
        self._reworded = False
        self._calls: dict[str, ToolCall] = {}

    def resume(self, order: Resume) -> None:
        """Queue an order for the current pause."""
        self._orders.put_nowait(order)

    def called(self, call: ToolCall) -> None:
        """Note that a tool call of the current turn has ended."""
        self._calls[call.id] = call

    async def before_request(self, index: int, messages: list[Message]) -> None:
        """Pause before a turn's request. The user's edits change `messages` in place, so they last for later turns."""
        self._index = index
        replaced = await self._pause(Paused(self._job, "request", index, list(messages)))
        self._reworded = replaced is not None
        if replaced is not None:
            messages[:] = replaced
            self._emit(Reworded(self._job, replaced))
        self._conversation = list(messages)

    async def after_reply(self, turn: Turn, completion: Completion) -> tuple[Turn, Completion]:
        """Pause after a reply; return the turn and the reply to continue with."""
        self._calls.clear()
        conversation = [*self._conversation, completion.message]
        replaced = await self._pause(Paused(self._job, "reply", self._index, conversation, turn))
        if replaced is not None:
            # Log probabilities and token ids describe only the model's own text.
            completion = msgspec.structs.replace(completion, message=replaced[0], logprobs=None, token_ids=None)
            turn = msgspec.structs.replace(turn, logprobs=None, token_ids=None)
        if replaced is not None or self._reworded:
            turn = msgspec.structs.replace(turn, edited=True)
        self._conversation.append(completion.message)
        return turn, completion

    async def after_results(self, results: list[Message]) -> list[Message]:
        """Pause after a turn's tool calls; return the results to continue with."""
        calls = [self._calls[result["tool_call_id"]] for result in results]
        replaced = await self._pause(
            Paused(self._job, "result", self._index, [*self._conversation, *results], calls=calls)
        )
        if replaced is None:
            return results
        for call, before, after in zip(calls, results, replaced, strict=True):
            if after != before:
                # Reported a second time; the run replaces the first record.
                self._emit(CallDone(self._job, msgspec.structs.replace(call, edited=True), after))
        return replaced

    async def _pause(self, paused: Paused) -> list[Message] | None:
        started = monotonic()
        with self._deadlines.suspended(self._job):
            self._emit(paused)
            try:
                while (order := await self._orders.get()).action == "call":
                    call, text = await self._call(order.tool, order.arguments)
                    self._emit(Called(self._job, text, call.error, call.duration_ms))
            finally:
                self.paused_seconds += monotonic() - started
        return order.replaced
