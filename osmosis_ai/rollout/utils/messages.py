"""Convert messages between the forms of agent frameworks."""

from __future__ import annotations

from collections.abc import Sequence

from osmosis_ai.records import Message

__all__ = ["map_initial_messages_to_content_blocks"]


def map_initial_messages_to_content_blocks(messages: Sequence[Message]) -> list[Message]:
    """Convert chat messages to Strands' form, where content is a list of blocks.

    Text becomes one text block. Messages whose content isn't text are returned as they are.
    """
    return [
        {"role": message["role"], "content": [{"text": content}]}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]
