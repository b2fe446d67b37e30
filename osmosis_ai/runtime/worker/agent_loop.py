"""The built-in agent loop, model ⇄ tools until it stops, and the context it runs in.

It is a `RolloutAgentLoop` like those that repositories bring along. Imports pydantic: for workers only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import msgspec

from osmosis_ai.config import LimitsConfig
from osmosis_ai.records import Completion, FinishReason, JsonObject, JsonValue, Message, Tool, opening_messages
from osmosis_ai.rollout.core.base import ChatClient, CompletionsResult, RolloutAgentLoop, RolloutContext, RolloutResult
from osmosis_ai.rollout.core.schemas import OpenAIFunctionToolSchema, RolloutRequest
from osmosis_ai.runtime.protocol import RolloutJob
from osmosis_ai.runtime.worker.deadlines import elapsed_ms
from osmosis_ai.runtime.worker.stepping import Stepper

__all__ = ["McpAgentLoop", "McpContext", "SteppedContext", "SteppedMcpContext", "result_of", "row_request"]


class McpContext(RolloutContext):
    """A context that also runs the repository's tools.

    `call_tool` runs one tool call (as the model wrote it) and gives the tool message; it never raises for what the tool
    does. `counted` is which of a reply's tokens count: `total_tokens`, or `completion_tokens` as the rollout protocol
    has it.
    """

    def __init__(
        self,
        request: RolloutRequest,
        tools: Sequence[Tool],
        llm: ChatClient,
        *,
        call_tool: Callable[[JsonObject], Awaitable[Message]],
        max_tokens_total: int | None,
        counted: str = "total_tokens",
        debug_dir: Path | str | None = None,
        allow_rewrites: bool = True,
    ) -> None:
        # Whatever is asked for: the loop below only ever appends, so nobody has to see to it.
        super().__init__(request, tools, llm, debug_dir=debug_dir, allow_rewrites=True)
        self.call_tool = call_tool
        self.max_tokens_total = max_tokens_total
        self.counted = counted

    async def call_tools(self, calls: list[JsonObject]) -> list[Message]:
        """Run one turn's tool calls concurrently and give their messages in call order."""
        if len(calls) == 1:
            return [await self._measured(calls[0])]
        results: list[Message] = [{} for _ in calls]

        async def one(position: int) -> None:
            results[position] = await self._measured(calls[position])

        async with anyio.create_task_group() as group:
            for position in range(len(calls)):
                group.start_soon(one, position)
        return results

    async def _measured(self, call: JsonObject) -> Message:
        started = monotonic()
        message = await self.call_tool(call)
        self.record_tool_call(elapsed_ms(started))
        return message


def row_request(
    job: RolloutJob, limits: LimitsConfig, *, params: JsonObject | None = None, metadata: JsonObject | None = None
) -> RolloutRequest:
    """What a trainer would ask for a dataset's row, with the run's sampling parameters and what is known of the row."""
    # Not validated: what a row holds may be more than the protocol lets through.
    request = RolloutRequest.model_construct(
        rollout_id=job.id,
        server_url="http://localhost",
        messages=opening_messages(job.row),
        completion_params=params or {},
        max_turns=limits.max_turns,
        metadata=metadata or {},
    )
    if limits.max_tokens_total is not None:
        request.max_tokens_total = limits.max_tokens_total
    return request


def result_of(completion: Completion) -> CompletionsResult:
    """A model's reply as a loop gets it."""
    usage = completion.usage
    return CompletionsResult(
        completion.message,
        completion.token_ids and completion.token_ids.token_ids,
        completion.logprobs and msgspec.to_builtins(completion.logprobs),
        {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
        completion.finish_reason,
    )


class SteppedContext(RolloutContext):
    """A context that pauses before each request."""

    def __init__(self, stepper: Stepper, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stepper = stepper
        self._requests = 0

    async def chat(self, messages: list[Message], **params: JsonValue) -> CompletionsResult:
        # Before anything else: what a person changes, they change in the loop's own list.
        await self._stepper.before_request(self._requests, messages)
        self._requests += 1
        return await super().chat(messages, **params)


class SteppedMcpContext(SteppedContext, McpContext):
    """An `McpContext` that also pauses, before each request and after each turn's tool calls."""

    async def call_tools(self, calls: list[JsonObject]) -> list[Message]:
        return await self._stepper.after_results(await super().call_tools(calls))


class McpAgentLoop(RolloutAgentLoop):
    """The built-in loop over a repository's MCP tools."""

    name = "mcp"

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = tools

    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        return [OpenAIFunctionToolSchema.model_validate(tool) for tool in self._tools]

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        """Ask the model, run the tool calls of its reply, append the results, until a reply has none.

        It ends with `stop` or `length` as the model ended its last message, `max_turns`, or `max_tokens_total`.
        """
        assert isinstance(ctx, McpContext)
        messages = list(ctx.request.messages)
        return ctx.complete(messages, await self._converse(ctx, messages))

    async def _converse(self, ctx: McpContext, messages: list[Message]) -> FinishReason:
        tokens = 0
        for _ in range(ctx.request.max_turns):
            reply = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(reply.message)
            calls = reply.message.get("tool_calls")
            if not calls:
                return "length" if reply.finish_reason == "length" else "stop"
            tokens += reply.usage.get(ctx.counted) or 0
            if ctx.max_tokens_total is not None and tokens >= ctx.max_tokens_total:
                return "max_tokens_total"
            messages.extend(await ctx.call_tools(calls))
        return "max_turns"
