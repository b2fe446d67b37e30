"""The folder that this package keeps its files in, files that are replaced as a whole, and files read within bounds."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["UnreadableError", "private_folder", "read_bounded", "replaced_file"]


class UnreadableError(Exception):
    """A file of the repository that can't be used: why, and the line if there is one."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


def read_bounded(path: Path, limit: int, too_large: str) -> bytes:
    """A file's content; raises UnreadableError, with `too_large` for one of more bytes than the limit."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("not a regular file")
        if status.st_size > limit:
            raise UnreadableError(too_large)
        return path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"can't be read: {error.strerror or error}") from None


def private_folder(folder: Path) -> None:
    """Make the folder this package keeps its files in, one that git ignores by itself; raises OSError."""
    folder.mkdir(exist_ok=True)
    try:
        with (folder / ".gitignore").open("x", encoding="utf-8") as file:
            file.write("*\n")
    except FileExistsError:
        return


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when the block ends, and leaves nothing when it fails.

    What isn't a regular file (a pipe, `/dev/stdout`) is written to directly.

    Raises:
        OSError: It can't be written.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as direct:
            yield direct
        return
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
