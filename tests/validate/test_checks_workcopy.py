"""Checks of the working copy, with real git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from osmosis_ai.validate.workcopy import check_working_copy


def git(root: Path, *arguments: str) -> None:
    identity = {
        f"GIT_{role}_{what}": "someone@example.com" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    subprocess.run(
        ["git", "-c", "init.defaultBranch=main", *arguments],
        cwd=root,
        env={**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
        check=True,
        capture_output=True,
    )


def codes(root: Path) -> list[tuple[str, str | None]]:
    return [(one.code, one.file) for one in check_working_copy(root)]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A committed repository."""
    root = tmp_path / "repo"
    (root / "mcp").mkdir(parents=True)
    (root / "mcp" / "main.py").write_text("x = 1\n", encoding="utf-8")
    (root / ".gitignore").write_text(".env\n*.pyc\n", encoding="utf-8")
    git(root, "init")
    git(root, "add", "--all")
    git(root, "commit", "-m", "Start")
    return root


def test_everything_committed(repo: Path) -> None:
    assert codes(repo) == []


def test_no_git(tmp_path: Path) -> None:
    assert codes(tmp_path) == [("OSM601", None)]


def test_git_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = list(check_working_copy(tmp_path))
    assert [one.code for one in findings] == ["OSM601"]
    assert "git isn't installed" in findings[0].message


def test_changes_and_new_files(repo: Path) -> None:
    (repo / "mcp" / "main.py").write_text("x = 2\n", encoding="utf-8")
    (repo / "mcp" / "näw one.py").write_text("", encoding="utf-8")
    findings = list(check_working_copy(repo))
    assert [one.code for one in findings] == ["OSM602"]
    assert "2 changes are not committed" in findings[0].message
    assert "mcp/main.py, mcp/näw one.py" in findings[0].message


def test_a_folder_of_a_larger_working_copy(repo: Path) -> None:
    (repo / "elsewhere.txt").write_text("", encoding="utf-8")
    assert codes(repo / "mcp") == []
    (repo / "mcp" / "new.py").write_text("", encoding="utf-8")
    assert codes(repo / "mcp") == [("OSM602", "new.py")]


def test_commits_that_are_not_pushed(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "--bare", "remote.git")
    git(repo, "remote", "add", "origin", str(tmp_path / "remote.git"))
    assert codes(repo) == [("OSM603", None)]
    git(repo, "push", "origin", "HEAD")
    assert codes(repo) == []
    (repo / "mcp" / "main.py").write_text("x = 2\n", encoding="utf-8")
    git(repo, "commit", "--all", "-m", "More")
    assert codes(repo) == [("OSM603", None)]


def test_a_repository_without_commits(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "a.py").write_text("", encoding="utf-8")
    assert codes(tmp_path) == [("OSM602", "a.py")]


def test_large_files(repo: Path) -> None:
    for name, size in (("small.bin", 50_000_000), ("large.bin", 50_000_001), ("huge.bin", 100_000_001)):
        with (repo / name).open("wb") as file:
            file.truncate(size)
    assert [item for item in codes(repo) if item[0] != "OSM602"] == [("OSM605", "huge.bin"), ("OSM604", "large.bin")]


def test_env_files(repo: Path) -> None:
    (repo / ".env").write_text("A=1\n", encoding="utf-8")
    assert codes(repo) == []
    (repo / ".env.local").write_text("A=1\n", encoding="utf-8")
    (repo / ".env.example").write_text("A=\n", encoding="utf-8")
    assert ("OSM607", ".env.local") in codes(repo)
    git(repo, "add", "--all", "--force")
    git(repo, "commit", "-m", "Oops")
    assert codes(repo) == [("OSM606", ".env"), ("OSM606", ".env.local")]


def test_files_that_git_ignores_but_the_repository_needs(repo: Path) -> None:
    (repo / ".gitignore").write_text("tools/\n*.pyc\n", encoding="utf-8")
    (repo / "mcp" / "tools").mkdir()
    (repo / "mcp" / "tools" / "add.py").write_text("", encoding="utf-8")
    (repo / "mcp" / "cached.pyc").write_text("", encoding="utf-8")
    git(repo, "commit", "--all", "-m", "Ignore")
    assert codes(repo) == [("OSM608", "mcp/tools/add.py")]


def test_no_program_named_in_the_repositorys_git_config_is_run(repo: Path) -> None:
    mark = repo.parent / "ran"
    git(repo, "config", "core.fsmonitor", f"touch {mark}; false")
    list(check_working_copy(repo))
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["clean", "process"])
def test_no_program_that_the_repositorys_config_names_is_run(repo: Path, kind: str) -> None:
    (repo / ".gitattributes").write_text("* filter=e\n", encoding="utf-8")
    git(repo, "config", f"filter.e.{kind}", "touch PWNED; cat")
    git(repo, "config", "filter.e.required", "true")
    # Git compares the content of a file whose time differs from the index's.
    os.utime(repo / "mcp" / "main.py", (1, 1))
    assert codes(repo)  # the new .gitattributes
    assert not (repo / "PWNED").exists()
