"""Sandboxes of bubblewrap: what is refused and why, and what a sandbox gets to see."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from osmosis_ai.errors import UsageError
from osmosis_ai.runtime.bubblewrap import environment, find_bwrap, hidden_paths


def write_bwrap(folder: Path, version: str, otherwise: str = "exit 0") -> None:
    program = folder / "bwrap"
    program.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; else {otherwise}; fi\n')
    program.chmod(0o755)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no bubblewrap elsewhere")
@pytest.mark.parametrize(
    ("version", "otherwise", "said"),
    [
        (None, "", "there is no program bwrap; install it (Debian and Ubuntu: apt install bubblewrap"),
        ("bubblewrap 0.6.1", "exit 0", "needs bubblewrap 0.8.0 or later, and .* is bubblewrap 0.6.1; install it"),
        ("", "exit 0", "is of an unknown version"),
        (
            "bubblewrap 0.11.0",
            "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1",
            "can't make a sandbox here: bwrap: setting up uid map: Permission denied\nUnprivileged user namespaces",
        ),
        ("bubblewrap 1.0.0", "exit 3", "can't make a sandbox here: exit code 3"),
    ],
)
def test_a_bubblewrap_that_cannot_be_used_is_refused_with_what_to_do(
    version: str | None, otherwise: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None:
        write_bwrap(tmp_path, version, otherwise)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        find_bwrap()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no bubblewrap elsewhere")
def test_a_bubblewrap_that_works_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bwrap(tmp_path, "bubblewrap 0.8.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_bwrap() == str(tmp_path / "bwrap")


def test_keys_history_runs_and_ground_truths_are_hidden_and_the_rest_is_not(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "repo", tmp_path / "elsewhere"
    for folder in (root / ".git", root / ".osmosis", root / "mcp", root / "runs", elsewhere):
        folder.mkdir(parents=True)
    for file in (".env", ".env.local", "test_data.jsonl", "rows.csv", "notes.txt", "mcp/main.py"):
        (root / file).touch()
    (root / "linked").symlink_to(root / "rows.csv")
    found = hidden_paths(root, [root / "linked", root / "runs", elsewhere, root / "later", root])
    names = [Path(path).relative_to(root.resolve()).as_posix() for path in found]
    assert names == [".env", ".env.local", ".git", ".osmosis", "later", "rows.csv", "runs", "test_data.jsonl"]


def test_a_sandbox_has_the_language_and_paths_of_libraries_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "PATH": "/opt/bin",
        "LC_ALL": "C.UTF-8",
        "HOME": "/home/somebody",
        "OPENAI_API_KEY": "sk-1",
        "OSMOSIS_STORE": "/var/runs",
        "SSH_AUTH_SOCK": "/run/agent",
        "PYTHONPATH": f"/opt/packages:{Path.cwd()}:",
    }
    assert environment(variables) == {
        "PATH": "/opt/bin",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": "/opt/packages",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
    }
