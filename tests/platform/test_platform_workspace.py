"""How a workspace is named to platforms, and what of its origin they learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from osmosis_ai.platform.workspace import REQUIRED, find_workspace, git_notes
from platforms import commit, git, make_workspace


@pytest.mark.parametrize(
    ("origin", "identity", "remote"),
    [
        ("https://github.com/Acme/Rollouts.git", "acme/rollouts", "https://github.com/Acme/Rollouts.git"),
        ("git@github.com:acme/rollouts.git", "acme/rollouts", "git@github.com:acme/rollouts.git"),
        ("ssh://git@github.com/acme/rollouts", "acme/rollouts", "ssh://git@github.com/acme/rollouts"),
        ("https://ada:secret@github.com/acme/rollouts", "acme/rollouts", "https://github.com/acme/rollouts"),
        (
            "https://git.example/team/sub/rollouts",
            "git.example/team-sub-rollouts",
            "https://git.example/team/sub/rollouts",
        ),
        ("/srv/git/rollouts.git", None, None),
        (None, None, None),
    ],
)
def test_a_workspace_has_the_name_of_its_origin(
    tmp_path: Path, origin: str | None, identity: str | None, remote: str | None
) -> None:
    folder = make_workspace(tmp_path / "work")
    if origin is not None:
        git(folder, "remote", "add", "origin", origin)
    found = find_workspace(folder / "rollouts" / "plain")
    assert found.remote == remote
    assert found.identity == identity or (identity is None and found.identity.startswith("local/work-"))


def test_changes_that_a_run_will_not_include_are_noted(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "work")
    git(folder, "remote", "add", "origin", "https://github.com/acme/rollouts")
    (folder / "new").touch()
    notes = " ".join(git_notes(find_workspace(folder), pinned=False))
    assert "uncommitted changes" in notes
    assert "no upstream" in notes
    assert "default branch" in notes
    commit(folder)
    git(folder, "remote", "remove", "origin")
    assert git_notes(find_workspace(folder), pinned=True) == []
    assert REQUIRED == ("rollouts", "configs/training", "configs/eval", "data")
