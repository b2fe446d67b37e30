"""Environment variables from `.env` files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from osmosis_ai.errors import UsageError

__all__ = ["environment_of", "load_env_files", "read_env_file"]


def environment_of(environ: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """Environment variables with those of each folder's `.env`, in order; variables that exist already win.

    Args:
        environ: The variables there are, `os.environ` as a rule; it stays as it is.
        folders: Where to look for a `.env`.

    Raises:
        UsageError: A file can't be read.
    """
    found = dict(environ)
    for folder in dict.fromkeys(folders):
        for name, value in read_env_file(folder).items():
            if value is not None:
                found.setdefault(name, value)
    return found


def load_env_files(*folders: Path) -> None:
    """Load each folder's `.env` into this process's environment. For commands that ask a judge in their own process.

    Raises:
        UsageError: A file can't be read.
    """
    os.environ.update(environment_of(os.environ, *folders))


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
