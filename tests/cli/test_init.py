"""`osmosis init`: the new repository validates, runs and scores offline without changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from commands import Osmosis

IDENTITY = {
    f"GIT_{role}_{what}": "someone@example.com" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


@pytest.fixture
def repo(osmosis: Osmosis, tmp_path: Path) -> Path:
    done = osmosis("init", "My repo!")
    assert done.code == 0, done.stderr
    return tmp_path / "My repo!"


def test_everything_a_repository_needs_is_there(osmosis: Osmosis, tmp_path: Path) -> None:
    done = osmosis("init", "new")
    written = sorted(done.stdout.splitlines())
    assert written == sorted(
        str(path.relative_to(tmp_path)) for path in (tmp_path / "new").rglob("*") if path.is_file()
    )
    for name in (
        "mcp/main.py",
        "reward_fn/compute_reward.py",
        "reward_rubric/reward_rubric_openai.py",
        "test_data.jsonl",
        "pyproject.toml",
        ".gitignore",
        ".github/workflows/evaluate.yml",
        ".github/workflows/validate.yml",
    ):
        assert f"new/{name}" in written
    for command in ("cd new", "osmosis validate", "osmosis test", "osmosis eval"):
        assert command in done.stderr


def test_it_validates_tests_and_evaluates(osmosis: Osmosis, repo: Path) -> None:
    validated = osmosis("validate", "--json", cwd=repo)
    assert validated.code == 0
    # All that is missing is what only its owner can give: a place in git and a key for the judge.
    assert {one["code"] for one in validated.json["findings"]} == {"OSM209", "OSM601"}

    tested = osmosis("test", "--json", cwd=repo)
    assert tested.code == 0, tested.stderr
    assert tested.json["summary"]["passed"] == 8

    evaluated = osmosis("eval", "--json", "--fail-under", "0.9", cwd=repo)
    assert evaluated.code == 0, evaluated.stderr


def test_once_committed_it_is_clean_even_strictly(osmosis: Osmosis, repo: Path) -> None:
    for command in (("init",), ("add", "--all"), ("commit", "-m", "Start")):
        subprocess.run(["git", *command], cwd=repo, env={**os.environ, **IDENTITY}, check=True, capture_output=True)
    done = osmosis("validate", "--strict", cwd=repo, env={"OPENAI_API_KEY": "a-key-for-the-judge"})
    assert (done.code, done.stdout.splitlines()[-1]) == (0, "no problems found")
    # Running leaves nothing behind that would have to be committed.
    assert osmosis("test", cwd=repo).code == 0
    assert osmosis("validate", "--strict", cwd=repo, env={"OPENAI_API_KEY": "a-key-for-the-judge"}).code == 0


def test_the_server_serves(repo: Path) -> None:
    done = subprocess.run(
        [sys.executable, "mcp/main.py"],
        cwd=repo,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_workflow_validates(repo: Path) -> None:
    workflow = yaml.safe_load((repo / ".github" / "workflows" / "validate.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["validate"]["steps"]
    assert {"run": "osmosis validate --format github"} in steps
    assert 'name = "my-repo"' in (repo / "pyproject.toml").read_text(encoding="utf-8")


def test_nothing_is_overwritten(osmosis: Osmosis, tmp_path: Path) -> None:
    (tmp_path / "old" / "mcp").mkdir(parents=True)
    (tmp_path / "old" / "mcp" / "main.py").write_text("mine", encoding="utf-8")
    done = osmosis("init", "old")
    assert done.code == 2
    assert "already has mcp/main.py" in done.stderr
    assert [path.name for path in (tmp_path / "old").rglob("*") if path.is_file()] == ["main.py"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert osmosis("init", "file").code == 2
    assert osmosis("init", "file/inner").code == 2


def test_a_folder_with_other_files_is_filled(osmosis: Osmosis, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    done = osmosis("init", ".")
    assert done.code == 0, done.stderr
    assert (tmp_path / "mcp" / "main.py").is_file()
    assert "cd " not in done.stderr
