"""Observe a rollout whose code calls the model itself: conversation, tool calls and limits, as seen in requests."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import msgspec

from osmosis_ai.config import LimitsConfig
from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.mcp_tools.conversion import error_result
from osmosis_ai.records import Completion, FinishReason, JsonObject, Message, ToolCall
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.worker.deadlines import elapsed_ms
from osmosis_ai.text import json_text

__all__ = ["LimitReachedError", "ObservedRollout"]


class LimitReachedError(OsmosisRolloutError):
    """The rollout has reached a limit and can't call the model again. `reason` is its finish reason."""

    def __init__(self, message: str, reason: FinishReason) -> None:
        super().__init__(message)
        self.reason = reason


class ObservedRollout:
    """Follows the requests and replies of one rollout, and reports them.

    Attributes:
        conversation: The messages of the latest request, and its reply if it has come.
        limit: The limit that was reached, if any.
    """

    def __init__(
        self, job: str, opening: list[Message], limits: LimitsConfig, emit: Callable[[protocol.Event], None]
    ) -> None:
        self.conversation = opening
        self.limit: LimitReachedError | None = None
        self._job = job
        self._limits = limits
        self._emit = emit
        self._calls: dict[str, ToolCall] = {}
        self._own_calls = 0
        self._requests = 0
        self._tokens = 0
        self._replied = 0.0

    def enforce_limits(self) -> None:
        """Count a request; raise LimitReachedError if the turns or tokens are used up."""
        limits = self._limits
        if self._requests >= limits.max_turns:
            self.limit = LimitReachedError(f"the {limits.max_turns} turns (--max-turns) are used up", "max_turns")
        elif limits.max_tokens_total is not None and self._tokens >= limits.max_tokens_total:
            message = f"the {limits.max_tokens_total} tokens (--max-tokens-total) are used up"
            self.limit = LimitReachedError(message, "max_tokens_total")
        if self.limit is not None:
            raise self.limit
        self._requests += 1

    def asking(self, messages: list[Message], plain: Callable[[list[Message], int], list[Message]]) -> None:
        """Report a request. `plain` makes sendable messages of the new ones, given their position."""
        kept = 0
        # Only the part that differs from the known conversation goes to the run.
        for before, after in zip(self.conversation, messages, strict=False):
            if before != after:
                break
            kept += 1
        added = plain(messages[kept:], kept)
        self.conversation[kept:] = added
        self._emit(protocol.Asked(self._job, kept, added, self._results(added)))

    def replied(self, completion: Completion) -> None:
        """Record the reply to the latest request."""
        self.conversation.append(completion.message)
        self._calls = self._open_calls(completion.message)
        self._tokens += completion.usage.total_tokens

    def claim(self, name: str, arguments: JsonObject) -> JsonObject:
        """Return the call of the last reply that has this name and these arguments, or a new call if there is none.

        A claimed call is recorded when it is made, not from the next request.
        """
        for call in self._calls.values():
            if call.name == name and _holds(call.arguments, arguments):
                del self._calls[call.id]
                return {"id": call.id, "function": {"name": name, "arguments": call.arguments}}
        self._own_calls += 1
        return {"id": f"own-{self._own_calls}", "function": {"name": name, "arguments": json_text(arguments)}}

    def acting(self) -> None:
        """Report that the rollout's code runs again, whether or not a reply came."""
        self._replied = monotonic()
        self._emit(protocol.Acting(self._job))

    def _open_calls(self, message: Message) -> dict[str, ToolCall]:
        turn = self._requests - 1
        calls = {}
        for call in message.get("tool_calls") or ():
            function = call["function"]
            calls[call["id"]] = ToolCall(turn, call["id"], function["name"], function["arguments"], 0.0)
        return calls

    def _results(self, messages: list[Message]) -> list[ToolCall]:
        """Return the last turn's tool calls with a result among these messages.

        The tools run unobserved. Only the total duration of the turn's calls is known, and an error only by the form
        that `create_tool_error_result` gives it.
        """
        duration = elapsed_ms(self._replied) if self._replied else 0.0
        done = []
        for message in messages:
            call = self._calls.pop(str(message.get("tool_call_id")), None) if message.get("role") == "tool" else None
            if call is not None:
                text = str(message.get("content"))
                if text.startswith("Error: "):
                    call = msgspec.structs.replace(call, error="exception", failure=error_result(text, "exception"))
                done.append(msgspec.structs.replace(call, duration_ms=duration))
        return done


def _holds(text: str, arguments: JsonObject) -> bool:
    """Return True if a model's JSON text for arguments has these values."""
    try:
        return bool(msgspec.json.decode(text or "{}") == arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
