"""A streamed reply becomes the reply that would have come as a whole."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from osmosis_ai.models.base import parse_reply
from osmosis_ai.models.streaming import StreamedReply, data_of

TEXT = st.text(max_size=30)


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(3))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=100, deadline=None)
@given(
    content=TEXT,
    reasoning=TEXT,
    calls=st.lists(st.tuples(TEXT.filter(str.strip), TEXT), max_size=3),
    seed=st.integers(0, 99),
)
def test_parts_add_up_to_the_whole(content: str, reasoning: str, calls: list[tuple[str, str]], seed: int) -> None:
    rng = random.Random(seed)
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    deltas += [{"content": each} for each in cut(content, rng)]
    deltas += [{"reasoning_content": each} for each in cut(reasoning, rng)]
    for index, (name, arguments) in enumerate(calls):
        head = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": each}}]} for each in cut(arguments, rng)]
    parts = StreamedReply()
    for delta in deltas:
        list(parts.add({"choices": [{"index": 0, "delta": delta}]}))
    assert not parts.finished
    list(parts.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    assert parts.finished
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [  # type: ignore[assignment]
            {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    whole = {"choices": [{"message": message, "finish_reason": "stop"}]}
    assert parse_reply(parts.reply(), source="s", position=1) == parse_reply(whole, source="s", position=1)


def test_token_data_and_usage_are_kept() -> None:
    parts = StreamedReply()
    token = {"token": "4", "logprob": -0.5}
    for number in (1, 2):
        choice = {"index": 0, "delta": {"content": "4"}, "logprobs": {"content": [token]}, "token_ids": [number]}
        list(parts.add({"choices": [choice], "prompt_token_ids": [7]}))
    list(parts.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "model": "served"}))
    list(parts.add({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}))
    completion = parse_reply(parts.reply(), source="s", position=1)
    assert completion.logprobs is not None
    assert completion.logprobs.content is not None
    assert len(completion.logprobs.content) == 2
    assert completion.token_ids is not None
    assert (completion.token_ids.token_ids, completion.token_ids.prompt_token_ids) == ([1, 2], [7])
    assert (completion.finish_reason, completion.model, completion.usage.total_tokens) == ("length", "served", 3)


NAMES = st.sampled_from(["choices", "delta", "tool_calls", "function", "index", "logprobs", "usage", "arguments"])
ODD = st.recursive(
    st.none() | st.integers() | TEXT, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=12
)


@settings(max_examples=200, deadline=None)
@given(ODD)
def test_odd_chunks_raise_nothing(chunk: Any) -> None:
    parts = StreamedReply()
    choices = [chunk, {"delta": chunk}, {"delta": {"tool_calls": [chunk]}}, {"delta": {"tool_calls": chunk}}]
    for each in (chunk, {"choices": chunk}, {"choices": choices}):
        list(parts.add(each))
    msgspec.json.encode(parts.reply())


def test_only_data_is_data() -> None:
    lines = [b": ping", b"", b"data: [DONE]", b"event: error", b'data: {"a": 1}\r', b'data:{"b": 2}']
    assert [data_of(line) for line in lines] == [None, None, None, None, b'{"a": 1}', b'{"b": 2}']
