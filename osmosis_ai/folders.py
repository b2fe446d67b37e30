"""Paths that users give, the folder of a repository's runs, atomic file replacement, and size-limited file reads."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = [
    "OWN_FOLDER",
    "UnreadableError",
    "given_path",
    "private_file",
    "private_folder",
    "read_bounded",
    "replaced_file",
    "store_folder",
]

OWN_FOLDER = ".osmosis"


class UnreadableError(Exception):
    """A file of the repository can't be used. `message` says why; `line` says where, if known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


def given_path(text: str, cwd: Path) -> Path:
    """Return the path that a user gave, relative to the working directory; a `~` at its start is a home folder."""
    # `Path.expanduser` raises where `~name` is no user; here it stays a name like any other.
    return cwd / os.path.expanduser(text)  # noqa: PTH111 - see above


def read_bounded(path: Path, limit: int, too_large: str) -> bytes:
    """Read a file; raise UnreadableError, with `too_large` as its message if the file has more than `limit` bytes."""
    try:
        status = path.stat()
        # Reading a pipe or a device could block forever.
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("not a regular file")
        if status.st_size > limit:
            raise UnreadableError(too_large)
        return path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"can't be read: {error.strerror or error}") from None


def store_folder(root: Path, given: str | Path | None = None) -> Path:
    """Return the folder for the runs, logs and stored replies of the repository at `root`. It may not exist.

    That is `given`, else `.osmosis` in the repository, else, if that can't be written, a folder for this repository in
    the user's state directory.
    """
    if given is not None:
        return Path(given)
    root = root.resolve()
    own = root / OWN_FOLDER
    if os.access(own if own.is_dir() else root, os.W_OK):
        return own
    from platformdirs import user_state_path

    digest = hashlib.blake2b(os.fsencode(root), digest_size=4).hexdigest()
    return user_state_path("osmosis", appauthor=False) / "stores" / f"{root.name}-{digest}"


def private_folder(folder: Path) -> None:
    """Create the package's own folder, with a .gitignore that hides it from git; raise OSError.

    Only its owner can look into a new one, because it holds whole conversations.
    """
    new = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Any other folder that existed before may hold files that git should see.
    if not new and folder.name != OWN_FOLDER:
        return
    try:
        with (folder / ".gitignore").open("x", encoding="utf-8") as file:
            file.write("*\n")
    except FileExistsError:
        return


def private_file(path: Path) -> None:
    """Create an empty file that only its owner can read, unless it exists; raise OSError."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


@contextlib.contextmanager
def replaced_file(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a file to write that replaces `path` when the block succeeds, and disappears when it fails.

    Until then only its owner can read it. Then it has the mode of the file that it replaces, or of any new one, unless
    it is `private`. A `path` that isn't a regular file (a pipe, `/dev/stdout`) is written to directly.

    Raises:
        OSError: The file can't be written.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as direct:
            yield direct
        return
    # Links resolved, so that the rename replaces the file and not a link to it.
    target = path.resolve()
    descriptor, name = tempfile.mkstemp(prefix=".osmosis-", suffix=".partial", dir=target.parent)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if not private:
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask())
            os.fsync(descriptor)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _umask() -> int:
    # It can only be read by setting it; files that another thread makes meanwhile are private.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make a rename in a folder survive a power failure, where folders can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
