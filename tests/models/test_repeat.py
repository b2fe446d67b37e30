"""The model that repeats recorded conversations: which reply it gives, and when it has none."""

from __future__ import annotations

import pytest

from osmosis_ai.errors import ModelError
from osmosis_ai.models.repeat import RepeatingModel
from osmosis_ai.records import Message

pytestmark = pytest.mark.anyio

ASKED: list[Message] = [{"role": "user", "content": "6 × 7?"}]


def replied(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def test_conversations_that_begin_alike_each_give_their_own_reply_once() -> None:
    model = RepeatingModel([[*ASKED, replied("41")], [*ASKED, replied("42"), ASKED[0], replied("still 42")]])
    given = [(await model.complete(ASKED, [], {})).message["content"] for _ in range(3)]
    assert given == ["41", "42", "42"]
    later = await model.complete([*ASKED, replied("42"), ASKED[0]], [], {})
    assert later.message["content"] == "still 42"


async def test_a_request_that_is_in_no_conversation_fails_with_the_first_difference() -> None:
    model = RepeatingModel([[*ASKED, replied("41")], [*ASKED, replied("42"), ASKED[0], replied("still 42")]])
    with pytest.raises(ModelError, match="differs from message 3 on") as raised:
        await model.complete([*ASKED, replied("42"), {"role": "user", "content": "Really?"}], [], {})
    assert raised.value.kind == "unrecorded"
