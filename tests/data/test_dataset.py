"""Dataset rows: the four formats, refused input, row ids, and memory."""

from __future__ import annotations

import csv
import datetime
import decimal
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osmosis_ai import config
from osmosis_ai.data.dataset import DatasetSummary, open_dataset
from osmosis_ai.data.formats import FORMATS, suffixes
from osmosis_ai.data.formats.json import JsonWindow
from osmosis_ai.data.formats.source import MAX_ROW_BYTES
from osmosis_ai.errors import DatasetError

SUFFIXES = [one.suffix for one in FORMATS]
GOOD = {"system_prompt": "Be brief.", "user_prompt": "2+2?", "ground_truth": "4"}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else list(GOOD))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]) if rows else list(GOOD)
    pq.write_table(pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in names}), path)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    ".jsonl": write_jsonl,
    ".json": write_json,
    ".csv": write_csv,
    ".parquet": write_parquet,
}


def error_of(path: Path, content: bytes | str, **range_: Any) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError) as caught:
        open_dataset(path).check(**range_)
    return str(caught.value)


# Opening


def test_every_suffix_has_a_writer_here() -> None:
    assert list(WRITERS) == SUFFIXES


def test_the_registry_is_what_is_listed_everywhere() -> None:
    assert suffixes() == ".jsonl, .json, .csv, .parquet"
    assert suffixes(" or ") == ".jsonl, .json, .csv or .parquet"
    # The configuration stands below the formats, so it can't read them.
    assert suffixes(" or ") in Path(config.__file__).read_text(encoding="utf-8")
    document = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text(encoding="utf-8")
    section = document.partition("## Formats")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\.\w+)` \| (.+) \|$", section, re.MULTILINE)
    assert rows == [(one.suffix, one.description) for one in FORMATS]


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.jsonl.gz"])
def test_unknown_suffix_lists_the_four(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"\.jsonl, \.json, \.csv, \.parquet"):
        open_dataset(tmp_path / name)


def test_missing_folder_empty_and_special_files(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "empty.csv").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, message in {
        "none.jsonl": "no such file",
        "folder.jsonl": "a folder",
        "empty.csv": "the file is empty",
        "pipe.jsonl": "not a regular file",
        "nul\0.jsonl": "can't be read",
        "x" * 300 + ".jsonl": "can't be read",
    }.items():
        with pytest.raises(DatasetError, match=message):
            open_dataset(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("\ufeffsystem_prompt,user_prompt\n".encode(encoding))
    with pytest.raises(DatasetError, match="UTF-16"):
        open_dataset(path)


def test_the_suffix_may_be_upper_case(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "ROWS.JSONL", [GOOD])
    assert open_dataset(tmp_path / "ROWS.JSONL").check().count == 1


# Values


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_four_formats_give_equal_rows(tmp_path: Path, suffix: str) -> None:
    rows = [
        GOOD | {"Topic": "été", "note": 'a "quoted"\nline, with \\ and {'},
        GOOD | {"Topic": "]", "note": ""},
        GOOD | {"Topic": "été", "note": 'a "quoted"\nline, with \\ and {'},
    ]
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, rows)
    first, second, third = open_dataset(path).rows()
    assert (first.system_prompt, first.user_prompt, first.ground_truth) == ("Be brief.", "2+2?", "4")
    assert first.extra == {"Topic": "été", "note": 'a "quoted"\nline, with \\ and {'}
    assert second.extra == {"Topic": "]", "note": ""}
    assert [first.index, second.index, third.index] == [0, 1, 2]
    # Stored runs refer to rows by these ids, so they must not change between versions or formats.
    assert [first.id, second.id, third.id] == ["db393777e3a6417b", "4fdb511a33095fab", "da302be863277130"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_column_names_are_case_insensitive(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, [{"System_Prompt": "s", "USER_PROMPT": "u", "Ground_Truth": "g", "Other": "o"}])
    (row,) = open_dataset(path).rows()
    assert (row.system_prompt, row.user_prompt, row.ground_truth, row.extra) == ("s", "u", "g", {"Other": "o"})


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["OTHER", "User_prompt"])
def test_columns_that_differ_in_case_only_collide(tmp_path: Path, suffix: str, name: str) -> None:
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, [GOOD | {"Other": "a", name: "b"}])
    with pytest.raises(DatasetError, match=f"'{name}' have the same name"):
        open_dataset(path).check()


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        (42, "42"),
        (4.5, "4.5"),
        (True, "true"),
        (None, None),
        ("", ""),
        (" 4 ", " 4 "),
        ([1, "a"], '[1,"a"]'),
        ({"b": 1, "a": {"d": None, "c": 2}}, '{"a":{"c":2,"d":null},"b":1}'),
        (123456789012345678901234567890, "123456789012345678901234567890"),
    ],
)
def test_ground_truth_becomes_text(tmp_path: Path, truth: Any, expected: str | None) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [GOOD | {"ground_truth": truth}])
    (row,) = open_dataset(path).rows()
    assert row.ground_truth == expected


def test_ground_truth_absent_or_an_empty_cell_is_none(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"system_prompt": "s", "user_prompt": "u"}])
    (tmp_path / "rows.csv").write_text("system_prompt,user_prompt,Ground_truth,x\ns,u,,\n", encoding="utf-8")
    (row,) = open_dataset(tmp_path / "rows.jsonl").rows()
    assert row.ground_truth is None
    (row,) = open_dataset(tmp_path / "rows.csv").rows()
    assert row.ground_truth is None
    assert row.extra == {"x": ""}


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_values_keep_their_types(tmp_path: Path, suffix: str) -> None:
    extra = {"n": 2**70, "f": 1.0, "b": False, "none": None, "list": [{"deep": [1]}], "text": "\U0001f600\x00"}
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, [GOOD | extra])
    (row,) = open_dataset(path).rows()
    assert row.extra == extra
    assert isinstance(row.extra["f"], float)


def test_parquet_values_become_plain_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=datetime.timezone.utc)
    table = pa.table(
        {
            "system_prompt": pa.array(["s"]).dictionary_encode(),
            "user_prompt": pa.array(["u"], pa.large_string()),
            "ground_truth": pa.array([{"b": 1, "a": [2]}]),
            "date": pa.array([datetime.date(2024, 1, 2)]),
            "moment": pa.array([moment], pa.timestamp("us", "UTC")),
            "nanos": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
            "time": pa.array([datetime.time(1, 2, 3)]),
            "span": pa.array([datetime.timedelta(minutes=90)]),
            "price": pa.array([decimal.Decimal("1234567890123456789.10")]),
            "blob": pa.array([b"\xff\x00"]),
            "nan": pa.array([math.nan]),
            "null": pa.array([None], pa.int64()),
            "big": pa.array([2**63 - 1]),
            "pairs": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "nested": pa.array([[{"when": datetime.date(2024, 1, 2), "nan": math.nan}]]),
        }
    )
    pq.write_table(table, path)
    (row,) = open_dataset(path).rows()
    assert row.ground_truth == '{"a":[2],"b":1}'
    assert row.extra == {
        "date": "2024-01-02",
        "moment": "2024-05-06T07:08:09.000010+00:00",
        "nanos": "2023-11-14T22:13:20.123456",
        "time": "01:02:03",
        "span": "1:30:00",
        "price": "1234567890123456789.10",
        "blob": "/wA=",
        "nan": None,
        "null": None,
        "big": 2**63 - 1,
        "pairs": [["k", 1]],
        "nested": [{"when": "2024-01-02", "nan": None}],
    }
    assert json.loads(json.dumps(row.extra)) == row.extra


def test_parquet_values_without_a_json_form_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table(
        {
            "system_prompt": ["s", "s", "s", "s"],
            "user_prompt": pa.array([b"u", b"u", b"u", b"u"]),
            "score": [1.0, math.inf, 1.0, 1.0],
            # Year 300000, which Python's datetime can't hold.
            "when": pa.array([0, 0, 9_404_000_000_000, 0], pa.timestamp("s")),
        }
    )
    pq.write_table(table, path)
    with pytest.raises(DatasetError) as caught:
        open_dataset(path).check()
    text = str(caught.value)
    assert "4 problems" in text
    assert "row 0 (the first is 0): column user_prompt: bytes, where text is expected" in text
    assert "row 1 (the first is 0): column 'score': an infinite number" in text
    assert "row 2 (the first is 0): column 'when': a value of type timestamp[ms] that can't be read" in text


# Problems


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("", "an empty string"),
        (" \n\t", "only whitespace"),
        (None, "null"),
        (3, r"a number \(3\)"),
        (False, r"a boolean \(false\)"),
        (["x"], "a list"),
        ({"x": 1}, "an object"),
    ],
)
@pytest.mark.parametrize("column", ["system_prompt", "user_prompt"])
def test_prompts_must_be_text(tmp_path: Path, column: str, value: Any, found: str) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [GOOD, GOOD | {column: value}])
    dataset = open_dataset(path)
    with pytest.raises(DatasetError, match=rf"rows\.jsonl, line 2: column {column}: {found}, where text"):
        dataset.check()
    rows = dataset.rows()
    assert next(rows).index == 0
    with pytest.raises(DatasetError, match="line 2"):
        next(rows)
    assert dataset.check(limit=1).count == 1
    assert next(dataset.rows(limit=1)).index == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_column_names_those_found(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, [{"prompt": "x", "user_prompt": "u"}])
    with pytest.raises(DatasetError, match="column system_prompt is missing \\(found: 'prompt', 'user_prompt'\\)"):
        open_dataset(path).check()


def test_ten_problems_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    lines = [json.dumps(GOOD)] + ["{"] * 13 + ["", json.dumps(GOOD)]
    text = error_of(tmp_path / "rows.jsonl", "\n".join(lines))
    assert text.splitlines()[0].endswith("rows.jsonl: 13 problems")
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:11]] == [f"line {n}" for n in range(2, 12)]
    assert text.splitlines()[11:] == ["  and 3 more"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"system_prompt": ', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b"[]", "a list, where an object is expected"),
        (b"null", "null, where an object is expected"),
        (b'"text"', "a string, where an object is expected"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte (byte 0xff). Save it as UTF-8"),
        (b'{"a": [NaN]}', "not valid JSON: NaN is not a JSON value; write null, or leave the column out"),
        (b'{"a": -Infinity}', "not valid JSON: -Infinity is not a JSON value; write null, or leave the column out"),
        pytest.param(b'{"a": ' + b"[" * 100_000, "nested more than", id="unclosed"),
        pytest.param(b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", "nested more than 200 levels deep", id="deep"),
    ],
)
def test_bad_lines_are_named_and_reading_goes_on(tmp_path: Path, line: bytes, message: str) -> None:
    good = json.dumps(GOOD).encode()
    text = error_of(tmp_path / "rows.jsonl", good + b"\n\n  \r\n" + line + b"\r\n" + good + b"\n{}\n")
    assert f"line 4: {message}" in text
    assert "line 6: column system_prompt is missing (found: no column)" in text
    element = error_of(tmp_path / "rows.json", b"[" + good + b",\n" + line + b"\n,{}]")
    assert "line 2, row 1 (the first is 0): " in element


def test_wide_values_are_not_deep_ones(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [GOOD | {"wide": [[]] * 1000, "deep": json.loads("[" * 150 + "]" * 150)}])
    assert open_dataset(tmp_path / "rows.jsonl").check().count == 1


def test_a_byte_order_mark_and_crlf_are_tolerated(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".json", ".csv"):
        path = tmp_path / f"rows{suffix}"
        WRITERS[suffix](path, [GOOD, GOOD])
        expected = list(open_dataset(path).rows())
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
        assert list(open_dataset(path).rows()) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"rows": []}', "an object, where a list of objects is expected (a file with one object per line is called"),
        ('"x"', "a string, where a list"),
        ("17", "a number, where a list"),
        ("null", "null, where a list"),
        ("true", "a boolean, where a list"),
        ("  \n ", "nothing, where a list"),
        ("hello", "text that begins with 'h', where a list"),
        ("[]", "the file has no rows"),
        ("[", "line 1: an object is expected; the file ends"),
        ("[{}\n", "line 2: a comma or ] is expected after row 0; the file ends"),
        ("[{}\n{}]", "line 2: a comma or ] is expected after row 0; found '{'"),
        ("[{},]", "line 1: an object is expected; found ']'"),
        ("[,{}]", "line 1: an object is expected; found ','"),
        ("[{}] x", "there is more text after the end of the list"),
        ('[{"a": "x}]', "line 1, row 0 (the first is 0): the file ends inside a string of this row"),
        ('[{"a": [1, 2}\n', "the file ends inside this row"),
        pytest.param("[" * 100_000, "nested more than 200 levels deep", id="deep"),
    ],
)
def test_what_is_not_a_json_list_of_objects(tmp_path: Path, content: str, message: str) -> None:
    assert message in error_of(tmp_path / "rows.json", content)


def test_the_problem_that_ends_reading_is_always_shown(tmp_path: Path) -> None:
    text = error_of(tmp_path / "rows.json", "[" + "3, " * 12 + "{")
    assert "13 problems" in text
    assert "the file ends inside this row" in text
    assert text.splitlines()[-2:] == ["  and 2 more", "  Reading stopped there; what follows was not checked."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n\n", "the file has no header row"),
        ("system_prompt,user_prompt\n", "the file has no rows"),
        ("s,u\n", "line 1: column system_prompt is missing (found: 's', 'u')"),
        ("system_prompt,user_prompt\na,b\nc\n", "line 3: 1 cell, where the header has 2"),
        ('system_prompt,user_prompt\n"a\n\nb",c\n\nd,e,f\n', "line 6: 3 cells, where the header has 2"),
        ("system_prompt,user_prompt\na,\n", "line 2: column user_prompt: an empty string"),
        ('system_prompt,user_prompt\na,b\n"c,d\n', "line 3: not valid CSV: a quote opened in this row is never closed"),
        ('system_prompt,user_prompt\n"a"b,c\n', "line 2: not valid CSV"),
        (b"system_prompt,user_prompt\na,\xff\n", "line 2: not UTF-8: invalid start byte (byte 0xff). Save it as UTF-8"),
        (b"system_prompt;User_Prompt\na;b\n", "line 1: the cells are separated by semicolons; save it with commas"),
        (b"user_prompt\tsystem_prompt\na\tb\n", "line 1: the cells are separated by tabs; save it with commas"),
        ("system_prompt,user_prompt,x,X\n", "line 1: columns 'x' and 'X' have the same name"),
    ],
)
def test_bad_csv(tmp_path: Path, content: bytes | str, message: str) -> None:
    assert message in error_of(tmp_path / "rows.csv", content)


def test_csv_cells_may_be_long_and_hold_newlines(tmp_path: Path) -> None:
    rows = [GOOD | {"long": "x\n" * 300_000}, GOOD | {"long": "\r\n"}]
    write_csv(tmp_path / "rows.csv", rows)
    assert [row.extra["long"] for row in open_dataset(tmp_path / "rows.csv").rows()] == ["x\n" * 300_000, "\r\n"]


def test_rows_beyond_the_bound_are_problems(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    large = b'{"a": "' + b"x" * MAX_ROW_BYTES + b'"}'
    text = error_of(tmp_path / "rows.jsonl", good + b"\n" + large + b"\nx\n" + good)
    assert "line 2: larger than 64 MiB" in text
    assert "line 3: not valid JSON" in text
    text = error_of(tmp_path / "rows.json", b"[" + good + b"," + large + b"," + good + b",3]")
    assert "row 1 (the first is 0): larger than 64 MiB" in text
    header = b"system_prompt,user_prompt\n"
    unclosed = b'a,"' + (b"x" * 1023 + b"\n") * (MAX_ROW_BYTES // 1024)
    assert "larger than 64 MiB" in error_of(tmp_path / "rows.csv", header + unclosed)


@pytest.mark.parametrize("content", [b"PAR1", b"not parquet at all", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_corrupt_parquet(tmp_path: Path, content: bytes) -> None:
    assert "not a readable parquet file" in error_of(tmp_path / "rows.parquet", content)


def test_truncated_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, [GOOD] * 100)
    assert "not a readable parquet file" in error_of(path, path.read_bytes()[:-20])


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [GOOD] * 3)

    def grow(read: int, total: int) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")

    with pytest.raises(DatasetError, match="changed while it was read"):
        open_dataset(path).check(progress=grow)
    dataset = open_dataset(path)
    path.unlink()
    with pytest.raises(DatasetError, match="can't be read"):
        dataset.check()
    with pytest.raises(DatasetError, match="can't be read"):
        list(dataset.rows())


# Ranges and summaries


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_summary(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, [GOOD | {"Topic": "a"}] * 7)
    seen: list[tuple[int, int]] = []
    summary = open_dataset(path).check(offset=2, limit=3, progress=lambda read, total: seen.append((read, total)))
    assert summary == DatasetSummary(
        count=3,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        columns=("system_prompt", "user_prompt", "ground_truth", "Topic"),
        with_ground_truth=3,
    )
    size = path.stat().st_size
    assert seen[-1] == (size, size)
    assert all(0 < read <= total == size for read, total in seen)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_row_in_the_range(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, [GOOD] * 3)
    with pytest.raises(DatasetError, match="no row is left after offset 3; the file has 3 rows"):
        open_dataset(path).check(offset=3)
    with pytest.raises(DatasetError, match="a limit of 0 leaves none of its 3 rows"):
        open_dataset(path).check(limit=0)
    assert list(open_dataset(path).rows(offset=5)) == []
    for wrong in ({"offset": -1}, {"limit": -1}):
        with pytest.raises(ValueError, match="negative"):
            open_dataset(path).rows(**wrong)
        with pytest.raises(ValueError, match="negative"):
            open_dataset(path).check(**wrong)


def test_problems_outside_the_range_do_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("broken\n" + json.dumps(GOOD) + "\n\nbroken\n", encoding="utf-8")
    dataset = open_dataset(path)
    assert dataset.check(offset=1, limit=1).count == 1
    assert [row.index for row in dataset.rows(offset=1, limit=1)] == [1]
    with pytest.raises(DatasetError, match="line 4"):
        dataset.check(offset=1)


def test_ids_survive_moves_and_key_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [GOOD | {"n": n % 3, "deep": {"a": 1, "b": [n % 3]}} for n in range(6)]
    write_jsonl(path, rows)
    ids = [row.id for row in open_dataset(path).rows()]
    assert len(set(ids)) == 6
    assert all(len(id_) == 16 and int(id_, 16) >= 0 for id_ in ids)
    moved = [{"deep": {"b": row["deep"]["b"], "a": 1}, "n": row["n"]} | GOOD for row in rows[::-1]]
    write_jsonl(path, [GOOD | {"new": 1}, *moved])
    assert {row.id for row in open_dataset(path).rows(offset=1)} == set(ids)


def test_many_rows_keep_distinct_ids(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [GOOD | {"n": n // 2} for n in range(5000)])
    ids = [row.id for row in open_dataset(path).rows()]
    assert len(set(ids)) == 5000
    assert [row.id for row in open_dataset(path).rows(offset=4321)] == ids[4321:]


# Properties

# csv.reader refuses NUL before Python 3.11.
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)
prompts = texts.filter(str.strip)
text_rows = st.lists(
    st.fixed_dictionaries(
        {"system_prompt": prompts, "User_Prompt": prompts, "ground_truth": texts.filter(bool), "a,b": texts}
    ),
    min_size=1,
    max_size=12,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
extras = st.dictionaries(texts.map("x".__add__), json_values, max_size=4).filter(
    lambda extra: len({name.casefold() for name in extra}) == len(extra)
)


@settings(max_examples=60, deadline=None)
@given(rows=text_rows, offset=st.integers(0, 14), limit=st.none() | st.integers(0, 14))
def test_all_formats_agree_and_ranges_are_slices(rows: list[dict[str, str]], offset: int, limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for suffix, write in WRITERS.items():
            path = Path(folder) / f"rows{suffix}"
            write(path, rows)
            dataset = open_dataset(path)
            got = list(dataset.rows())
            found.append(got)
            assert list(dataset.rows(offset=offset, limit=limit)) == list(
                islice(got, offset, None if limit is None else offset + limit)
            )
    assert all(got == found[0] for got in found)
    assert [row.index for row in found[0]] == list(range(len(rows)))
    assert len({row.id for row in found[0]}) == len(rows)
    assert [
        {
            "system_prompt": row.system_prompt,
            "User_Prompt": row.user_prompt,
            "ground_truth": row.ground_truth,
            **row.extra,
        }
        for row in found[0]
    ] == rows


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(extras, min_size=1, max_size=6))
def test_any_json_survives(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".jsonl", ".json"):
            path = Path(folder) / f"rows{suffix}"
            WRITERS[suffix](path, [row | GOOD for row in rows])
            assert [row.extra for row in open_dataset(path).rows()] == rows


# Bytes that look like rows reach further than random ones.
text_pieces = [b"system_prompt,user_prompt\n", b"s,u\n", json.dumps(GOOD).encode(), b'{"a":', b"3", b"null", b"PAR1"]
marks = [b"[", b"]", b"{", b"}", b",", b'"', b"\\", b"\n", b"\r", b" ", b"\xff", b"\xef\xbb\xbf"]
pieces = st.sampled_from([*text_pieces, *marks])


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=200) | st.lists(pieces, max_size=25).map(b"".join), suffix=st.sampled_from(SUFFIXES))
def test_any_bytes_give_rows_or_a_dataset_error(content: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows{suffix}"
        path.write_bytes(content)
        try:
            dataset = open_dataset(path)
            summary = dataset.check()
        except DatasetError:
            return
        assert len(list(dataset.rows())) == summary.count > 0


def test_damaged_parquet_gives_rows_or_a_dataset_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, [GOOD | {"n": str(n)} for n in range(50)])
    whole = path.read_bytes()
    refused = 0
    for seed in range(150):
        damage = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(damage.randint(1, 4)):
            damaged[damage.randrange(len(damaged))] = damage.randrange(256)
        path.write_bytes(damaged)
        try:
            open_dataset(path).check()
        except DatasetError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_elements_across_any_chunk_boundary(tmp_path: Path, chunk: int) -> None:
    rows = [GOOD | {"x": '\\"]}{[,' * n, "y": [{}, [n, "é\\"], {"z": "\\\\"}]} for n in range(12)]
    path = tmp_path / "rows.json"
    write_json(path, rows)
    with path.open("rb") as file:
        window = JsonWindow(_Dribble(file, chunk))  # type: ignore[arg-type]
        assert window.peek() == b"["
        window.take(1)
        got = []
        while window.peek() != b"]":
            got.append(json.loads(window.element("here")))
            if window.peek() == b",":
                window.take(1)
    assert got == rows


class _Dribble:
    """A file that returns a few bytes per read, as a pipe would."""

    def __init__(self, file: Any, most: int) -> None:
        self.file = file
        self.most = most

    def read(self, size: int) -> Any:
        return self.file.read(min(size, self.most))


# Memory

# Not getrusage: its maximum begins with the parent's at the time of the fork.
MEASURE = """
import re, sys
from pathlib import Path
from osmosis_ai.data.dataset import open_dataset
if sys.argv[1].endswith(".parquet"):
    import pyarrow, pyarrow.parquet
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024
before = peak()
count = open_dataset(Path(sys.argv[1])).check().count
print(count, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_stays_flat(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    size = 96 * 1024 * 1024
    text = random.Random(1).randbytes(2500).hex()
    count = size // 5000
    row = GOOD | {"text": text}
    if suffix == ".parquet":
        # Different texts in one row group, so that neither a dictionary nor small groups help.
        generator = random.Random(2)
        texts_ = pa.array([generator.randbytes(2500).hex() for _ in range(count)])
        columns = {name: pa.array([value] * count) for name, value in GOOD.items()}
        pq.write_table(pa.table(columns | {"text": texts_}), path, compression="none", row_group_size=count)
    else:
        with path.open("w", encoding="utf-8") as file:
            if suffix == ".csv":
                file.write(",".join(row) + "\n")
                line = ",".join(row.values()) + "\n"
            else:
                line = json.dumps(row) + (",\n" if suffix == ".json" else "\n")
            if suffix == ".json":
                file.write("[")
            for _ in range(count - 1):
                file.write(line)
            file.write(line.rstrip("\n,") + ("]" if suffix == ".json" else ""))
    assert path.stat().st_size > 0.95 * size
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True, encoding="utf-8"
    ).stdout
    rows, grown = map(int, output.split())
    assert rows == count
    # pyarrow's allocator keeps some 40 MiB, whatever the file's size.
    assert grown < (64 if suffix == ".parquet" else 16), (
        f"peak memory grew by {grown} MiB while reading a file of {size // 1024**2} MiB"
    )
