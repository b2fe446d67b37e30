"""Which files of a repository git leaves out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pathspec

__all__ = ["TOOL_FOLDERS", "GitIgnore", "ignored_files", "is_tool_folder"]

TOOL_FOLDERS = {".osmosis", ".git", ".hg", "__pycache__", "node_modules", ".venv", "venv", ".tox", ".idea", ".vscode"}
"""Folders that tools make, with files that nobody edits."""
NO_RULES = pathspec.GitIgnoreSpec.from_lines([])


class GitIgnore:
    """The current rules of a repository's .gitignore files, each for its own folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rules: dict[str, tuple[tuple[int, int], pathspec.GitIgnoreSpec]] = {}

    def ignores(self, path: str) -> bool:
        """Return True if the rules ignore a file, given relative to the root; the folder nearest to it decides."""
        for folder in PurePosixPath(path).parents:
            decided = self._of(folder).check_file(PurePosixPath(path).relative_to(folder)).include
            if decided is not None:
                return decided
        return False

    def _of(self, folder: PurePosixPath) -> pathspec.GitIgnoreSpec:
        file = self._root / folder / ".gitignore"
        try:
            found = file.stat()
        except OSError:
            return NO_RULES
        # The rules are cached until the file's time or size changes.
        seen = (found.st_mtime_ns, found.st_size)
        if self._rules.get(str(folder), (None,))[0] != seen:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            self._rules[str(folder)] = (seen, pathspec.GitIgnoreSpec.from_lines(lines))
        return self._rules[str(folder)][1]


def ignored_files(root: Path) -> Iterator[str]:
    """Yield the files below a folder that its .gitignore files name, but for those in folders that tools make.

    Paths are relative to the folder, with forward slashes.
    """
    rules = GitIgnore(root)
    for place, folders, files in os.walk(root):
        # In place, so that os.walk doesn't enter them.
        folders[:] = [name for name in folders if not is_tool_folder(Path(place, name))]
        for path in (Path(place, name).relative_to(root).as_posix() for name in files):
            if rules.ignores(path):
                yield path


def is_tool_folder(folder: Path) -> bool:
    """Return True for a folder that tools make."""
    # A virtual environment may have any name.
    return folder.name in TOOL_FOLDERS or (folder / "pyvenv.cfg").exists()
