"""Run an agent loop's code and interpret what it returns or raises.

A worker turns a `LoopOutcome` into a rollout's record; a server turns it into the response to the trainer.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio
import msgspec
from pydantic import BaseModel, ValidationError

from osmosis_ai.bounds import message_problem
from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.failures import FailureKind
from osmosis_ai.masking import mask
from osmosis_ai.records import Message, Tool
from osmosis_ai.rollout.client import encode_messages
from osmosis_ai.rollout.core.base import RolloutAgentLoop, RolloutContext, RolloutResult
from osmosis_ai.rollout.core.schemas import OpenAIFunctionToolSchema, RolloutMetrics, RolloutRequest
from osmosis_ai.tracebacks import describe, locate

__all__ = [
    "LoopOutcome",
    "describe_raised",
    "interpret",
    "outcome_of",
    "plain_messages",
    "raised",
    "say_raised",
    "tool_dicts",
    "tools_of",
]

CANCEL_GRACE = 5.0
"""Seconds that a cancelled loop has for its own cleanup."""


@dataclass(frozen=True)
class LoopOutcome:
    """The outcome of an agent loop's `run`.

    Attributes:
        kind: `completed`; `error`, reported by the loop itself; `wrong_type`, if the result can't be used; or
            `exception`.
        message: The reason for a failure, for users; None if it completed.
        messages: A private copy of the conversation it returned; None if there is no usable one.
        finish_reason: The finish reason that the loop gave.
        reward: The loop's own score, if it gave a usable one.
        reward_problem: The problem with an unusable reward: the kind of failure and a message.
        metrics: The loop's own metrics, if it gave any.
        raised: The exception.
    """

    kind: Literal["completed", "error", "wrong_type", "exception"]
    message: str | None = None
    messages: list[Message] | None = None
    finish_reason: str = "error"
    reward: float | None = None
    reward_problem: tuple[FailureKind, str] | None = None
    metrics: RolloutMetrics | None = None
    raised: BaseException | None = None


async def outcome_of(
    loop: RolloutAgentLoop,
    ctx: RolloutContext,
    *,
    timeout: float | None = None,  # noqa: ASYNC109  its end is a result, not an exception
    held: Callable[[], None],
    cancel_grace: float = CANCEL_GRACE,
) -> LoopOutcome | None:
    """Run a loop in its own task, and return the outcome; raises nothing but a cancellation from outside.

    The separate task shields the caller from a loop that swallows a cancellation or calls `sys.exit`.

    Args:
        loop: The agent loop.
        ctx: The rollout.
        timeout: Seconds, None for no limit. After a timeout the outcome is None.
        held: Called if the loop keeps running after it was cancelled.
        cancel_grace: Seconds that a cancelled loop has for its own cleanup.
    """
    task = asyncio.ensure_future(_outcome(loop, ctx))
    try:
        await asyncio.wait({task}, timeout=timeout)
    finally:
        is_late = not task.done()
        if is_late:
            task.cancel()
            # Shielded, because this may run while the rollout itself is being cancelled.
            with anyio.CancelScope(shield=True):
                await asyncio.wait({task}, timeout=cancel_grace)
            if not task.done():
                held()
    if is_late:
        return None
    return raised(OsmosisRolloutError("the loop cancelled its own task")) if task.cancelled() else task.result()


async def _outcome(loop: RolloutAgentLoop, ctx: RolloutContext) -> LoopOutcome:
    try:
        coroutine: object = loop.run(ctx)
        if not inspect.isawaitable(coroutine):
            return _unusable(f"run returned {_article(coroutine)} at once: write `async def run(self, ctx)`")
        return interpret(await coroutine)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  sys.exit() in a loop ends its rollout, not the process
        return raised(error)


def raised(error: BaseException) -> LoopOutcome:
    """Return the outcome of a loop whose `run` raised."""
    return LoopOutcome("exception", describe_raised(error), raised=error)


def interpret(returned: object) -> LoopOutcome:
    """Check what a loop's `run` returned and return its outcome."""
    if not isinstance(returned, RolloutResult):
        hint = "write `return ctx.complete(messages)`, or `return ctx.error(message)`"
        return _unusable(f"run returned {_article(returned)}, not a RolloutResult; {hint}")
    if returned.status not in ("COMPLETED", "ERROR"):
        return _unusable(f"run returned the status {returned.status!r}; use COMPLETED or ERROR")
    given: object = returned.final_messages
    if not isinstance(given, (list, tuple)):
        return _unusable(f"final_messages is {_article(given)}, not a list of messages")
    try:
        messages = plain_messages(given)
    except OsmosisRolloutError as error:
        return _unusable(f"final_messages can't be used: {error}")
    try:
        metrics = None if returned.metrics is None else RolloutMetrics.model_validate(returned.metrics)
    except ValidationError:
        return _unusable("the metrics aren't RolloutMetrics; leave them out")
    if returned.status == "ERROR":
        message = str(returned.error_message or "the loop reports an error without a message")
        return LoopOutcome("error", message, messages, str(returned.finish_reason or "error"), metrics=metrics)
    reward, problem = _reward(returned.reward)
    finish_reason = str(returned.finish_reason or "stop")
    return LoopOutcome("completed", None, messages, finish_reason, reward, problem, metrics)


