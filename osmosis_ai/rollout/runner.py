"""Where a served agent loop runs: the server knows only `RolloutRunner`. `InProcessRunner` runs it right here."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import numbers
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
from pydantic import BaseModel, ValidationError

from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.records import Tool
from osmosis_ai.rollout.client import TrainerPool, encode_messages
from osmosis_ai.rollout.core.base import ChatClient, RolloutAgentLoop, RolloutContext, RolloutResult
from osmosis_ai.rollout.core.schemas import (
    OpenAIFunctionToolSchema,
    RolloutMetrics,
    RolloutRequest,
    RolloutResponse,
    RolloutStatus,
)
from osmosis_ai.rollout.settings import ClientSettings
from osmosis_ai.tracebacks import describe, locate

__all__ = [
    "InProcessRunner",
    "RolloutRunner",
    "as_instance",
    "describe_raised",
    "error_response",
    "run_apart",
    "run_loop",
    "to_response",
    "tool_dicts",
    "tools_of",
]

logger = logging.getLogger(__name__)

CANCEL_GRACE = 5.0

ResultT = TypeVar("ResultT")


class RolloutRunner(Protocol):
    """Runs the rollouts of one agent loop, in this process or in others.

    Attributes:
        name: The agent loop's name.
    """

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Get ready; called once, before any rollout.

        Raises:
            StartError: The loop can't be loaded.
        """
        ...

    async def aclose(self) -> None:
        """Release what it holds; no rollout is running any more."""
        ...

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        """The tools of a rollout, in the OpenAI format, as the trainer gets them.

        Raises:
            OsmosisError: The loop's `get_tools` fails or returns something else.
        """
        ...

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        """Run one rollout to its end.

        Whatever the loop does (raise, hang, return the wrong thing, take its process down) becomes a response with
        status ERROR that says so. Cancelling it stops the rollout.
        """
        ...


class InProcessRunner:
    """Runs an agent loop in this process and on this event loop: a loop that blocks, blocks the server with it.

    Args:
        loop: The agent loop, or its class.
        timeout: Seconds one rollout may take, None for no bound.
        debug_dir: The folder for the files of `ctx.log_event`; None for none.
        allow_rewrites: Whether a loop may change messages it has sent.
        client: Timeouts and retries of model calls; from the environment when not given.
    """

    def __init__(
        self,
        loop: RolloutAgentLoop | type[RolloutAgentLoop],
        *,
        timeout: float | None = None,
        debug_dir: Path | None = None,
        allow_rewrites: bool = False,
        client: ClientSettings | None = None,
    ) -> None:
        self._loop = as_instance(loop)
        self._timeout = timeout
        self._debug_dir = debug_dir
        self._allow_rewrites = allow_rewrites
        self._pool = TrainerPool(client)

    @property
    def name(self) -> str:
        """The agent loop's name."""
        return str(getattr(self._loop, "name", type(self._loop).__name__))

    async def start(self) -> None:
        """Nothing to do: the loop is there."""

    async def aclose(self) -> None:
        """Close the connections to trainers."""
        await self._pool.aclose()

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        """The tools of a rollout.

        Raises:
            OsmosisRolloutError: `get_tools` fails or returns something else.
        """
        return tool_dicts(tools_of(self._loop, request))

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        """Run one rollout; what the loop does wrong is in the response."""
        return await run_loop(
            self._loop,
            request,
            self._pool.client(request),
            timeout=self._timeout,
            debug_dir=self._debug_dir,
            allow_rewrites=self._allow_rewrites,
        )


def as_instance(loop: RolloutAgentLoop | type[RolloutAgentLoop]) -> RolloutAgentLoop:
    """An agent loop, made from its class if it is one."""
    return loop() if isinstance(loop, type) else loop


def tools_of(loop: RolloutAgentLoop, request: RolloutRequest) -> list[OpenAIFunctionToolSchema | dict[str, Any]]:
    """What `get_tools` returns, checked to be a list of tools.

    Raises:
        OsmosisRolloutError: It raises, or returns something else.
    """
    try:
        tools: object = loop.get_tools(request)
    except (Exception, SystemExit) as error:
        raise OsmosisRolloutError(f"get_tools raised {_said(error, request)}") from error
    if inspect.iscoroutine(tools):
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


def tool_dicts(tools: Sequence[OpenAIFunctionToolSchema | dict[str, Any]]) -> list[Tool]:
    """Tools as plain dicts; those that are dicts already stay as they are, whatever is in their schemas."""
    return [tool.model_dump() if isinstance(tool, BaseModel) else tool for tool in tools]


async def run_loop(
    loop: RolloutAgentLoop,
    request: RolloutRequest,
    llm: ChatClient,
    *,
    timeout: float | None = None,  # noqa: ASYNC109  its end is a response, not an exception
    debug_dir: Path | str | None = None,
    allow_rewrites: bool = False,
    make_context: Callable[..., RolloutContext] = RolloutContext,
    held: Callable[[], None] | None = None,
    cancel_grace: float = CANCEL_GRACE,
) -> RolloutResponse:
    """Run a loop once, and give its result or what went wrong as the response that the trainer gets.

    Args:
        loop: The agent loop.
        request: The rollout.
        llm: The model.
        timeout: Seconds, None for no bound.
        debug_dir: The folder for the file of `ctx.log_event`; None for none.
        allow_rewrites: Whether the loop may change messages it has sent.
        make_context: Makes the loop's context, from what `RolloutContext` takes.
        held: Called when the loop doesn't end although it was cancelled.
        cancel_grace: Seconds a loop whose time is up has for its own clean-up.
    """
    try:
        tools = tools_of(loop, request)
    except OsmosisRolloutError as error:
        return error_response(request, str(error))
    context = make_context(request, tools, llm, debug_dir=debug_dir, allow_rewrites=allow_rewrites)

    def goes_on() -> None:
        logger.warning("rollout %r goes on although it was cancelled", request.rollout_id)
        if held is not None:
            held()

    task = await run_apart(_outcome(loop, context), timeout=timeout, held=goes_on, cancel_grace=cancel_grace)
    if task is None:
        return error_response(request, f"the rollout did not end within {timeout:g} s", context)
    return task.result()


