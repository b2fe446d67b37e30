"""The code of a run: which repositories are taken, and which are refused before anything of them is written."""

from __future__ import annotations

import os
import resource
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from osmosis_ai.errors import RepositoryError
from osmosis_ai.platform.repositories import MAX_FILES, Checkout, Revision, check_out
from platforms import commit, git, make_workspace


def checked_out(source: Path, tmp_path: Path) -> Checkout:
    return check_out(
        Revision(None, None), [str(source)], tmp_path / "clones" / "w.git", tmp_path / "code", dict(os.environ)
    )


def test_repositories_taken_at_the_same_time_leave_no_limit_behind(tmp_path: Path) -> None:
    """Git may write files of a limited size, which is a limit of this process at the moment it starts git."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folders = [make_workspace(tmp_path / f"workspace{number}") for number in range(4)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda folder: checked_out(folder, tmp_path / f"of-{folder.name}"), folders))
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_submodules_are_left_out_and_named(tmp_path: Path) -> None:
    library = make_workspace(tmp_path / "library")
    folder = make_workspace(tmp_path / "workspace")
    git(folder, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "libs/library")
    commit(folder)
    done = checked_out(folder, tmp_path)
    assert done.left_out == ["libs/library"]
    assert (tmp_path / "code/rollouts/plain/main.py").is_file()
    assert not (tmp_path / "code/libs/library/rollouts").exists()


def tree(folder: Path, lines: str) -> str:
    made = subprocess.run(["git", "mktree"], cwd=folder, input=lines, check=True, capture_output=True, text=True)
    return made.stdout.strip()


def commit_tree(folder: Path, file: Path, width: int, depth: int) -> None:
    """Commit a tree of width ** depth files in a few objects: a file, and trees that hold another one many times."""
    blob = git(folder, "hash-object", "-w", str(file)).strip()
    found = tree(folder, "".join(f"100644 blob {blob}\t{number}\n" for number in range(width)))
    for _ in range(depth - 1):
        found = tree(folder, "".join(f"040000 tree {found}\t{number}\n" for number in range(width)))
    made = git(folder, "commit-tree", found, "-m", "many").strip()
    git(folder, "update-ref", "refs/heads/main", made)


@pytest.mark.parametrize(("width", "depth"), [(500, 2), (60, 6)])
def test_a_repository_of_too_many_files_is_refused_before_they_are_written(
    tmp_path: Path, width: int, depth: int
) -> None:
    assert width**depth > MAX_FILES
    folder = make_workspace(tmp_path / "workspace")
    commit_tree(folder, folder / "rollouts/plain/main.py", width, depth)
    with pytest.raises(RepositoryError, match="more than 200,000 files"):
        checked_out(folder, tmp_path)
    assert not (tmp_path / "code").exists()


def test_a_repository_of_large_files_is_refused_before_they_are_written(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "workspace")
    (tmp_path / "zeros").write_bytes(bytes(3 << 20))
    commit_tree(folder, tmp_path / "zeros", 700, 1)
    with pytest.raises(RepositoryError, match="files are larger than 2,048 MiB"):
        checked_out(folder, tmp_path)
    assert not (tmp_path / "code").exists()
