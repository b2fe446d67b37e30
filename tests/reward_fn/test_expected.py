"""`tools_as_expected`: what a row's `expect` lets pass, and how it explains what it doesn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Osmosis
from osmosis_ai.reward_fn.expected import expects_tools, tools_as_expected
from osmosis_ai.reward_fn.explaining import explanations
from repos import ADDING, write_repo


def conversation(*calls: tuple[str, dict[str, Any]], failing: str = "") -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": json.dumps(arguments)}
        messages.append({"role": "assistant", "tool_calls": [{"id": str(index), "function": function}]})
        text = "Error: no" if name == failing else "fine"
        messages.append({"role": "tool", "tool_call_id": str(index), "content": text})
    return messages


SEARCH, BREAD, MILK = ("search", {"q": "x"}), ("price", {"item": "bread"}), ("price", {"item": "milk", "n": 2})


@pytest.mark.parametrize(
    ("expect", "calls", "explanation"),
    [
        ({"must": ["price"]}, [SEARCH, BREAD], ""),
        ({"must": ["price"]}, [SEARCH], "price was not called"),
        ({"must": ["price", "price"]}, [BREAD], "price was not called, only price {\"item\": \"bread\"}"),
        ({"must": [{"tool": "price", "arguments": {"item": "b*d"}}]}, [MILK, BREAD], ""),
        ({"must": [{"tool": "price", "arguments": {"n": 3}}]}, [MILK],
         'price {"n": 3} was not called, only price {"item": "milk", "n": 2}'),
        ({"must": ["search", "price"], "in_order": True}, [SEARCH, BREAD], ""),
        ({"must": ["search", "price"], "in_order": True}, [BREAD, SEARCH], "price was called out of order"),
        ({"must": ["price"], "may": ["search"]}, [SEARCH, BREAD], ""),
        ({"may": []}, [SEARCH], 'search {"q": "x"} is not among the tools it may call'),
        ({"must_not": [{"tool": "price", "arguments": {"item": "milk"}}]}, [BREAD, MILK],
         'price {"item": "milk", "n": 2} must not be called'),
        ({"max_calls": 1}, [BREAD, MILK], "2 calls, at most 1 expected"),
        ({"no_errors": True}, [BREAD], ""),
        ({"no_errors": True}, [SEARCH], 'search {"q": "x"} failed'),
        ('{"max_calls": 0}', [BREAD], "1 calls, at most 0 expected"),
        (None, [BREAD], ""),
    ],
)  # fmt: skip
def test_calls(expect: Any, calls: list[Any], explanation: str) -> None:
    with explanations() as found:
        score = tools_as_expected(conversation(*calls, failing="search"), None, {"expect": expect})
    assert score == (0.0 if explanation else 1.0)
    assert found == ([] if expect is None else [explanation or "the tool calls are as expected"])


def test_arguments_too_deep_for_json_are_arguments_like_any_other_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "price", "arguments": "[" * 100_000}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert tools_as_expected(messages, None, {"expect": {"must": ["price"]}}) == 1.0


@pytest.mark.parametrize(
    ("expect", "problem"),
    [
        ({"must": [], "musts": []}, "unknown key 'musts'; did you mean 'must'"),
        ({"must": "price"}, "expect.must must be a list"),
        ({"must": [{"name": "price"}]}, "expect.must must be a list"),
        ({"in_order": 1}, "expect.in_order must be true or false"),
        ({"max_calls": -1}, "expect.max_calls must be a number"),
    ],
)
def test_what_cannot_be_expected(expect: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        tools_as_expected([], None, {"expect": expect})


@pytest.mark.parametrize("value", ["a greeting", ["price"], {"tone": "polite"}, "{no json", 3])
def test_another_column_of_this_name_is_a_column_like_any_other(value: Any) -> None:
    assert not expects_tools({"expect": value})
    assert tools_as_expected(conversation(BREAD), None, {"expect": value}) == 1.0


def test_rows_that_expect_tools_are_scored_and_explained(osmosis: Osmosis, tmp_path: Path) -> None:
    row = {"system_prompt": "s", "user_prompt": "u", "ground_truth": "3"}
    solution = [{"tool": "add", "arguments": {"a": 1, "b": 2}}, "3"]
    rows = [
        {**row, "solution": solution, "expect": {"must": ["add"], "max_calls": 1}},
        {**row, "solution": solution, "expect": {"must": [{"tool": "add", "arguments": {"a": 5}}]}},
        row,
    ]
    # Tools don't see what is expected of the rollout.
    seen = 'from osmosis_ai import current_rollout\n\n    assert "expect" not in current_rollout().metadata\n    '
    repo = write_repo(tmp_path / "repo", rows=rows, main=ADDING.replace("return a + b", f"{seen}return a + b"))
    done = osmosis("eval", "--model", "offline/oracle", "--json", cwd=repo)
    assert done.code == 0, done.stderr
    runs = [one["runs"][0] for one in done.json["rows"]]
    assert [run["scores"]["tools_as_expected"] for run in runs] == [1.0, 0.0, 1.0]
    explained = runs[1]["explanations"]["tools_as_expected"]
    assert explained == 'add {"a": 5} was not called, only add {"a": 1, "b": 2}'
    assert explained in osmosis("runs", "show", "latest", "--row", "1", cwd=repo).stdout
    alone = osmosis("eval", "--model", "offline/oracle", "--json", "--eval-fn", "tools_as_expected", cwd=repo)
    assert list(alone.json["summary"]["eval_fns"]) == ["tools_as_expected"]
