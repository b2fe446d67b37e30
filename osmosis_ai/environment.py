"""Environment variables from `.env` files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from osmosis_ai.errors import UsageError

__all__ = ["environment_of", "read_env_file"]


def environment_of(environ: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """Environment variables with those of each folder's `.env`, in order; raises UsageError.

    Variables that exist already win; `environ` stays as it is.
    """
    found = dict(environ)
    for folder in dict.fromkeys(folders):
        for name, value in read_env_file(folder).items():
            if value is not None:
                found.setdefault(name, value)
    return found


def read_env_file(folder: Path) -> dict[str, str | None]:
    """The variables in a folder's `.env`, none when there is no such file; raises UsageError."""
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
