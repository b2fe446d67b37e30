"""The built-in agent loop, model ⇄ tools until it stops, and its context.

It is a `RolloutAgentLoop`, like the loops of repositories. For workers only, because it imports pydantic.
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

    `call_tool` runs one tool call, as the model wrote it, and returns the tool message; a failing tool doesn't make it
    raise. `counted` names the tokens that count towards the limit: `total_tokens`, or `completion_tokens` as in the
    rollout protocol.
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
        # Ignores `allow_rewrites`: the loop below only appends, so the check would never fail.
        super().__init__(request, tools, llm, debug_dir=debug_dir, allow_rewrites=True)
        self.call_tool = call_tool
        self.max_tokens_total = max_tokens_total
        self.counted = counted

    async def call_tools(self, calls: list[JsonObject]) -> list[Message]:
        """Run one turn's tool calls concurrently, and return their messages in call order."""
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
    """Make the request that a trainer would send for a dataset row, with sampling parameters and the row's metadata."""
    # Not validated: a row may hold more than the protocol allows.
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
    """Convert a model's reply to the form that loops receive."""
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
        # First of all, because the user's edits change the loop's own list in place.
        await self._stepper.before_request(self._requests, messages)
        self._requests += 1
        return await super().chat(messages, **params)


class SteppedMcpContext(SteppedContext, McpContext):
    """An `McpContext` that pauses before each request and after each turn's tool calls."""

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
        """Call the model, run its tool calls and append the results, until a reply has no tool calls.

        The finish reason is the model's own `stop` or `length`, or else `max_turns` or `max_tokens_total`.
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
