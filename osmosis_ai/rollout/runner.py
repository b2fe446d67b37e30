"""Where a served agent loop runs: the server knows only `RolloutRunner`. `InProcessRunner` runs it right here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.http import mask
from osmosis_ai.records import Message, Tool
from osmosis_ai.rollout.client import TrainerPool, encode_messages
from osmosis_ai.rollout.core.base import ChatClient, RolloutAgentLoop, RolloutContext
from osmosis_ai.rollout.core.schemas import RolloutMetrics, RolloutRequest, RolloutResponse, RolloutStatus
from osmosis_ai.rollout.outcome import CANCEL_GRACE, LoopOutcome, outcome_of, say_raised, tool_dicts, tools_of
from osmosis_ai.rollout.settings import ClientSettings

__all__ = ["InProcessRunner", "RolloutRunner", "as_instance", "error_response", "run_loop", "to_response"]

logger = logging.getLogger(__name__)


class RolloutRunner(Protocol):
    """Runs the rollouts of one agent loop, in this process or in others."""

    @property
    def name(self) -> str:
        """The agent loop's name."""
        ...

    async def start(self) -> None:
        """Get ready, before any rollout; raises StartError when the loop can't be loaded."""
        ...

    async def aclose(self) -> None:
        """Release what it holds; no rollout is running any more."""
        ...

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        """The tools of a rollout, in the OpenAI format, as the trainer gets them.

        Raises OsmosisError when the loop's `get_tools` fails or returns something else.
        """
        ...

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        """Run one rollout to its end.

        Whatever the loop does (raise, hang, return the wrong thing, take its process down) becomes a response with
        status ERROR that says so. Cancelling it stops the rollout.
        """
        ...


class InProcessRunner:
    """Runs an agent loop in this process and on this event loop: a loop that blocks, blocks the server with it."""

    def __init__(
        self,
        loop: RolloutAgentLoop | type[RolloutAgentLoop],
        *,
        timeout: float | None,
        debug_dir: Path | None,
        allow_rewrites: bool,
        client: ClientSettings,
    ) -> None:
        self._loop = as_instance(loop)
        self._run = partial(run_loop, timeout=timeout, debug_dir=debug_dir, allow_rewrites=allow_rewrites)
        self._pool = TrainerPool(client)

    @property
    def name(self) -> str:
        return str(getattr(self._loop, "name", type(self._loop).__name__))

    async def start(self) -> None:
        """Nothing to do: the loop is there."""

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        return tool_dicts(tools_of(self._loop, request))

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        return await self._run(self._loop, request, self._pool.client(request))


def as_instance(loop: RolloutAgentLoop | type[RolloutAgentLoop]) -> RolloutAgentLoop:
    """An agent loop, made from its class if it is one."""
    return loop() if isinstance(loop, type) else loop


async def run_loop(
    loop: RolloutAgentLoop,
    request: RolloutRequest,
    llm: ChatClient,
    *,
    timeout: float | None = None,
    debug_dir: Path | str | None = None,
    allow_rewrites: bool = False,
    make_context: Callable[..., RolloutContext] = RolloutContext,
    held: Callable[[], None] | None = None,
    cancel_grace: float = CANCEL_GRACE,
) -> RolloutResponse:
    """Run a loop once, and give its result or what went wrong as the response that the trainer gets.

    Args:
        loop, request, llm: The agent loop, the rollout and the model.
        timeout: Seconds, None for no bound.
        debug_dir, allow_rewrites: As for `RolloutContext`, of which `make_context` makes one.
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

    outcome = await outcome_of(loop, context, timeout=timeout, held=goes_on, cancel_grace=cancel_grace)
    if outcome is None:
        return error_response(request, f"the rollout did not end within {timeout:g} s", context)
    return to_response(context, outcome)


def to_response(context: RolloutContext, outcome: LoopOutcome) -> RolloutResponse:
    """An outcome as the response that the trainer gets; an ERROR when it isn't a usable result."""
    request = context.request
    if outcome.raised is not None:
        text = say_raised(outcome.raised, request)
        if not isinstance(outcome.raised, OsmosisRolloutError):
            logger.info("rollout %r raised %s", request.rollout_id, text)
        return error_response(request, text, context)
    problem = outcome.reward_problem[1] if outcome.reward_problem else outcome.message
    if outcome.messages is None or outcome.reward_problem:
        return error_response(request, problem or "", context)
    return RolloutResponse(
        rollout_id=request.rollout_id,
        status=RolloutStatus.COMPLETED if outcome.kind == "completed" else RolloutStatus.ERROR,
        final_messages=outcome.messages,
        finish_reason=outcome.finish_reason,
        error_message=None if outcome.message is None else mask(outcome.message, request.api_key),
        reward=outcome.reward,
        metrics=outcome.metrics or context.final_metrics(),
    )


def error_response(request: RolloutRequest, message: str, context: RolloutContext | None = None) -> RolloutResponse:
    """The response of a rollout that failed; the trainer's key in the message is masked.

    If the loop had begun, its context gives the conversation and the metrics as far as they came.
    """
    return RolloutResponse(
        rollout_id=request.rollout_id,
        status=RolloutStatus.ERROR,
        final_messages=_sendable(context.conversation) if context else [],
        finish_reason="error",
        error_message=mask(message, request.api_key),
        metrics=context.final_metrics() if context else RolloutMetrics(),
    )


def _sendable(messages: list[Message]) -> list[Message]:
    try:
        encode_messages(messages)
    except OsmosisRolloutError:
        # The failure that is reported may be this very one.
        return []
    return messages
