"""The server's interface for running rollouts (`RolloutRunner`), and a runner in the server's own process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.masking import mask
from osmosis_ai.records import Message, Tool
from osmosis_ai.rollout.client import TrainerPool, encode_messages
from osmosis_ai.rollout.core.base import ChatClient, RolloutAgentLoop, RolloutContext
from osmosis_ai.rollout.core.schemas import RolloutMetrics, RolloutRequest, RolloutResponse, RolloutStatus
from osmosis_ai.rollout.outcome import CANCEL_GRACE, LoopOutcome, outcome_of, say_raised, tool_dicts, tools_of
from osmosis_ai.rollout.settings import ClientSettings

__all__ = ["InProcessRunner", "RolloutRunner", "as_instance", "error_response", "run_loop", "to_response"]

logger = logging.getLogger(__name__)


class RolloutRunner(Protocol):
    """A runner of one agent loop's rollouts, in this process or in others."""

    @property
    def name(self) -> str:
        """The agent loop's name."""
        ...

    async def start(self) -> None:
        """Prepare for rollouts; raises StartError if the loop can't be loaded."""
        ...

    async def aclose(self) -> None:
        """Release resources, once no rollout runs."""
        ...

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        """Return the tools of a rollout for the trainer, in the OpenAI format.

        Raises OsmosisError if the loop's `get_tools` fails or returns something else.
        """
        ...

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        """Run one rollout to its end.

        Any failure of the loop (it raises, hangs, returns the wrong type, crashes its process) becomes a response with
        status ERROR and a message. Cancelling the call stops the rollout.
        """
        ...


class InProcessRunner:
    """A runner in this process and on this event loop: a loop that blocks also blocks the server."""

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
        """Do nothing: the loop is loaded already."""

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def tools(self, request: RolloutRequest) -> list[Tool]:
        return tool_dicts(tools_of(self._loop, request))

    async def run(self, request: RolloutRequest) -> RolloutResponse:
        return await self._run(self._loop, request, self._pool.client(request))


def as_instance(loop: RolloutAgentLoop | type[RolloutAgentLoop]) -> RolloutAgentLoop:
    """Return an agent loop, creating it if a class is given."""
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
    """Run a loop once and return its result, or its failure, as the response to the trainer.

    Args:
        loop, request, llm: The agent loop, the rollout and the model.
        timeout: Seconds, None for no limit.
        debug_dir, allow_rewrites: As for `RolloutContext`, which `make_context` creates.
        held: Called if the loop keeps running after it was cancelled.
        cancel_grace: Seconds that a loop has for its own cleanup after a timeout.
    """
    try:
        tools = tools_of(loop, request)
    except OsmosisRolloutError as error:
        return error_response(request, str(error))
    context = make_context(request, tools, llm, debug_dir=debug_dir, allow_rewrites=allow_rewrites)

    def goes_on() -> None:
        logger.warning("rollout %r keeps running although it was cancelled", request.rollout_id)
        if held is not None:
            held()

    outcome = await outcome_of(loop, context, timeout=timeout, held=goes_on, cancel_grace=cancel_grace)
    if outcome is None:
        return error_response(request, f"the rollout did not end within {timeout:g} s", context)
    return to_response(context, outcome)


def to_response(context: RolloutContext, outcome: LoopOutcome) -> RolloutResponse:
    """Convert an outcome to the response to the trainer, with status ERROR if it isn't a usable result."""
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
    """Return the response for a failed rollout; the trainer's key in the message is masked.

    If the loop had started, the response contains its context's conversation and metrics so far.
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
        # Drop messages that can't be encoded: they may be the very failure being reported.
        return []
    return messages
