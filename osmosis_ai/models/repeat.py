"""A model that repeats the replies of a recorded conversation."""

from __future__ import annotations

from osmosis_ai.errors import ModelError
from osmosis_ai.records import Completion, JsonObject, Message, Tool

__all__ = ["RepeatingModel"]


class RepeatingModel:
    """Answers with what followed the same messages in `conversation`."""

    def __init__(self, conversation: list[Message]) -> None:
        self._conversation = conversation

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Return the recorded reply; raise ModelError if these messages have none."""
        known, count = self._conversation, len(messages)
        if known[:count] != messages or count >= len(known) or known[count].get("role") != "assistant":
            # Each message's number, as in a transcript.
            same = next((i for i, pair in enumerate(zip(known, messages, strict=False)) if pair[0] != pair[1]), count)
            raise ModelError(
                f"the recorded conversation has no reply to this request, which differs from message {same + 1} on; "
                "run the rollout again instead",
                kind="unrecorded",
            )
        reply = known[count]
        return Completion(reply, "tool_calls" if reply.get("tool_calls") else "stop", cached=True)

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""
