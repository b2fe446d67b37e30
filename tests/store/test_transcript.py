"""A trajectory as text: everything is in it, in order."""

from __future__ import annotations

from typing import Any

from osmosis_ai.records import Failure, Rollout, Row, Score, ToolCall, Turn, Usage
from osmosis_ai.store.queries import ScoredRollout, StoredRollout
from osmosis_ai.store.transcript import transcript

ROW = Row(3, "r3", "be exact", "add", ground_truth="42", extra={"level": 1})
OPENING = [{"role": "system", "content": "be exact"}, {"role": "user", "content": "add"}]


def calls(*names: str, id: str | None = None) -> dict[str, Any]:
    """An assistant message that calls these tools."""
    items = [
        {"id": id or f"c{index}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": items}


def result(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def shown(messages: list[dict[str, Any]], scores: list[Score] | None = None, requests: int = 0, **fields: Any) -> str:
    rollout = Rollout("id", 3, "r3", 0, "policy", messages, **{"finish_reason": "stop", "duration_ms": 1.5, **fields})
    turns, tool_calls = len(rollout.turns), len(rollout.tool_calls)
    stored = StoredRollout(rollout, turns, tool_calls, 0, requests or turns, 1, 0.0, 0.0)
    return "\n".join(transcript(ScoredRollout(stored, ROW, {score.function: score for score in scores or []})))


def test_each_result_stands_with_its_own_call() -> None:
    """Two calls of one turn share an id, and the next turn uses it again."""
    text = shown(
        [*OPENING, calls("add", "sub", id="x"), result("x", "one"), result("x", "two"), calls("mul", id="x"),
         result("x", "three"), {"role": "assistant", "content": "done"}],
        turns=[Turn(index, "stop", Usage(1, 2, 3), 1000.0 * (index + 1)) for index in range(3)],
        tool_calls=[
            ToolCall(0, "x", "add", "{}", 1.0),
            ToolCall(0, "x", "sub", "{}", 2.0, error="exception"),
            ToolCall(1, "x", "mul", "{}", 3000.0, truncated_from=123456),
        ],
    )  # fmt: skip
    assert "── result of add, 1.0 ms\none" in text
    assert "── result of sub, 2.0 ms, error: exception\ntwo" in text
    assert "── result of mul, 3.0 s, cut from 123,456 characters (--max-tool-output)\nthree" in text
    assert "── assistant, turn 3, stop, 1 + 2 tokens, 3.0 s\ndone" in text


def test_a_call_that_ended_the_rollout_says_so() -> None:
    text = shown(
        [*OPENING, calls("add", "dies"), result("c0", "3")],
        turns=[Turn(0, "tool_calls", Usage(), 1.0)],
        tool_calls=[ToolCall(0, "c0", "add", "{}", 1.0), ToolCall(0, "c1", "dies", "{}", 2.0, error="worker")],
    )
    assert "── result of add, 1.0 ms\n3" in text
    assert "── no result of dies, 2.0 ms, error: worker" in text


def test_a_call_without_a_result_and_a_result_without_a_call_are_shown() -> None:
    text = shown([*OPENING, calls("add"), result("other", "stray")], turns=[Turn(0, "tool_calls", Usage(), 1.0)])
    assert "→ add {}" in text
    assert "── result of tool\nstray" in text


def test_replies_that_no_turn_made_have_no_turn() -> None:
    text = shown(
        [*OPENING, {"role": "assistant", "content": "an example"}, {"role": "assistant", "content": "real"}],
        turns=[Turn(0, "stop", Usage(), 1.0)],
    )
    assert "── assistant\nan example" in text
    assert "── assistant, turn 1, stop, 0 + 0 tokens, 1.0 ms\nreal" in text


def test_long_arguments_and_parts_that_are_no_text() -> None:
    message = calls("write")
    message["tool_calls"][0]["function"]["arguments"] = '{"text":\n"' + "a" * 100 + '"}'
    message["reasoning_content"] = "I think"
    message["content"] = [{"type": "text", "text": "hello"}]
    call = ToolCall(0, "c0", "write", "{}", 1.0, content={"structured": {"n": 1}})
    text = shown([*OPENING, message, result("c0", "ok")], turns=[Turn(0, "stop", Usage(), 1.0)], tool_calls=[call])
    assert '→ write\n  {"text":\n  "aaaa' in text
    assert "reasoning: I think" in text
    assert '[{"type":"text","text":"hello"}]' in text
    assert 'not shown to the model as text: {"structured":{"n":1}}' in text


def test_failures_and_scores_say_where_and_why() -> None:
    failure = Failure("tool", "it broke", "exception", "tools/a.py", 7, "Traceback\n  deep")
    text = shown(
        OPENING,
        [
            Score("good", 0.25, explanation="nearly"),
            Score("bad", failure=Failure("reward", "no", file="r.py", line=2)),
        ],
        failure=failure,
        samples=[Turn(0, "stop", Usage(5, 6, 11), 1.0, model="m", attempts=2)],
        requests=9,
        cost_usd=0.5,
    )
    assert "tool: it broke\n  at tools/a.py:7\n  Traceback\n    deep" in text
    assert "good: 0.250\n  nearly" in text
    assert "bad: no score\n  reward: no\n    at r.py:2" in text
    assert "sample requested by a tool, stop, m, 5 + 6 tokens, 1.0 ms, 2 attempts" in text
    assert "9 model requests" in text
    assert "$0.5000" in text
    assert 'ground truth: 42\nrow: {"level":1}' in text
