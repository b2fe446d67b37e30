"""Copy a store whose file can't be written any more: it was removed or replaced, or its disk is full or failing."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from osmosis_ai.folders import private_file, private_folder
from osmosis_ai.store.schema import configure, database_path

__all__ = ["rescue"]


def rescue(connection: sqlite3.Connection, path: Path, name: str) -> tuple[sqlite3.Connection, Path] | None:
    """Copy a store from its open connection to a new folder: beside `path`, else in the temporary directory.

    The connection still reads a file that was removed. Returns a connection to the copy, and its path; None if both
    folders fail.
    """
    for folder in _folders(path.parent, f"recovered-{name}"):
        copy = database_path(folder)
        try:
            private_file(copy)
            target = sqlite3.connect(copy, isolation_level=None, check_same_thread=False)
            try:
                connection.backup(target)
                configure(target)
            except BaseException:
                target.close()
                raise
            return target, copy
        except (OSError, sqlite3.Error):
            shutil.rmtree(folder, ignore_errors=True)
    return None


def _folders(store: Path, name: str) -> Iterator[Path]:
    """Create folders that only the user can look into, as long as the caller needs another one."""
    try:
        private_folder(store)
        beside = store / name
        beside.mkdir(mode=0o700)
        yield beside
    except OSError:
        pass
    try:
        yield Path(tempfile.mkdtemp(prefix=f"osmosis-{name}-"))
    except OSError:
        return
