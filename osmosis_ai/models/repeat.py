"""A model that repeats the replies of recorded conversations."""

from __future__ import annotations

from osmosis_ai.errors import ModelError
from osmosis_ai.records import Completion, JsonObject, Message, Tool

__all__ = ["RepeatingModel"]


class RepeatingModel:
    """Answers with what followed the same messages in a conversation: of several replies, with one not yet given."""

    def __init__(self, conversations: list[list[Message]]) -> None:
        self._conversations = conversations
        self._given: set[tuple[int, int]] = set()

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Return the recorded reply; raise ModelError if these messages have none."""
        count = len(messages)
        found = [
            number
            for number, known in enumerate(self._conversations)
            if count < len(known) and known[count].get("role") == "assistant" and known[:count] == messages
        ]
        if not found:
            # Each message's number, as in a transcript.
            same = max((_same(known, messages) for known in self._conversations), default=0)
            raise ModelError(
                f"the recorded conversation has no reply to this request, which differs from message {same + 1} on; "
                "run the rollout again instead",
                kind="unrecorded",
            )
        # When all have been given, the last one repeats.
        chosen = next((number for number in found if (number, count) not in self._given), found[-1])
        self._given.add((chosen, count))
        reply = self._conversations[chosen][count]
        return Completion(reply, "tool_calls" if reply.get("tool_calls") else "stop", cached=True)

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""


def _same(known: list[Message], messages: list[Message]) -> int:
    """Return the number of messages with which both begin."""
    pairs = enumerate(zip(known, messages, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), len(messages))
