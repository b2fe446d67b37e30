"""Decide which file changes count, and what they make stale."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import or_
from pathlib import Path, PurePosixPath

from msgspec.structs import astuple

from osmosis_ai.git_ignore import TOOL_FOLDERS, GitIgnore, is_tool_folder
from osmosis_ai.records import Record

__all__ = ["Stale", "Watched", "classify", "counts", "from_root", "repository_files"]

IGNORED_SUFFIXES = (".pyc", ".pyo", ".swp", ".swo", ".swx", ".tmp", ".bak", "~")
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
    if TOOL_FOLDERS & set(parts) or name in IGNORED_NAMES or name.endswith(IGNORED_SUFFIXES):
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


def repository_files(root: Path, folder: str) -> Iterator[str]:
    """Yield the files that count, anywhere below a folder of the repository; the folder needn't exist."""
    ignored = GitIgnore(root)
    for place, folders, files in os.walk(root / folder):
        # In place, so that os.walk doesn't enter the ignored ones.
        folders[:] = [name for name in folders if not is_tool_folder(Path(place, name))]
        for name in files:
            path = from_root(root, f"{place}{os.sep}{name}")
            if counts(path, ignored):
                yield path


def from_root(root: Path, path: str | Path) -> str:
    """Return a path relative to the repository's root, with forward slashes; it may lead out of the repository."""
    return Path(os.path.relpath(path, root)).as_posix()
