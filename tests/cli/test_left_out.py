"""Reward files that can't be loaded: refused, or with `--keep-going` left out and listed wherever results are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import osmosis_ai
from commands import Osmosis, documented
from osmosis_ai import RunConfig
from osmosis_ai.errors import FunctionError
from repos import EXACT, write_repo

PARSED = "reward_fn/unparsed.py:1: SyntaxError: invalid syntax"
IMPORTED = "reward_fn/unimported.py:2: ModuleNotFoundError: No module named 'no_such_package'"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Create a repository with one good file of functions and two broken ones."""
    root = write_repo(tmp_path / "repo")
    (root / "reward_fn" / "unparsed.py").write_text("def (\n", encoding="utf-8")
    more = EXACT.replace("def exact", "def other") + EXACT.replace("def exact", "def third")
    (root / "reward_fn" / "unimported.py").write_text(f"\nimport no_such_package\n{more}", encoding="utf-8")
    return root


def test_the_report_and_the_results_list_what_was_left_out(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("test", "--keep-going", "-o", "results.json", cwd=repo)
    assert done.code == 1
    assert "3 of 3 rollouts completed" in done.stdout
    listed = done.stdout.partition("not scored with (--keep-going)\n")[2]
    assert PARSED in listed
    assert listed.count(IMPORTED) == 1
    assert "pip install no_such_package" in listed
    results = documented("test", (repo / "results.json").read_text(encoding="utf-8"))
    assert list(results["summary"]["functions"]) == ["reward_fn.rewards:exact"]
    places = [(left["kind"], left["file"], left["line"]) for left in results["summary"]["not_scored"]]
    assert places == [("load", "reward_fn/unparsed.py", 1), ("load", "reward_fn/unimported.py", 2)]


def test_a_threshold_does_not_hide_a_function_that_is_gone(osmosis: Osmosis, repo: Path) -> None:
    assert osmosis("eval", "--fail-under", "0.5", cwd=repo).code == 2
    assert osmosis("eval", "--fail-under", "0.5", "--keep-going", cwd=repo).code == 1


def test_files_of_functions_that_were_not_asked_for_do_not_matter(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("eval", "--eval-fn", "exact", cwd=repo)
    assert (done.code, "not scored" in done.stdout + done.stderr) == (0, False), done


def test_rescoring_refuses_or_lists_it_too(osmosis: Osmosis, repo: Path) -> None:
    assert osmosis("eval", "--eval-fn", "exact", cwd=repo).code == 0
    refused = osmosis("runs", "rescore", cwd=repo)
    assert (refused.code, refused.stdout) == (2, "")
    assert PARSED in refused.stderr
    done = osmosis("runs", "rescore", "--keep-going", "--json", cwd=repo)
    assert done.code == 1
    left_out = done.json["not_scored"]
    assert [left["file"] for left in left_out] == ["reward_fn/unparsed.py", "reward_fn/unimported.py"]


def test_the_library_raises_the_error_or_reports_the_list(repo: Path) -> None:
    options = {"mcp": "mcp", "dataset": "test_data.jsonl", "model": "offline/oracle"}
    with pytest.raises(FunctionError, match=r"unparsed\.py:1"):
        osmosis_ai.run(RunConfig.of(**options), directory=repo)
    report = osmosis_ai.run(RunConfig.of(**options, keep_going=True), directory=repo)
    assert not report.whole
    assert [failure.file for failure in report.not_scored] == ["reward_fn/unparsed.py", "reward_fn/unimported.py"]


@pytest.mark.skipif(os.getuid() == 0, reason="permissions don't bind this user")
def test_a_file_without_permission(osmosis: Osmosis, tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    (root / "reward_fn" / "rewards.py").chmod(0)
    done = osmosis("test", cwd=root)
    assert done.code == 2
    assert "reward_fn/rewards.py: can't be read: Permission denied" in done.stderr
