"""Back up the platform's folder, in an archive that can replace it."""

from __future__ import annotations

import sqlite3
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

from osmosis_ai.errors import UsageError
from osmosis_ai.folders import replaced_file
from osmosis_ai.platform.database import Database
from osmosis_ai.platform.home import Home

__all__ = ["write_backup"]

LEFT_OUT = {"lock", "server.json", "server.log", "jobs.log"}
"""Files of a running server, which mean nothing in a copy."""
DATABASES = {"platform.db", "runs.db"}
"""Copied by SQLite: a plain copy could catch a transaction halfway, and lacks what is only in the WAL."""


def write_backup(home: Home, target: Path) -> int:
    """Write the folder to a tar archive, with a consistent copy of each database, and return the archive's size.

    The archive contains the key: anyone who has it can read the secrets.

    Raises:
        UsageError: There is no platform, or the archive can't be written.
    """
    if not home.database.is_file():
        raise UsageError(f"there is no platform in {home.folder}")
    if target.resolve().is_relative_to(home.folder.resolve()):
        raise UsageError(f"{target} is in the platform's folder: write the backup elsewhere")
    try:
        # In the platform's own folder, which only its owner can read.
        with tempfile.TemporaryDirectory(dir=home.folder, prefix=".backup-") as folder:
            copy = Path(folder, "copy.db")
            with replaced_file(target, private=True) as file, tarfile.open(fileobj=file, mode="w") as archive:
                # The database first, so that its copy names no file that is added only later.
                Database(home.database).backup(copy)
                archive.add(copy, home.database.name)
                for path in sorted(home.folder.rglob("*")):
                    _add(archive, path, path.relative_to(home.folder), copy)
        return target.stat().st_size
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"{target} can't be written: {getattr(error, 'strerror', None) or error}") from None


def _add(archive: tarfile.TarFile, path: Path, name: Path, copy: Path) -> None:
    if name.parts[0] in LEFT_OUT or name.parts[0].startswith(".backup-") or name.as_posix() == "platform.db":
        return
    if path.name in DATABASES:
        copy.unlink(missing_ok=True)
        source = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        with closing(source), closing(sqlite3.connect(copy)) as sink:
            source.backup(sink)
        archive.add(copy, name.as_posix())
    # The copies of the databases hold what is in their WAL, and a .part is an upload in progress.
    elif path.is_file() and not path.name.endswith(("-wal", "-shm", ".part")):
        archive.add(path, name.as_posix(), recursive=False)
