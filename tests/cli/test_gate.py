"""The gate of a merge: comparisons for people and programs, exit codes by significance, and runs that move."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import yaml

from commands import COMMAND, Osmosis, clean_environment, run_osmosis
from repos import write_repo

ROWS = [
    {
        "system_prompt": "Use the tools.",
        "user_prompt": f"What is {number} + 1?",
        "ground_truth": str(number + 1),
        "solution": [{"tool": "add", "arguments": {"a": number, "b": 1}}, "{{result[0]}}"],
    }
    for number in range(8)
]
HOSTILE = "::error::owned | <b>@everyone</b> ]]> \x1b[31m"


class Stored(NamedTuple):
    repo: Path
    base: str
    head: str


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Two runs of a repository: the second one's tool returns something else for most rows."""
    repo = write_repo(tmp_path_factory.mktemp("gate") / "repo", rows=ROWS)
    base = run_osmosis("eval", "--model", "offline/oracle", "--json", cwd=repo)
    assert base.code == 0, base.stderr
    main = repo / "mcp" / "main.py"
    wrong = main.read_text(encoding="utf-8").replace("-> int", "-> str").replace(
        "return a + b",
        f"if a == 7:\n        raise ValueError('no sevens')\n    return str(a + b) if a == 0 else {HOSTILE!r}",
    )  # fmt: skip
    main.write_text(wrong, encoding="utf-8")
    head = run_osmosis("eval", "--model", "offline/oracle", "--json", "--junit", "results.xml", cwd=repo)
    assert head.code == 0, head.stderr
    listed = run_osmosis("runs", "--json", cwd=repo).json["runs"]
    return Stored(repo, listed[1]["id"], listed[0]["id"])


def compare(stored: Stored, *options: str, code: int = 0) -> str:
    done = run_osmosis("runs", "compare", stored.base, stored.head, *options, cwd=stored.repo)
    assert done.code == code, done.stderr
    return done.stdout


def test_exit_codes_follow_significance(stored: Stored) -> None:
    compare(stored)
    for rule in ("worse", "undecided", "any-flip"):
        compare(stored, "--fail-on", rule, code=1)
        done = run_osmosis("runs", "compare", stored.head, stored.base, "--fail-on", rule, cwd=stored.repo)
        assert done.code == 0, done.stderr
        same = run_osmosis("runs", "compare", stored.base, stored.base, "--fail-on", rule, cwd=stored.repo)
        assert same.code == 0, same.stderr


def test_a_comment_shows_the_flipped_rows_and_where_they_part(stored: Stored) -> None:
    comment = compare(stored, "--format", "markdown")
    assert comment.startswith("<!-- osmosis runs compare -->\n### Rollouts: reward\\_fn.rewards:exact is worse\n")
    assert "| worse | 0 / 7 |" in comment
    assert "<summary>7 rows fail now</summary>" in comment
    assert "add returned ::error::owned" in comment
    # What a tool returned is text: no markup, no mention, no further cell.
    assert "<b>" not in comment
    assert "@everyone" not in comment
    rows = [line for line in comment.splitlines() if line.startswith("| 1 ")]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 6


def test_annotations_are_at_the_row_and_obey_nothing(stored: Stored) -> None:
    lines = compare(stored, "--format", "github").splitlines()
    assert lines[0].startswith("::error title=osmosis::reward_fn.rewards:exact is worse: −0.875 on 8 rows")
    assert len(lines) == 8
    assert all(line.startswith("::error ") for line in lines)
    row = "::error file=test_data.jsonl,line=2,title=osmosis::row 1 fails reward_fn.rewards:exact now: "
    assert lines[1].startswith(row)
    tool = "::error file=mcp/main.py,line=11,title=osmosis::row 7 fails reward_fn.rewards:exact now: "
    assert f"{tool}tool: ValueError: no sevens" in lines


def test_results_for_ci_systems(stored: Stored) -> None:
    compared = ElementTree.fromstring(compare(stored, "--format", "junit"))
    assert (compared.get("tests"), compared.get("failures")) == ("8", "8")
    scores = ElementTree.parse(stored.repo / "results.xml").getroot()
    assert (scores.get("tests"), scores.get("failures"), scores.get("errors")) == ("8", "7", "0")
    case = scores.find("testsuite/testcase[2]")
    assert case is not None
    assert (case.get("classname"), case.get("name")) == ("reward_fn.rewards:exact", "row 1 attempt 0")
    assert json.loads(compare(stored, "--format", "json")) == json.loads(compare(stored, "--json"))


def test_a_run_moves_as_one_file(stored: Stored, osmosis: Osmosis, tmp_path: Path) -> None:
    pushed = osmosis("runs", "push", str(tmp_path / "runs"), stored.base, "--json", cwd=stored.repo)
    assert pushed.code == 0, pushed.stderr
    assert [file.name for file in (tmp_path / "runs").iterdir()] == [f"{stored.base}.osmosis-run"]
    other = write_repo(tmp_path / "other", rows=ROWS)
    assert osmosis("eval", "--model", "offline/oracle", cwd=other).code == 0
    assert osmosis("runs", "pull", str(tmp_path / "runs"), cwd=other).stdout == f"{stored.base}\n"
    again = osmosis("runs", "pull", str(tmp_path / "runs"), "--json", cwd=other)
    assert again.json["new"] is False
    exports = [
        osmosis("runs", "export", stored.base, "--format", "jsonl", cwd=repo).stdout for repo in (stored.repo, other)
    ]
    assert exports[0] == exports[1] != ""
    compared = osmosis("runs", "compare", stored.base, "latest", "--fail-on", "any-flip", "--json", cwd=other)
    assert compared.code == 0, compared.stderr
    assert compared.json["rows"]["shared"] == 8
    assert osmosis("runs", "--json", cwd=other).json["runs"][1]["rollouts"] == 8


def test_what_cannot_be_moved_is_said(stored: Stored, osmosis: Osmosis, tmp_path: Path) -> None:
    nothing = osmosis("runs", "pull", str(tmp_path), cwd=stored.repo)
    assert nothing.code == 2
    assert "there is no pushed run (*.osmosis-run)" in nothing.stderr
    (tmp_path / "x.osmosis-run").write_text("no database, but long enough to be read as one" * 20, encoding="utf-8")
    damaged = osmosis("runs", "pull", str(tmp_path), cwd=stored.repo)
    assert damaged.code == 2, damaged.stderr
    assert "x.osmosis-run" in damaged.stderr


def test_the_workflow_of_init_compares_with_its_base(stored: Stored, osmosis: Osmosis) -> None:
    assert osmosis("init", "new", cwd=stored.repo).code == 0
    workflow = (stored.repo / "new" / ".github" / "workflows" / "evaluate.yml").read_text(encoding="utf-8")
    steps = yaml.safe_load(workflow)["jobs"]["evaluate"]["steps"]
    (script,) = [step["run"] for step in steps if step.get("id") == "compare"]
    assert osmosis("runs", "push", "pushed", stored.base, cwd=stored.repo).code == 0
    summary = stored.repo / "summary.md"
    path = f"{COMMAND.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=stored.repo,
        env=clean_environment(PATH=path, GITHUB_STEP_SUMMARY=str(summary)),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("::error title=osmosis::")
    assert summary.read_text(encoding="utf-8") == (stored.repo / "comment.md").read_text(encoding="utf-8")
    assert "is worse" in summary.read_text(encoding="utf-8")
