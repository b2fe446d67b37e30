"""The repositories whose runs are shown, and a cache of values computed from their stores."""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from osmosis_ai.errors import StoreError
from osmosis_ai.store.browsing import Browser
from osmosis_ai.store.queries import RunInfo
from osmosis_ai.store.schema import database_path
from osmosis_ai.training.record import TrainingRecord, find_records, run_beginnings

__all__ = ["Repository", "Stores"]

T = TypeVar("T")

SHARE = 0.02
"""Maximum share of time spent on recomputing one value while its run is running."""
KEPT = 32
"""Results to cache for each repository."""


class _Kept(NamedTuple):
    value: Any
    version: Hashable
    at: float
    took: float


class Repository:
    """One repository's store.

    Attributes:
        name: Its name in URLs, unique in one viewer.
        root: The repository.
        folder: The folder of its runs and logs.
        runs: Its runs.
    """

    def __init__(self, name: str, root: Path, folder: Path) -> None:
        self.name = name
        self.root = root
        self.folder = folder
        self.runs = Browser(database_path(folder))
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def version(self) -> tuple[int, int, int]:
        """Return a value that changes with every change of the store: see `Browser.version`."""
        with self._lock:
            try:
                # Under the lock, because only one thread may call it at a time.
                return self.runs.version()
            except StoreError:
                if self.exists:
                    raise
                return 0, 0, 0

    @property
    def exists(self) -> bool:
        """True if the repository has a store, which the first run creates."""
        return database_path(self.folder).is_file()

    def training_version(self) -> tuple[int, int]:
        """Return a value that changes with every change of a training run's record."""
        versions = [record.version() for record in find_records(self.folder)]
        return sum(written for written, _ in versions), sum(locked for _, locked in versions)

    def training(self, name: str) -> TrainingRecord:
        """Return the record of a training run by its name; raises StoreError if there is none."""
        # Compare the name with existing ones: a name from a URL must never become part of a path.
        for record in find_records(self.folder):
            if record.name == name:
                return record
        raise StoreError(f"there is no training run {name!r} in {self.folder}")

    def training_of(self, run: RunInfo) -> str | None:
        """Return the name of the training run that a run belongs to, or None."""
        name = run.config.get("name") or ""
        names = [record.name for record in find_records(self.folder)] if name else []
        return next((each for each in names if name.startswith(run_beginnings(each))), None)

    def listed_runs(self, limit: int, training: str | None = None) -> list[RunInfo]:
        """List the latest runs, newest first: those of `training`, or those that belong to no training run."""
        names = [record.name for record in find_records(self.folder)] if training is None else [training]
        beginnings = [beginning for name in names for beginning in run_beginnings(name)]
        return self.runs.list_named(limit, beginnings, so=training is not None)

    def kept(self, key: Hashable, run: RunInfo, compute: Callable[[], T]) -> T:
        """Return the result of `compute` for this key, cached until the run changes.

        A result that takes long to compute may lag behind the run: recomputing takes at most `SHARE` of the time.
        """
        # For an ended run, use its own state: another, running run changes the store's version all the time.
        # Without the third part, the progress of rollouts in flight: results are computed from stored ones.
        version = self.version()[:2] if run.alive else (run.status, run.rollouts, run.finished_at, repr(run.summary))
        now = perf_counter()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and (kept.version == version or now - kept.at < kept.took / SHARE):
                self._kept.move_to_end(key)
                value: T = kept.value
                return value
        # Outside the lock: two threads may compute the same result, but none waits for another's.
        value = compute()
        with self._lock:
            self._kept[key] = _Kept(value, version, perf_counter(), perf_counter() - now)
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return value


class Stores:
    """The repositories of one viewer, by name."""

    def __init__(self, repositories: Sequence[tuple[Path, Path]]) -> None:
        self._found: dict[str, Repository] = {}
        # Versions count from the start of a server, so mark them: a page may reconnect to a restarted one.
        self._started = secrets.token_hex(4)
        for root, folder in repositories:
            base = re.sub(r"[^\w.-]+", "-", root.resolve().name, flags=re.ASCII).strip(".-") or "repository"
            name, number = base, 1
            while name in self._found:
                number += 1
                name = f"{base}-{number}"
            self._found[name] = Repository(name, root, folder)

    @classmethod
    def of(cls, repositories: Iterable[Repository]) -> Stores:
        """Show repositories under the names they already have."""
        stores = cls(())
        stores._found = {repository.name: repository for repository in repositories}
        return stores

    def __iter__(self) -> Iterator[Repository]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def get(self, name: str) -> Repository:
        """Return a repository by its name; raises StoreError if there is none."""
        if name not in self._found:
            raise StoreError(f"there is no repository {name!r} in this viewer")
        return self._found[name]

    def version(self) -> str:
        """Return a string that changes with every change of a store or of a training run."""
        versions = (
            "-".join(map(str, (*repository.version(), *repository.training_version())))
            for repository in self._found.values()
        )
        return ".".join([self._started, *versions])

    def close(self) -> None:
        """Close all open files."""
        for repository in self._found.values():
            repository.runs.close()