def _unusable(message: str) -> LoopOutcome:
    return LoopOutcome("wrong_type", message)


def _reward(given: object) -> tuple[float | None, tuple[FailureKind, str] | None]:
    if given is None:
        return None, None
    # As for reward functions, any real number will do, including NumPy's and bool.
    if not isinstance(given, numbers.Real):
        kind: FailureKind = "wrong_type"
        found = f"{_article(given)}, not a number"
    else:
        try:
            value = float(given)
        except OverflowError:
            value = math.inf
        if math.isfinite(value):
            return value, None
        kind, found = "not_finite", f"{value}, not a finite number"
    hint = "write `return ctx.complete(messages, reward=1.0)`, or leave the reward out"
    return None, (kind, f"the loop's reward is {found}; {hint}")


def plain_messages(messages: Sequence[object], start: int = 0) -> list[Message]:
    """Copy messages into the form that readers of trajectories rely on; `start` is the first one's index.

    Raises:
        OsmosisRolloutError: A message has another form, or can't be written as JSON.
    """
    for place, message in enumerate(messages, start):
        if not isinstance(message, dict):
            raise OsmosisRolloutError(f"message {place} is {_article(message)}, not a dict")
        if (problem := message_problem(message)) is not None:
            raise OsmosisRolloutError(f"message {place} {problem}")
    copied: list[Message] = msgspec.json.decode(encode_messages(messages, start))
    return copied


def describe_raised(error: BaseException) -> str:
    """Describe a loop's exception, with a hint if an `await` is missing."""
    if isinstance(error, OsmosisRolloutError):
        # This package's error messages are written for users; the class adds nothing.
        return str(error)
    if isinstance(error, AttributeError) and inspect.iscoroutine(error.obj):
        called = "ctx.chat" if error.obj.__name__ == "chat" else error.obj.__name__
        return f"{describe(error)}; write: await {called}(…)"
    return describe(error)


def say_raised(error: BaseException, request: RolloutRequest) -> str:
    """Describe a loop's exception and its place, without the trainer's key."""
    place = locate(error, Path.cwd())
    text = describe_raised(error)
    return mask(f"{text} ({place})" if place else text, request.api_key)


def tools_of(loop: RolloutAgentLoop, request: RolloutRequest) -> list[OpenAIFunctionToolSchema | Tool]:
    """Return the tools of `get_tools`; raises OsmosisRolloutError if it raises or doesn't return a list of tools."""
    try:
        tools: object = loop.get_tools(request)
    except (Exception, SystemExit) as error:
        raise OsmosisRolloutError(f"get_tools raised {say_raised(error, request)}") from error
    if inspect.iscoroutine(tools):
        # Otherwise Python would warn that the coroutine was never awaited.
        tools.close()
        raise OsmosisRolloutError(
            "get_tools is async; it must be a plain function that returns a list of tools: "
            "write `def get_tools(self, request)`"
        )
    if not isinstance(tools, (list, tuple)):
        raise OsmosisRolloutError(
            f"get_tools must return a list of tools, not {type(tools).__name__}; without tools write `return []`"
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, (dict, BaseModel)):
            raise OsmosisRolloutError(
                f"get_tools must return OpenAIFunctionToolSchema objects or dicts; item {index} is "
                f"{type(tool).__name__}"
            )
    return list(tools)


def tool_dicts(tools: Sequence[OpenAIFunctionToolSchema | Tool]) -> list[Tool]:
    """Return tools as plain dicts; dicts stay unchanged, whatever their schema."""
    return [tool.model_dump() if isinstance(tool, BaseModel) else tool for tool in tools]


def _article(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
