"""Environment variables from `.env` files."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from osmosis_ai.errors import UsageError

__all__ = ["load_env_files", "read_env_file"]


def load_env_files(*folders: Path, again: Collection[str] = ()) -> dict[str, str]:
    """Load each folder's `.env`, in order, into this process's environment. Variables that exist already win.

    Args:
        folders: Where to look.
        again: Variables that an earlier load set: they are set anew, or removed when no file has them any more.

    Returns:
        The variables that were set.

    Raises:
        UsageError: A file can't be read.
    """
    loaded: dict[str, str] = {}
    for name in again:
        os.environ.pop(name, None)
    for folder in dict.fromkeys(folders):
        for name, value in read_env_file(folder).items():
            if value is not None and name not in os.environ:
                os.environ[name] = loaded[name] = value
    return loaded


def read_env_file(folder: Path) -> dict[str, str | None]:
    """The variables in a folder's `.env`, none when there is no such file.

    Raises:
        UsageError: It can't be read.
    """
    file = folder / ".env"
    if not file.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        return dotenv_values(file, encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
