"""The tokens of a rollout's conversations. They only grow: by what the model sampled, and by what comes between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from osmosis_ai.errors import ModelError
from osmosis_ai.models.policy.template import ChatTemplate, ChatTemplateError
from osmosis_ai.records import Message, Tool

__all__ = ["Conversations", "TokenSession"]


class TokenSession(NamedTuple):
    """A conversation up to a reply: its messages, and the tokens that the model has read and sampled.

    `opening` is how many of them are the first prompt. A new one that nothing was sampled in has no tokens.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()
    ids: Sequence[int] = ()
    opening: int = 0

    def continued_by(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Return True if these messages begin with this conversation."""
        known = len(self.messages)
        return (
            len(messages) > known
            and all(_same(one, other) for one, other in zip(self.messages, messages[:known], strict=True))
            and list(tools) == list(self.tools)
        )


class Conversations:
    """The conversations of a rollout, by turn. A workflow may have several; one that was rewritten begins anew."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._sessions: list[TokenSession] = []

    def find(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[TokenSession, list[int]]:
        """Return the conversation that these messages continue, or a new one, and the tokens of the request.

        Nothing is kept, because a request may fail.

        Raises:
            ModelError: The model's template can't render them.
        """
        known = [session for session in self._sessions if session.continued_by(messages, tools)]
        session = max(known, key=lambda one: len(one.messages), default=TokenSession())
        try:
            if not session.ids:
                return session, self._template.render(messages, tools)
            reply, added = session.messages[-1], messages[len(session.messages) :]
            return session, [*session.ids, *self._template.after(reply, session.ids[-1], added)]
        except ChatTemplateError as error:
            raise ModelError(str(error), kind="bad_request") from error

    def keep(self, session: TokenSession) -> None:
        """Keep a conversation, with the reply that it ends with."""
        self._sessions.append(session)


def _same(known: Message, given: Message) -> bool:
    return known is given or _seen(known) == _seen(given)


def _seen(message: Message) -> Message:
    """Return what of a message the next request depends on: clients drop reasoning, and write nothing in many ways."""
    kept = ("role", "content", "tool_calls", "tool_call_id", "name")
    return {name: message[name] for name in kept if message.get(name) not in (None, "", [])}
