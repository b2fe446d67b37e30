"""The folder that this package keeps its files in, and files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["private_folder", "replaced_file"]


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

    Args:
        path: Where the result goes; its folder exists.

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