async def run_apart(
    coroutine: Coroutine[Any, Any, ResultT],
    *,
    timeout: float | None = None,  # noqa: ASYNC109  its end is a result, not an exception
    held: Callable[[], None],
    cancel_grace: float = CANCEL_GRACE,
) -> asyncio.Task[ResultT] | None:
    """Run an agent loop's code in a task of its own, which can't keep the rollout from ending.

    Args:
        coroutine: The code.
        timeout: Seconds, None for no bound.
        held: Called when the code goes on although it was cancelled, from here or from outside.
        cancel_grace: Seconds it has for its own clean-up then.

    Returns:
        The task, done; None when its time was up.
    """
    task = asyncio.ensure_future(coroutine)

    async def cancel() -> None:
        task.cancel()
        # Shielded, because the rollout itself may be cancelled just now.
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task}, timeout=cancel_grace)
        if not task.done():
            held()

    try:
        await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        await cancel()
        raise
    if task.done():
        return task
    await cancel()
    return None


async def _outcome(loop: RolloutAgentLoop, context: RolloutContext) -> RolloutResponse:
    try:
        result: object = await loop.run(context)
    except asyncio.CancelledError:
        # Nobody reads this when it was cancelled by `run_apart`; otherwise the loop has cancelled itself.
        return error_response(context.request, "the loop cancelled its own task", context)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the loop raises is its rollout's result
        if not isinstance(error, OsmosisRolloutError):
            logger.info("rollout %r raised %s", context.request.rollout_id, _said(error, context.request))
        return error_response(context.request, _said(error, context.request), context)
    return to_response(context, result)


def to_response(context: RolloutContext, result: object) -> RolloutResponse:
    """What a loop's `run` returned, as the response that the trainer gets; an ERROR when it isn't a usable result.

    Args:
        context: The rollout.
        result: What `run` returned.
    """
    request = context.request
    if not isinstance(result, RolloutResult):
        return error_response(
            request,
            f"run returned {type(result).__name__}; it must return `ctx.complete(messages)` or `ctx.error(message)`",
            context,
        )
    problem = _problem(result)
    if problem is not None:
        return error_response(request, problem, context)
    status = RolloutStatus(result.status)
    message = result.error_message
    if status is RolloutStatus.ERROR and not message:
        message = "the loop reports an error without a message"
    try:
        return RolloutResponse(
            rollout_id=request.rollout_id,
            status=status,
            final_messages=result.final_messages,
            finish_reason=result.finish_reason,
            error_message=None if message is None else _masked(message, request),
            reward=None if result.reward is None else float(result.reward),
            metrics=result.metrics or context.final_metrics(),
        )
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        return error_response(request, f"run returned a result whose `{field}` can't be used: {first['msg']}", context)


def _problem(result: RolloutResult) -> str | None:
    if result.status not in ("COMPLETED", "ERROR"):
        return f"run returned a result with the status {result.status!r}; there are COMPLETED and ERROR"
    messages: object = result.final_messages
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "run returned a result whose `final_messages` isn't a list of dicts"
    reward: object = result.reward
    if reward is not None and not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        return f"run returned the reward {reward!r}; a reward is a finite number or None"
    try:
        encode_messages(messages)
    except OsmosisRolloutError as error:
        return f"run returned `final_messages` that can't be sent: {error}"
    return None


def error_response(request: RolloutRequest, message: str, context: RolloutContext | None = None) -> RolloutResponse:
    """The response of a rollout that failed.

    Args:
        request: The rollout.
        message: What went wrong; the trainer's key in it is masked.
        context: Gives the conversation and the metrics as far as they came, if the loop had begun.
    """
    return RolloutResponse(
        rollout_id=request.rollout_id,
        status=RolloutStatus.ERROR,
        final_messages=_sendable(context.conversation) if context else [],
        finish_reason="error",
        error_message=_masked(message, request),
        metrics=context.final_metrics() if context else RolloutMetrics(),
    )


def _sendable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        encode_messages(messages)
    except OsmosisRolloutError:
        # The failure that is reported may be this very one.
        return []
    return messages


def describe_raised(error: BaseException) -> str:
    """What a loop has raised, in words, with what to write where an `await` is missing.

    Args:
        error: What it raised.
    """
    if isinstance(error, OsmosisRolloutError):
        # Errors of this package are written for users: their class says nothing more.
        return str(error)
    if isinstance(error, AttributeError) and inspect.iscoroutine(error.obj):
        called = "ctx.chat" if error.obj.__name__ == "chat" else error.obj.__name__
        return f"{describe(error)}; write: await {called}(…)"
    return describe(error)


def _said(error: BaseException, request: RolloutRequest) -> str:
    place = locate(error, Path.cwd())
    text = describe_raised(error)
    return _masked(f"{text} ({place})" if place else text, request)


def _masked(text: str, request: RolloutRequest) -> str:
    return text.replace(request.api_key, "***") if request.api_key else text
