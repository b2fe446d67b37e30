"""Keep the tokens of a rollout's conversations: append-only, sampled replies and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from osmosis_ai.errors import ModelError
from osmosis_ai.models.policy.template import ChatTemplate, ChatTemplateError
from osmosis_ai.records import Message, Tool

__all__ = ["Conversations", "TokenSession"]


class TokenSession(NamedTuple):
    """A conversation up to a reply: its messages, and the tokens that the model has read and sampled.

    `opening` is the length of the first prompt in tokens. A new conversation has no tokens.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()
    ids: Sequence[int] = ()
    opening: int = 0

    def continued_by(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Return True if these messages extend this conversation, with the same tools."""
        known = len(self.messages)
        return (
            len(messages) > known
            and all(_same(one, other) for one, other in zip(self.messages, messages[:known], strict=True))
            and list(tools) == list(self.tools)
        )


class Conversations:
    """The conversations of a rollout, by turn. A workflow may have several; a rewritten one starts a new one."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._sessions: list[TokenSession] = []

    def find(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[TokenSession, list[int]]:
        """Return the conversation that these messages continue, or a new one, and the prompt tokens of the request.

        Changes nothing, because the request may fail: `keep` the conversation once it has a reply.

        Raises:
            ModelError: The chat template can't render the messages.
        """
        known = [session for session in self._sessions if session.continued_by(messages, tools)]
        # Earlier turns of the same conversation are kept as well; the longest needs the fewest tokens rendered.
        session = max(known, key=lambda one: len(one.messages), default=TokenSession())
        try:
            if not session.ids:
                return session, self._template.render(messages, tools)
            reply, added = session.messages[-1], messages[len(session.messages) :]
            return session, [*session.ids, *self._template.after(reply, session.ids[-1], added)]
        except ChatTemplateError as error:
            raise ModelError(str(error), kind="bad_request") from error

    def keep(self, session: TokenSession) -> None:
        """Keep a conversation that ends with a reply, so that later requests can continue it."""
        self._sessions.append(session)


def _same(known: Message, given: Message) -> bool:
    # A loop that appends to its list passes the same dicts, which spares the comparison of long texts.
    return known is given or _seen(known) == _seen(given)


def _seen(message: Message) -> Message:
    """Return the parts of a message that identify it: clients drop reasoning, and write empty values in many ways."""
    kept = ("role", "content", "tool_calls", "tool_call_id", "name")
    return {name: message[name] for name in kept if message.get(name) not in (None, "", [])}
