"""File changes: which count, and what they make stale. Pure functions over paths and hashes, and one that watches."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import anyio
import pathspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from osmosis_ai.code_hashes import file_hash
from osmosis_ai.records import Record

__all__ = [
    "FileHashes",
    "GitIgnore",
    "Stale",
    "Watched",
    "classify",
    "counts",
    "from_root",
    "repository_files",
    "watch_files",
]

STEP_MS = 10
SETTLE_SECONDS = 0.05
LONGEST_BURST_SECONDS = 1.6
IGNORED_FOLDERS = {
    ".osmosis",
    ".git",
    ".hg",
    "__pycache__",
    "node_modules",
    ".venv",
    "venv",
    ".tox",
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
        return Stale(
            self.tools or other.tools,
            self.functions or other.functions,
            self.dataset or other.dataset,
            self.everything or other.everything,
        )

    def __bool__(self) -> bool:
        return self.tools or self.functions or self.dataset or self.everything


def counts(path: str, ignored: GitIgnore) -> bool:
    """Whether a change of this file can matter: not of what git ignores, tools write, or editors leave for a moment.

    Args:
        path: Relative to the repository's root, with forward slashes.
        ignored: The rules of the .gitignore files.
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
    """What a change of this file makes stale.

    Args:
        path: Relative to the repository's root, with forward slashes.
        watched: What results depend on.
    """
    folder = path.partition("/")[0]
    if path.rpartition("/")[2] == ".env" or folder == "configs":
        return Stale(everything=True)
    tools = path in watched.tool_sources or (watched.agent_dir is not None and path.startswith(f"{watched.agent_dir}/"))
    functions = folder in {"reward_fn", "reward_rubric"} or path in watched.function_sources | watched.rubric_files
    return Stale(tools=tools, functions=functions, dataset=path == watched.dataset)


class GitIgnore:
    """The rules of the .gitignore files of a repository, each for its own folder, as they are now.

    Args:
        root: The repository's root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rules: dict[str, tuple[tuple[int, int], pathspec.GitIgnoreSpec]] = {}

    def ignores(self, path: str) -> bool:
        """Whether the rules leave out a file; those of the folder nearest to it decide.

        Args:
            path: Relative to the root, with forward slashes.
        """
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
    """The files of a folder of the repository that count, wherever in it they are.

    Args:
        root: The repository's root.
        folder: Relative to the root; it needn't exist.
    """
    ignored = GitIgnore(root)
    for place, folders, files in os.walk(root / folder):
        folders[:] = [name for name in folders if not _is_ignored_folder(Path(place, name))]
        for name in files:
            path = from_root(root, f"{place}{os.sep}{name}")
            if counts(path, ignored):
                yield path


def _is_ignored_folder(folder: Path) -> bool:
    return folder.name in IGNORED_FOLDERS or (folder / "pyvenv.cfg").exists()


class FileHashes:
    """What every file held when it was last looked at: a save without a change is none.

    Args:
        root: The repository's root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, str] = {}

    def learn(self, paths: Iterable[str]) -> None:
        """Look at files whose first change is to be told from a save without one."""
        for path in paths:
            self._known.setdefault(path, file_hash(self._root / path))

    def changed(self, paths: Iterable[str]) -> list[str]:
        """Those of these files that hold something else than when they were last looked at.

        A folder stands for the files in it: of one that is renamed nothing else is reported.
        """
        found = []
        candidates = set(paths)
        for path in list(candidates):
            candidates.update(repository_files(self._root, path))
            candidates.update(known for known in self._known if known.startswith(f"{path}/"))
        for path in sorted(candidates):
            now = file_hash(self._root / path)
            if self._known.get(path, "") != now:
                self._known[path] = now
                found.append(path)
        return found


async def watch_files(
    folder: Path,
    root: Path,
    wanted: Callable[[str], bool],
    send: MemoryObjectSendStream[set[str]],
    stop: anyio.Event,
    *,
    recursive: bool = True,
) -> None:
    """Send the paths that change, a few milliseconds later.

    Args:
        folder: What to watch.
        root: The repository's root, that paths are relative to.
        wanted: Whether a path counts.
        send: Takes the paths; it isn't closed.
        stop: Ends it soon after it is set; the thread that waits for changes can't be cancelled.
        recursive: Whether to watch the folders in it too.
    """
    import watchfiles

    def accept(change: watchfiles.Change, path: str) -> bool:
        return wanted(from_root(root, path))

    async for changes in watchfiles.awatch(
        folder, watch_filter=accept, step=STEP_MS, debounce=STEP_MS, stop_event=stop, recursive=recursive
    ):
        await send.send({from_root(root, path) for _, path in changes})


async def settled(changes: MemoryObjectReceiveStream[set[str]]) -> AsyncIterator[set[str]]:
    """Gather changes that follow each other within 50 ms: they are one."""
    async for paths in changes:
        burst = set(paths)
        latest = anyio.current_time() + LONGEST_BURST_SECONDS
        more = True
        while more and anyio.current_time() < latest:
            with anyio.move_on_after(SETTLE_SECONDS) as waiting:
                burst |= await changes.receive()
            more = not waiting.cancelled_caught
        yield burst


def from_root(root: Path, path: str | Path) -> str:
    """A path relative to the repository's root, with forward slashes; it may lead out of it."""
    return Path(os.path.relpath(path, root)).as_posix()
