"""Reference solutions: their form, their references, and how a dataset reads them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from osmosis_ai.data.dataset import open_dataset
from osmosis_ai.data.solution import fill, fill_text, read_solution
from osmosis_ai.errors import DatasetError
from osmosis_ai.records import SolutionCall

PROMPTS = {"system_prompt": "Be brief.", "user_prompt": "2+2?"}
STEPS = [[{"tool": "add", "arguments": {"a": 2, "b": 2}}, {"tool": "log"}], "{{result[0]}}"]
READ = [[SolutionCall("add", {"a": 2, "b": 2}), SolutionCall("log")], "{{result[0]}}"]


def test_steps() -> None:
    assert read_solution(STEPS) == READ
    assert read_solution([{"tool": "log"}]) == [[SolutionCall("log")]]
    assert read_solution(json.dumps(STEPS)) == READ


@pytest.mark.parametrize("text", ["", "First add 2 and 2.", "[asy] draw(); [/asy]", "\\[ x^2 \\]", "[1, 2]"])
def test_text_that_is_no_solution(text: str) -> None:
    assert read_solution(text) is None


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        ({}, "^a list of steps is expected$"),
        ([], "^a list of steps is expected$"),
        (5, "^a list of steps is expected$"),
        ('[{"tool": ', "^not valid JSON: "),
        ([5], r'^step 0: a tool call \{"tool": "name".* not 5$'),
        (["a", "b"], "^step 0: a text is the answer"),
        ([[]], "^step 0: an empty list"),
        ([{"tool": "a"}, [["b"]]], "^step 1: a tool call"),
        ([{"tool": ""}], "^step 0: `tool` must be the name"),
        ([{"name": "a"}], "^step 0: unknown key 'name'"),
        ([{"tool": "a", "arguments": []}], "^step 0: `arguments` must be an object"),
        ([{"tool": "a", "arguments": {"x": ["{{result[0]}}"]}}], r"\{\{result\[0\]\}\} .* no call comes before it$"),
        ([{"tool": "a"}, "{{result[1]}}"], "^step 1: .* the calls before it have the numbers 0 to 0$"),
        ([{"tool": "a"}, "{{results[0]}}"], r"isn't a reference; write \{\{result\[0\]\}\}"),
        ([{"tool": "a"}, "{{result}}"], "isn't a reference"),
        ([{"tool": "a"}, "{{result[0].}}"], "isn't a reference"),
        ([{"tool": "a"}, "{{result[-1]}}"], "isn't a reference"),
    ],
)
def test_what_is_no_solution(solution: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_solution(solution)


@pytest.mark.parametrize(
    ("argument", "result", "value"),
    [
        ("{{result[0]}}", "42.0", 42),
        ("{{ result[0] }}", "0.5", 0.5),
        ("{{result[0]}}", "true", True),
        ("{{result[0]}}", '{"a": [1.0]}', {"a": [1]}),
        ("{{result[0]}}", "a text", "a text"),
        ("{{result[0]}}", "NaN", "NaN"),
        ("{{result[0]}}", "1e999", "1e999"),
        ("{{result[0]}}", "1e300", 1e300),
        ("{{result[0]}}", [{"type": "text"}], [{"type": "text"}]),
        ("{{result[0].a[-1]['b c']}}", '{"a": [0, {"b c": "x"}]}', "x"),
        ('{{result[0]["a"].b}}', '{"a": {"b": null}}', None),
        (["{{result[0]}}", 1], "2", [2, 1]),
        ({"x": {"y": "{{result[0]}}"}}, "2", {"x": {"y": 2}}),
        ("{{result[0]}} of {{result[0]}}", "42.0", "42 of 42"),
        ("is {{result[0]}}", "1.10", "is 1.10"),
        ("is {{result[0].a}}", '{"a": [1, 2]}', "is [1, 2]"),
        ("{{name}} {x}", "1", "{{name}} {x}"),
        (5, "1", 5),
    ],
)
def test_references(argument: Any, result: object, value: Any) -> None:
    filled = fill(argument, lambda number: result)
    assert filled == value
    assert type(filled) is type(value)


def test_a_text_that_is_one_reference_is_what_the_tool_wrote() -> None:
    assert fill_text("{{result[0]}}", lambda number: "42.0") == "42.0"
    assert fill_text("{{result[0].a}}", lambda number: '{"a": 42.0}') == "42"


@pytest.mark.parametrize("path", [".x", "[0]", "[-3]", ".a.b", ".a[2]", ".a[0][0]"])
def test_a_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(ValueError, match=r'there is no .* in the result: \{"a": \["text", 2\]\}$'):
        fill("{{result[0]" + path + "}}", lambda number: '{"a": ["text", 2]}')


def test_a_result_that_is_missing() -> None:
    with pytest.raises(ValueError, match=r"\{\{result\[7\]\}\}: the conversation has no result of this call"):
        fill("{{result[7]}}", lambda number: None)


def read(path: Path) -> list[tuple[Any, dict[str, Any]]]:
    return [(row.solution, row.extra) for row in open_dataset(path).rows()]


def test_every_format_has_solutions(tmp_path: Path) -> None:
    row = {**PROMPTS, "Solution": STEPS}
    text = {**PROMPTS, "Solution": json.dumps(STEPS)}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (tmp_path / "rows.json").write_text(json.dumps([row]), encoding="utf-8")
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(text))
        writer.writeheader()
        writer.writerow(text)
    pq.write_table(pa.Table.from_pylist([text]), tmp_path / "rows.parquet")
    for path in sorted(tmp_path.glob("rows.*")):
        assert read(path) == [(READ, {})], path.suffix
        summary = open_dataset(path).check()
        assert (summary.with_solution, summary.with_ground_truth, summary.columns[-1]) == (1, 0, "solution")


def test_prose_in_a_column_of_this_name_is_a_column_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**PROMPTS, "solution": value}) + "\n" for value in ("add them", None)))
    assert read(path) == [(None, {"solution": "add them"}), (None, {"solution": None})]


def test_a_solution_that_is_wrong_is_a_problem_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{**PROMPTS, "solution": STEPS}, {**PROMPTS, "solution": [{"tool": "a", "args": {}}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(DatasetError, match=r"line 2: column solution: step 0: unknown key 'args'.*needs another name"):
        open_dataset(path).check()


def test_a_row_that_is_given_a_solution_is_the_row_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    found = []
    for solution in ({}, {"solution": STEPS}, {"solution": ["4"]}):
        path.write_text(json.dumps(PROMPTS | solution) + "\n", encoding="utf-8")
        [row] = open_dataset(path).rows()
        found.append((row.id, open_dataset(path).check().solutions))
    assert len({row_id for row_id, _ in found}) == 1
    # Where a solution is what is run, its hash tells.
    assert len({solutions for _, solutions in found}) == 3
    assert found[0][1] == ""
