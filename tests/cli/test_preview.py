"""`osmosis preview`: rubric files and datasets, shown as Osmosis reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Osmosis
from repos import write_repo

KEY = "sk-preview-0123456789"
CONFIG = f"""\
version: 1
default_score_max: 5
rubrics:
  - id: a
    rubric: Ist es höflich?
    model_info: {{provider: openai, model: m, api_key: {KEY}}}
  - id: b
    rubric: r
    model_info: {{provider: openai, model: m}}
"""


def shown(stdout: str) -> tuple[str, list[dict[str, Any]]]:
    """The summary, and the entries below it."""
    summary, _, rest = stdout.partition("\n")
    decoder, entries = json.JSONDecoder(), []
    while rest := rest.strip():
        entry, end = decoder.raw_decode(rest)
        entries.append(entry)
        rest = rest[end:]
    return summary, entries


def test_a_rubric_file(osmosis: Osmosis, tmp_path: Path) -> None:
    (tmp_path / "rubrics.yaml").write_text(CONFIG, encoding="utf-8")
    done = osmosis("preview", "--path", "rubrics.yaml")
    assert (done.code, done.stderr) == (0, "")
    summary, entries = shown(done.stdout)
    assert summary == "Loaded 2 rubrics from rubrics.yaml"
    assert [entry["id"] for entry in entries] == ["a", "b"]
    assert (entries[0]["score_min"], entries[0]["score_max"]) == (0.0, 5.0)
    assert entries[0]["rubric"] == "Ist es höflich?"
    assert KEY not in done.stdout


def test_records_and_rows(osmosis: Osmosis, tmp_path: Path) -> None:
    records = [{"solution_str": "x", "conversation_id": "c"}, {"solution_str": "y", "extra": [1]}]
    (tmp_path / "records.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    done = osmosis("preview", "--path", "records.jsonl")
    assert done.code == 0
    assert shown(done.stdout) == ("Loaded 2 records from records.jsonl", records)
    repo = write_repo(tmp_path / "repo")
    done = osmosis("preview", "--path", "test_data.jsonl", "--limit", "2", cwd=repo)
    summary, entries = shown(done.stdout)
    assert summary == "Loaded 3 rows from test_data.jsonl"
    assert [entry["user_prompt"] for entry in entries] == ["What is 1 + 2?", "What is 3 + 4?"]
    (tmp_path / "one.csv").write_text("system_prompt,user_prompt,kind\ns,u,k\n", encoding="utf-8")
    summary, entries = shown(osmosis("preview", "--path", "one.csv").stdout)
    assert summary == "Loaded 1 row from one.csv"
    assert entries[0]["extra"] == {"kind": "k"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "missing.yaml: no such file"),
        ("missing.jsonl", None, "missing.jsonl: no such file"),
        ("a.yaml", "version: 3\nrubrics: []\n", "a.yaml: version 3 is unknown"),
        ("a.yml", "a: &a [*a]\n", "contains itself"),
        ("a.jsonl", '{"solution_str": " "}\n', "a.jsonl, line 1: column solution_str: only whitespace"),
        ("a.jsonl", '{"user_prompt": "u"}\n', "column system_prompt is missing"),
        ("a.jsonl", "", "the file is empty"),
        ("a.toml", "a = 1\n", "unknown suffix '.toml'. A rubric file is .yaml or .yml, a dataset one of"),
    ],
)
def test_an_invalid_file_is_an_error(
    name: str, content: str | None, message: str, osmosis: Osmosis, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    done = osmosis("preview", "--path", name)
    assert (done.code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_file_is_named_once(osmosis: Osmosis, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'system_prompt': 's', 'user_prompt': 'u'})}\n")
    given = osmosis("preview", "rows.jsonl", cwd=tmp_path)
    assert (given.code, given.stdout) == (0, osmosis("preview", "--path", "rows.jsonl", cwd=tmp_path).stdout)
    for arguments in ([], ["rows.jsonl", "--path", "rows.jsonl"]):
        refused = osmosis("preview", *arguments, cwd=tmp_path)
        assert (refused.code, refused.stdout) == (2, "")
        assert "name one file: osmosis preview FILE" in refused.stderr


def test_many_entries_and_long_values_are_cut_unless_all_is_wanted(osmosis: Osmosis, tmp_path: Path) -> None:
    row = {"system_prompt": "s", "user_prompt": "u" * 5000, "deep": {"list": ["v" * 5000]}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 30, encoding="utf-8")
    done = osmosis("preview", "rows.jsonl")
    summary, entries = shown(done.stdout)
    assert (summary, len(entries)) == ("Loaded 30 rows from rows.jsonl", 20)
    assert entries[0]["user_prompt"] == "u" * 1000 + "… (5,000 characters; --full shows all)"
    assert entries[0]["extra"]["deep"]["list"][0].startswith("v" * 1000 + "… (5,000")
    assert done.stderr == "… and 10 more; --limit N shows more of them, --full all\n"
    assert len(shown(osmosis("preview", "rows.jsonl", "--limit", "25").stdout)[1]) == 25
    whole = osmosis("preview", "rows.jsonl", "--full")
    assert whole.stderr == ""
    assert [entry["user_prompt"] for entry in shown(whole.stdout)[1]] == ["u" * 5000] * 30
