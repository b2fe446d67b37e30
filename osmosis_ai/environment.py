"""Read environment variables from `.env` files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from osmosis_ai.errors import UsageError

__all__ = ["environment_of", "read_env_file"]

MAX_BYTES = 1 << 20


def environment_of(environ: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """Return `environ` plus the variables of each folder's `.env`, in order; raise UsageError.

    Existing variables win. `environ` itself doesn't change.
    """
    found = dict(environ)
    for folder in dict.fromkeys(folders):
        for name, value in read_env_file(folder).items():
            if value is not None:
                found.setdefault(name, value)
    return found


def read_env_file(folder: Path) -> dict[str, str | None]:
    """Return the variables in a folder's `.env`, or none if the file doesn't exist; raise UsageError."""
    file = folder / ".env"
    if not file.exists() or file.is_dir():
        return {}
    if not file.is_file():
        # Reading a pipe or a device could block forever, here or in a library that reads the file, too.
        raise UsageError(f"{file} is not a regular file; put its variables into the environment instead")
    if file.stat().st_size > MAX_BYTES:
        raise UsageError(f"{file} is larger than {MAX_BYTES >> 20} MiB; it should hold a few variables")
    from dotenv import dotenv_values

    try:
        return dotenv_values(file, encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
