"""Two conversations are aligned step by step, and texts word by word."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from osmosis_ai.records import Message, Rollout
from osmosis_ai.store.alignment import AlignedStep, align, word_changes


def rollout(*messages: Message) -> Rollout:
    return Rollout("r", 0, "row", 0, "policy", list(messages), "stop", 1.0)


def call(tool: str, arguments: str, id_: str = "c", text: str | None = None) -> Message:
    called = {"id": id_, "type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [called]}


def result(text: str, id_: str = "c") -> Message:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def said(text: str, role: str = "assistant") -> Message:
    return {"role": role, "content": text}


def told(steps: list[AlignedStep]) -> list[tuple[Any, ...]]:
    return [(step.change, *((each.tool or each.text if each else None) for each in (step.a, step.b))) for step in steps]


START = (said("Add.", "system"), said("1 + 2?", "user"))


def test_arguments_are_equal_whatever_their_form() -> None:
    a = rollout(*START, call("add", '{"a": 1, "b": 2}'), result("3"), said("3"))
    b = rollout(*START, call("add", '{"b":2,"a":1}', "other"), result("3", "other"), said("3 "))
    assert {step.change for step in align(a, b)} == {"equal"}


def test_changed_arguments_and_results_are_one_changed_step() -> None:
    a = rollout(*START, call("add", '{"a": 1}'), result("3"), said("3"))
    b = rollout(*START, call("add", '{"a": 2}'), result("4"), said("3"))
    c = rollout(*START, call("add", '{"a": 1}'), result("error"), said("3"))
    for other, result_b in ((b, "4"), (c, "error")):
        steps = align(a, other)
        assert [step.change for step in steps] == ["equal", "equal", "changed", "equal"]
        assert (steps[2].a and steps[2].a.result, steps[2].b and steps[2].b.result) == ("3", result_b)


def test_steps_that_only_one_has_stand_alone() -> None:
    a = rollout(*START, call("add", "{}"), result("3"), said("3"))
    b = rollout(*START, call("look", "{}"), result("?"), call("add", "{}"), result("3"), said("3"))
    assert told(align(a, b))[2:] == [("only_b", None, "look"), ("equal", "add", "add"), ("equal", "3", "3")]
    assert told(align(b, a))[2] == ("only_a", "look", None)


def test_another_tool_is_another_step_and_another_answer_a_changed_one() -> None:
    a = rollout(*START, call("add", "{}"), result("3"), said("It is 3."))
    b = rollout(*START, call("sum", "{}"), result("3"), said("It is 4."))
    assert told(align(a, b))[2:] == [
        ("only_a", "add", None),
        ("only_b", None, "sum"),
        ("changed", "It is 3.", "It is 4."),
    ]


def test_results_belong_to_their_call_also_when_ids_repeat() -> None:
    a = rollout(*START, call("add", "1"), result("one"), call("add", "2"), result("two"), call("add", "3"))
    assert [step.a and step.a.result for step in align(a, a)] == [None, None, "one", "two", None]


def test_arguments_that_aren_t_json_are_compared_as_text() -> None:
    a, b = rollout(call("add", "[" * 100_000)), rollout(call("add", "{broken"))
    assert [step.change for step in align(a, b)] == ["changed"]


def test_words_that_differ_are_marked() -> None:
    assert word_changes('{"a": 17, "b": 25}', '{"a": 17, "b": 52}') == [
        ("equal", '{"a": 17, "b": '),
        ("delete", "25"),
        ("insert", "52"),
        ("equal", "}"),
    ]
    assert word_changes("a " * 5000, "b") == [("delete", "a " * 5000), ("insert", "b")]


@settings(max_examples=100)
@given(st.text("ab (\n", max_size=30), st.text("ab (\n", max_size=30))
def test_the_marked_words_are_both_texts(a: str, b: str) -> None:
    changes = word_changes(a, b)
    assert "".join(text for change, text in changes if change != "insert") == a
    assert "".join(text for change, text in changes if change != "delete") == b
