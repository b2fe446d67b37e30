"""Read environment variables from `.env` files."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path

from osmosis_ai.errors import UsageError
from osmosis_ai.folders import UnreadableError, read_bounded

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
    from dotenv import dotenv_values

    try:
        data = read_bounded(file, MAX_BYTES, f"larger than {MAX_BYTES >> 20} MiB; it should hold a few variables")
        return dotenv_values(stream=StringIO(data.decode("utf-8-sig")))
    except UnreadableError as error:
        raise UsageError(f"{file}: {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
