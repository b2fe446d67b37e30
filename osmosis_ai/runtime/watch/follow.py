"""Follow the files that results depend on, for a watch session and for a server that reloads."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import ObjectSendStream, TaskStatus

from osmosis_ai.code_hashes import file_hash
from osmosis_ai.git_ignore import GitIgnore
from osmosis_ai.records import Record
from osmosis_ai.runtime.watch.changes import Stale, Watched, classify, counts, from_root, repository_files

__all__ = ["FileHashes", "Follower", "Save", "watch_files"]

QUIET_MS = 50
"""Changes closer together than this, in milliseconds, count as one save."""
LONGEST_BURST_MS = 1600
CLOCK_SECONDS = 0.1
"""A file system's timestamps may lag this many seconds behind the clock."""


class Save(Record, frozen=True):
    """The files with changed content, and the parts to reload because of them."""

    paths: list[str]
    stale: Stale


class Follower:
    """Reports what each save makes stale. It ignores a save that changes no content.

    `watched` returns the files that results are known to depend on at the moment; `outside` maps paths from the root to
    further such files outside the repository.
    """

    def __init__(self, root: Path, watched: Callable[[], Watched], outside: Mapping[str, Path] | None = None) -> None:
        self._root = root
        self._watched = watched
        self._outside = outside or {}
        self._hashes = FileHashes(root)

    def learn(self) -> None:
        """Record the content of every file that results may depend on, to recognize a save without a change."""
        watched = self._watched()
        paths = {watched.dataset, ".env", "pyproject.toml", *watched.rubric_files, *self._outside}
        paths.update(watched.tool_sources, watched.function_sources)
        for folder in ("reward_fn", "reward_rubric", "configs", watched.agent_dir):
            if folder is not None:
                paths.update(repository_files(self._root, folder))
        # In one call: each call takes what was saved since the last one for unknown.
        self._hashes.learn(paths)

    async def follow(
        self,
        send: ObjectSendStream[Save],
        stop: anyio.Event,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Send every save that makes something stale, until shortly after `stop` is set: the watching threads can't be
        cancelled. `task_status` reports the start once no save can be missed.
        """
        ignored = GitIgnore(self._root)

        async def changed(paths: Iterable[str]) -> None:
            watched = self._watched()
            found = {path: classify(path, watched) for path in self._hashes.changed(paths)}
            stale = Stale()
            for part in found.values():
                stale |= part
            if stale:
                await send.send(Save([path for path, part in found.items() if part], stale))

        async with anyio.create_task_group() as group:
            group.start_soon(watch_files, self._root, self._root, lambda path: counts(path, ignored), changed, stop)
            for folder in {file.parent for file in self._outside.values()}:
                group.start_soon(watch_files, folder, self._root, self._outside.__contains__, changed, stop, False)
            # One turn of the loop: each task has created its watcher by the time it first waits.
            await anyio.lowlevel.checkpoint()
            task_status.started()


class FileHashes:
    """The hash of every file's content at the last look, to recognize a save without a change."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, str] = {}
        self._learned = math.inf  # the first `learn` records every file, however recent

    def learn(self, paths: Iterable[str]) -> None:
        """Record the content of files that aren't known yet.

        A file saved since the last call is left out, because its earlier content may have been loaded in between.
        """
        since, self._learned = self._learned, time.time() - CLOCK_SECONDS
        for path in paths:
            if path not in self._known and _saved_at(self._root / path) < since:
                self._known[path] = file_hash(self._root / path)

    def changed(self, paths: Iterable[str]) -> list[str]:
        """Return those of these files that changed since the last look.

        A folder stands for its files: if it is renamed, the watcher reports only the folder.
        """
        found = []
        candidates = set(paths)
        for path in list(candidates):
            candidates.update(repository_files(self._root, path))
            # The files of a folder that is gone.
            candidates.update(known for known in self._known if known.startswith(f"{path}/"))
        for path in sorted(candidates):
            now = file_hash(self._root / path)
            if self._known.get(path, "") != now:
                self._known[path] = now
                found.append(path)
        return found


def _saved_at(file: Path) -> float:
    """Return the modification time in seconds since the epoch; minus infinity if the file doesn't exist."""
    try:
        return file.stat().st_mtime
    except OSError:
        return -math.inf


async def watch_files(
    folder: Path,
    root: Path,
    wanted: Callable[[str], bool],
    changed: Callable[[set[str]], Awaitable[None]],
    stop: anyio.Event,
    recursive: bool = True,
) -> None:
    """Report changed paths, relative to `root`, once `QUIET_MS` pass without a change, until shortly after `stop`."""
    import watchfiles

    def accept(change: watchfiles.Change, path: str) -> bool:
        return wanted(from_root(root, path))

    async for changes in watchfiles.awatch(
        folder, watch_filter=accept, step=QUIET_MS, debounce=LONGEST_BURST_MS, stop_event=stop, recursive=recursive
    ):
        await changed({from_root(root, path) for _, path in changes})
