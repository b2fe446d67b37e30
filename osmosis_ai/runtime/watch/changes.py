"""Decide which file changes count, and what they make stale."""

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
IGNORED_NAMES = {"4913", ".DS_Store"}  # vim creates a file 4913 to test whether the folder is writable


class Watched(Record, frozen=True):
    """The files that results depend on. Paths are relative to the root, with forward slashes.

    `rubric_files` are the requested ones, whether or not they exist.
    """

    dataset: str
    agent_dir: str | None
    tool_sources: frozenset[str]
    function_sources: frozenset[str]
    rubric_files: frozenset[str] = frozenset()


class Stale(Record, frozen=True):
    """The parts to reload. Only reloading shows whether results change."""

    tools: bool = False
    functions: bool = False
    dataset: bool = False
    everything: bool = False

    def __or__(self, other: Stale) -> Stale:
        return Stale(*map(or_, astuple(self), astuple(other)))

    def __bool__(self) -> bool:
        return any(astuple(self))


def counts(path: str, ignored: GitIgnore) -> bool:
    """Return True if a change of this file can matter; not for files that git ignores, or that tools and editors leave.

    The path is relative to the repository's root, with forward slashes.
    """
    parts = PurePosixPath(path).parts
    name = parts[-1] if parts else ""
    if IGNORED_FOLDERS & set(parts) or name in IGNORED_NAMES or name.endswith(IGNORED_SUFFIXES):
        return False
    if name.startswith((".#", "#")) or (name.startswith(".") and name != ".env"):
        return False
    # Most repositories have git ignore .env, yet runs depend on it.
    return name == ".env" or not ignored.ignores(path)


def classify(path: str, watched: Watched) -> Stale:
    """Return what a change of this file makes stale. The path is relative to the root, with forward slashes."""
    folder = path.partition("/")[0]
    if path.rpartition("/")[2] == ".env" or folder == "configs" or path == "pyproject.toml":
        return Stale(everything=True)
    tools = path in watched.tool_sources or (watched.agent_dir is not None and path.startswith(f"{watched.agent_dir}/"))
    functions = folder in {"reward_fn", "reward_rubric"} or path in watched.function_sources | watched.rubric_files
    return Stale(tools=tools, functions=functions, dataset=path == watched.dataset)


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


def repository_files(root: Path, folder: str) -> Iterator[str]:
    """Yield the files that count, anywhere below a folder of the repository; the folder needn't exist."""
    ignored = GitIgnore(root)
    for place, folders, files in os.walk(root / folder):
        # In place, so that os.walk doesn't enter the ignored ones.
        folders[:] = [name for name in folders if not _is_ignored_folder(Path(place, name))]
        for name in files:
            path = from_root(root, f"{place}{os.sep}{name}")
            if counts(path, ignored):
                yield path


def _is_ignored_folder(folder: Path) -> bool:
    # A virtual environment may have any name.
    return folder.name in IGNORED_FOLDERS or (folder / "pyvenv.cfg").exists()


def from_root(root: Path, path: str | Path) -> str:
    """Return a path relative to the repository's root, with forward slashes; it may lead out of the repository."""
    return Path(os.path.relpath(path, root)).as_posix()
