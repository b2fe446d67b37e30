"""Steps of a rollout as text."""

from __future__ import annotations

from typing import Any

from osmosis_ai.cli import steps
from osmosis_ai.models.choice import choose_model
from osmosis_ai.records import Failure, Message, ModelSpec, Rollout, Score, ToolCall, Turn, Usage
from osmosis_ai.runtime.protocol import Called, Paused
from osmosis_ai.runtime.run.debugger import Ended

PROMPT: list[Message] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]
CALLING: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}],
}
RESULT: Message = {"role": "tool", "tool_call_id": "a", "content": "3"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def model(**options: Any) -> ModelSpec:
    given: dict[str, Any] = {"model": "m", "base_url": "http://host/v1", "params": {}, **options}
    return choose_model(api_key=None, request_timeout=1.0, environ={}, **given)


def shown(stop: Paused, **options: Any) -> str:
    return "\n".join(steps.paused(stop, model(**options), [TOOL]))


def test_a_first_request_is_shown_with_its_prompt() -> None:
    assert shown(Paused("job", "request", 0, PROMPT), params={"top_p": 0.5}) == (
        '── request 1: m at http://host/v1, 2 messages, 2 of them new, 1 tool, {"top_p":0.5}\n'
        "system: Add.\n"
        "user: 1 + 2?"
    )


def test_a_later_request_is_shown_by_what_it_adds_on_a_line_each() -> None:
    long = {**RESULT, "content": "one\ntwo " + "x" * 500}
    text = shown(Paused("job", "request", 1, [*PROMPT, CALLING, long]), model="offline/oracle", base_url=None)
    header, call, result = text.splitlines()
    assert header == "── request 2: offline/oracle, 4 messages, 2 of them new, 1 tool"
    assert call == 'assistant: → add {"a":1,"b":2}'
    assert result.startswith("result of add: one two xxx")
    assert result.endswith("x…")
    assert len(result) < 200


def test_a_reply_is_shown_with_what_it_took() -> None:
    turn = Turn(0, "tool_calls", Usage(10, 5, 15), 12.5, model="served")
    header, call = shown(Paused("job", "reply", 0, [*PROMPT, CALLING], turn)).splitlines()
    assert header == "── reply 1: tool_calls, served, 10 + 5 tokens, 12.5 ms"
    assert call == '→ add {"a":1,"b":2}'


def test_each_result_is_shown_under_its_call_and_cut() -> None:
    calls = [ToolCall(0, name, "add", '{"a":1}', 2.0, error=error) for name, error in (("a", None), ("b", "schema"))]
    results = [RESULT, {"role": "tool", "tool_call_id": "b", "content": "y" * 2007}]
    text = shown(Paused("job", "result", 0, [*PROMPT, CALLING, *results], calls=calls))
    assert '── result of add {"a":1}, 2.0 ms\n3\n' in text
    assert text.endswith(f"{'y' * 2000}\n… 7 more characters; m shows all of it")
    assert "schema" in text


def test_messages_are_shown_in_full() -> None:
    text = "\n".join(steps.messages([*PROMPT, {**RESULT, "content": "z" * 5000}]))
    assert "── user\n1 + 2?" in text
    assert "z" * 5000 in text


def test_a_call_by_hand_says_so_with_its_error() -> None:
    (fine,) = steps.called("add", Called("job", "3", None, 2.0))
    assert fine == "── result of add, called by hand, 2.0 ms\n3"
    (wrong,) = steps.called("add", Called("job", "no", "schema", 2.0))
    assert wrong.startswith("── result of add, called by hand, 2.0 ms, error: schema\n")


def test_the_end_has_its_failure_and_its_scores() -> None:
    failure = Failure("model", "it is down", "refused")
    rollout = Rollout("r", 3, "row", 0, "policy", PROMPT, "error", 5.0, failure)
    header, *rest = steps.ended(Ended(rollout, [Score("f", 0.5, explanation="so so")]), edited=True)
    assert header.startswith("── row 3 ended: error, ")
    assert header.partition("\n")[0].endswith(", edited by hand")
    assert "model: it is down" in header
    assert "f: 0.5" in rest[0]
    assert "so so" in rest[0]


def test_tools_are_shown_with_their_schemas() -> None:
    described = {"type": "function", "function": {**TOOL["function"], "name": "other", "description": "Does more."}}
    assert list(steps.tools([TOOL, described])) == [
        '── add\n{\n  "type": "object"\n}',
        '── other\nDoes more.\n{\n  "type": "object"\n}',
    ]
