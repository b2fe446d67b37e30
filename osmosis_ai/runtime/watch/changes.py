"""File changes: which count, and what they make stale. Pure functions over paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import or_
from pathlib import Path, PurePosixPath

import pathspec
from msgspec.structs import astuple

from osmosis_ai.records import Record

__all__ = ["GitIgnore", "Stale", "Watched", "classify", "counts", "from_root", "repository_files"]

IGNORED_FOLDERS = {".osmosis", ".git", ".hg", "__pycache__", "node_modules", ".venv", "venv", ".tox"} | {
    ".idea",
    ".vscode",
}
IGNORED_SUFFIXES = (".pyc", ".pyo", ".swp", ".swo", ".swx", ".tmp", ".bak", "~")
NO_RULES = pathspec.GitIgnoreSpec.from_lines([])
IGNORED_NAMES = {"4913", ".DS_Store"}  # the former is the name of vim's test for a writable folder


class Watched(Record, frozen=True):
    """What a repository's results depend on. Paths are relative to the root, with forward slashes.

    `rubric_files` are those that were asked for, whether or not they are there.
    """

    dataset: str
    agent_dir: str | None
    tool_sources: frozenset[str]
    function_sources: frozenset[str]
    rubric_files: frozenset[str] = frozenset()


class Stale(Record, frozen=True):
    """What has to be loaded anew. Whether results depend on it is seen once it is loaded."""

    tools: bool = False
    functions: bool = False
    dataset: bool = False
    everything: bool = False

    def __or__(self, other: Stale) -> Stale:
        return Stale(*map(or_, astuple(self), astuple(other)))

    def __bool__(self) -> bool:
        return any(astuple(self))


def counts(path: str, ignored: GitIgnore) -> bool:
    """True if a change of this file can matter: not of what git ignores, tools write, or editors leave for a moment.

    The path is relative to the repository's root, with forward slashes.
    """
    parts = PurePosixPath(path).parts
    name = parts[-1] if parts else ""
    if IGNORED_FOLDERS & set(parts) or name in IGNORED_NAMES or name.endswith(IGNORED_SUFFIXES):
        return False
    if name.startswith((".#", "#")) or (name.startswith(".") and name != ".env"):
        return False
    # .env is ignored by git in most repositories, and is exactly what a run depends on.
    return name == ".env" or not ignored.ignores(path)


def classify(path: str, watched: Watched) -> Stale:
    """What a change of this file makes stale. The path is relative to the repository's root, with forward slashes."""
    folder = path.partition("/")[0]
    if path.rpartition("/")[2] == ".env" or folder == "configs" or path == "pyproject.toml":
        return Stale(everything=True)
    tools = path in watched.tool_sources or (watched.agent_dir is not None and path.startswith(f"{watched.agent_dir}/"))
    functions = folder in {"reward_fn", "reward_rubric"} or path in watched.function_sources | watched.rubric_files
    return Stale(tools=tools, functions=functions, dataset=path == watched.dataset)


class GitIgnore:
    """The rules of the .gitignore files of a repository, each for its own folder, as they are now."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rules: dict[str, tuple[tuple[int, int], pathspec.GitIgnoreSpec]] = {}

    def ignores(self, path: str) -> bool:
        """True if the rules leave out a file, named relative to the root; those of the folder nearest to it decide."""
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
        seen = (found.st_mtime_ns, found.st_size)
        if self._rules.get(str(folder), (None,))[0] != seen:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            self._rules[str(folder)] = (seen, pathspec.GitIgnoreSpec.from_lines(lines))
        return self._rules[str(folder)][1]


def repository_files(root: Path, folder: str) -> Iterator[str]:
    """The files of a folder of the repository that count, wherever in it they are; the folder needn't exist."""
    ignored = GitIgnore(root)
    for place, folders, files in os.walk(root / folder):
        folders[:] = [name for name in folders if not _is_ignored_folder(Path(place, name))]
        for name in files:
            path = from_root(root, f"{place}{os.sep}{name}")
            if counts(path, ignored):
                yield path


def _is_ignored_folder(folder: Path) -> bool:
    return folder.name in IGNORED_FOLDERS or (folder / "pyvenv.cfg").exists()


def from_root(root: Path, path: str | Path) -> str:
    """A path relative to the repository's root, with forward slashes; it may lead out of it."""
    return Path(os.path.relpath(path, root)).as_posix()
