"""The dataset's checks: unusable rows, and usable ones that shouldn't be there."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from osmosis_ai.validate.findings import Finding
from osmosis_ai.validate.rows import check_dataset, keys_read


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"system_prompt": "Do it.", "user_prompt": f"Question {number}?", "ground_truth": f"{number * 7}", **more}


def check(tmp_path: Path, rows: list[Any], read: frozenset[str] = frozenset()) -> list[Finding]:
    file = tmp_path / "test_data.jsonl"
    lines = [item if isinstance(item, str) else json.dumps(item) for item in rows]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return list(check_dataset(file, "test_data.jsonl", read))


def test_good_rows(tmp_path: Path) -> None:
    assert check(tmp_path, [row(number) for number in range(20)]) == []


def test_every_bad_row_has_its_line_and_column(tmp_path: Path) -> None:
    findings = check(tmp_path, [row(0), "{", row(1, user_prompt=3), "", '["list"]', row(2)])
    assert [(one.code, one.line, one.subject) for one in findings] == [
        ("OSM402", 2, None),
        ("OSM402", 3, "user_prompt"),
        ("OSM402", 5, None),
    ]


SCHEMA = {"item": {"type": "string"}, "amount": {"type": "integer"}, "strict": {"type": "boolean"}}
TOOLS = {"price": SCHEMA, "stock": None}


def expecting(tmp_path: Path, *expects: Any) -> list[Finding]:
    file = tmp_path / "test_data.jsonl"
    lines = [json.dumps(row(number, expect=expect)) for number, expect in enumerate(expects)]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [one for one in check_dataset(file, "test_data.jsonl", frozenset(), TOOLS) if one.code != "OSM409"]


@pytest.mark.parametrize(
    ("expect", "code", "message"),
    [
        ({"must": ["prise"]}, "OSM413", "expect.must: there is no tool 'prise'; did you mean 'price'?"),
        ({"must_not": [{"tool": "rm"}]}, "OSM413", "expect.must_not: there is no tool 'rm'; there are price, stock"),
        ({"must": "price"}, "OSM412", "expect.must must be a list of tools"),
        ({"must": [], "maxcalls": 2}, "OSM412", "unknown key 'maxcalls'; did you mean 'max_calls'?"),
        ({"must_no": ["price"]}, "OSM412", "unknown key 'must_no'; did you mean 'must_not'?"),
        ('{"must": ["price"}', "OSM412", "the column expect isn't JSON"),
        ({"must": ["price"], "must_not": ["price"]}, "OSM414", "price must be called and must not"),
        ({"may": ["price"], "must_not": ["price"]}, "OSM414", "price may be called and must not"),
        ({"must": ["price", "stock"], "max_calls": 1}, "OSM414", "2 calls must be made, but at most 1 may"),
        (
            {"must": [{"tool": "price", "arguments": {"itme": "bread"}}]},
            "OSM414",
            "expect.must: price has no parameter 'itme'; did you mean 'item'?",
        ),
        (
            {"must": [{"tool": "price", "arguments": {"amount": "1*"}}]},
            "OSM414",
            "expect.must: price: amount is of type integer, which never matches '1*'",
        ),
        ({"must": [{"tool": "price", "arguments": {"item": 3}}]}, "OSM414", "item is of type string"),
        ({"must": [{"tool": "price", "arguments": "bread"}]}, "OSM414", "no call has such arguments"),
    ],
)
def test_expectations_that_can_not_be_met(tmp_path: Path, expect: Any, code: str, message: str) -> None:
    (found,) = expecting(tmp_path, {"must": ["price"]}, expect)
    assert (found.code, found.line, found.subject) == (code, 2, "expect")
    assert found.message.startswith("row 1: ")
    assert message in found.message


def test_expectations_that_can_be_met(tmp_path: Path) -> None:
    patterns = {"item": "bread*", "amount": "*", "strict": True}
    good = [
        {"must": ["price", {"tool": "price", "arguments": patterns}], "may": ["stock"], "max_calls": 2},
        {"must": ["price"], "must_not": [{"tool": "price", "arguments": {"item": "gold"}}]},
        {"must": [{"tool": "stock", "arguments": {"anything": 1}}], "in_order": True, "no_errors": True},
        {"must": [{"tool": "price", "arguments": {"amount": 2.0}}]},
        json.dumps({"must": ["price"]}),
        None,
    ]
    assert expecting(tmp_path, *good) == []
    # Another column of that name is a column like any other.
    assert [one.code for one in expecting(tmp_path, "a smile", "a frown")] == ["OSM407"]


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    findings = check(tmp_path, ["{"] * 100)
    assert len(findings) == 21
    assert findings[-1].message == "80 further rows can't be used"


def test_rows_that_are_equal_and_rows_that_contradict(tmp_path: Path) -> None:
    findings = check(tmp_path, [row(0), "", row(1), row(0), row(1, ground_truth="other")])
    assert [(one.code, one.line) for one in findings] == [("OSM403", 4), ("OSM404", 5)]
    assert findings[0].message.startswith("row 2: ")


def test_ground_truths_that_are_empty_or_missing(tmp_path: Path) -> None:
    bare = {"system_prompt": "Do it.", "user_prompt": "Well?"}
    findings = check(tmp_path, [row(0), row(1, ground_truth=" "), bare])
    assert [(one.code, one.line, one.subject) for one in findings] == [
        ("OSM405", 2, "ground_truth"),
        ("OSM405", 3, "ground_truth"),
    ]
    # Rows that never have one are meant to be so.
    assert check(tmp_path, [bare, {**bare, "user_prompt": "And?"}]) == []


@pytest.mark.parametrize(
    ("prompt", "truth", "leaks"),
    [
        ("What is 5 * 1?", "5", False),
        ("What is 5 * 1? (Answer: 5)", "5", True),
        ("The correct answer is Paris. What is the capital?", "Paris", True),
        ("Is it Paris or London?", "Paris", False),
        ("Classify as positive or negative: great!", "positive", False),
        ("Read: the quick brown fox jumps. What happened?", "the quick brown fox", True),
        ("Solve it. #### 12", "12", True),
        ("The answer is 12 or more.", "1", False),
    ],
)
def test_leaks(tmp_path: Path, prompt: str, truth: str, leaks: bool) -> None:
    findings = check(tmp_path, [row(0, user_prompt=prompt, ground_truth=truth)])
    assert [one.code for one in findings] == (["OSM406"] if leaks else [])


def test_columns(tmp_path: Path) -> None:
    rows = [row(0, kind="a", level=1), row(1, kind="b", level="hard"), row(2, kind=None, level=2.5)]
    findings = check(tmp_path, rows, frozenset({"level"}))
    assert [(one.code, one.subject) for one in findings] == [("OSM407", "kind"), ("OSM409", "level")]
    assert "numbers, strings" in findings[1].message


def test_keys_that_code_reads(tmp_path: Path) -> None:
    (tmp_path / "reward_fn").mkdir()
    text = (
        "def f(solution_str, ground_truth, extra_info, **kwargs):\n    return extra_info['kind'], kwargs.get('level')\n"
    )
    (tmp_path / "reward_fn" / "a.py").write_text(text, encoding="utf-8")
    assert {"kind", "level"} <= keys_read(tmp_path)


def test_rows_that_are_much_longer(tmp_path: Path) -> None:
    findings = check(tmp_path, [row(0), row(1, user_prompt="word " * 4000), row(2)])
    assert [(one.code, one.line) for one in findings] == [("OSM408", 2)]
    assert "about 5,001 tokens" in findings[0].message


def test_a_line_of_ten_megabytes_is_a_finding_in_bounded_memory(tmp_path: Path) -> None:
    rows = [row(0), row(1, user_prompt="x" * 10_000_000), row(2)]
    tracemalloc.start()
    try:
        findings = check(tmp_path, rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(one.code, one.line) for one in findings] == [("OSM408", 2)]
    assert peak < 100_000_000
    assert len(findings[0].message) < 500
    assert [one.code for one in check(tmp_path, rows[1:2])] == ["OSM408"]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xff\xfe{\0", b'{"a": "\xff"}\n', b"\x80"])
def test_files_that_cannot_be_read(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "test_data.jsonl"
    file.write_bytes(data)
    findings = list(check_dataset(file, "test_data.jsonl", frozenset()))
    assert [one.code for one in findings] == ["OSM402"]
    assert str(tmp_path) not in findings[0].message


def test_other_formats_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("system_prompt,user_prompt\nDo it.,\n", encoding="utf-8")
    assert [(one.code, one.line) for one in check_dataset(file, "rows.csv", frozenset())] == [("OSM402", 2)]
    assert [one.code for one in check_dataset(tmp_path / "no.jsonl", "no.jsonl", frozenset())] == ["OSM402"]
