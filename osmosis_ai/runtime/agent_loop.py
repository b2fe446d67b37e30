"""One rollout: model ⇄ tools until it stops.

The loop knows only its context. The worker turns a job into a context, so that what a rollout does and where it runs
are told apart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import anyio

from osmosis_ai.records import Completion, FinishReason, Message, Tool

__all__ = ["AgentLoop", "McpAgentLoop", "RolloutContext"]


class RolloutContext:
    """What a loop may use.

    Args:
        messages: The conversation before the first model call.
        tools: The tools the model may call.
        max_turns: The most model calls.
        max_tokens_total: The most tokens over all turns, None for no bound.
        chat: Asks the model for the next message.
        call_tool: Runs one tool call (as the model wrote it) and gives the tool message; it never raises for what the
            tool does.
    """

    def __init__(
        self,
        *,
        messages: list[Message],
        tools: list[Tool],
        max_turns: int,
        max_tokens_total: int | None,
        chat: Callable[[list[Message]], Awaitable[Completion]],
        call_tool: Callable[[dict[str, Any]], Awaitable[Message]],
    ) -> None:
        self.messages = messages
        self.tools = tools
        self.max_turns = max_turns
        self.max_tokens_total = max_tokens_total
        self.chat = chat
        self.call_tool = call_tool

    async def call_tools(self, calls: list[dict[str, Any]]) -> list[Message]:
        """Run one turn's tool calls concurrently and give their messages in call order."""
        if len(calls) == 1:
            return [await self.call_tool(calls[0])]
        results: list[Message] = [{} for _ in calls]

        async def one(position: int) -> None:
            results[position] = await self.call_tool(calls[position])

        async with anyio.create_task_group() as group:
            for position in range(len(calls)):
                group.start_soon(one, position)
        return results


class AgentLoop(Protocol):
    """Runs one rollout in a context and says why it ended."""

    async def run(self, context: RolloutContext) -> FinishReason: ...


class McpAgentLoop:
    """The built-in loop over a repository's MCP tools."""

    async def run(self, context: RolloutContext) -> FinishReason:
        """Ask the model, run the tool calls of its reply, append the results, until a reply has none.

        Args:
            context: The rollout's context.

        Returns:
            `stop` or `length` as the model ended its last message, `max_turns`, or `max_tokens_total`.
        """
        messages = list(context.messages)
        tokens = 0
        for _ in range(context.max_turns):
            completion = await context.chat(messages)
            messages.append(completion.message)
            calls = completion.message.get("tool_calls")
            if not calls:
                return "length" if completion.finish_reason == "length" else "stop"
            tokens += completion.usage.total_tokens
            if context.max_tokens_total is not None and tokens >= context.max_tokens_total:
                return "max_tokens_total"
            messages.extend(await context.call_tools(calls))
        return "max_turns"
