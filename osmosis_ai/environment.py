"""Environment variables from `.env` files."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["load_env_files"]


def load_env_files(*folders: Path, again: Collection[str] = ()) -> dict[str, str]:
    """Load each folder's `.env`, in order, into this process's environment. Variables that exist already win.

    Args:
        folders: Where to look.
        again: Variables that an earlier load set: they are set anew, or removed when no file has them any more.

    Returns:
        The variables that were set.
    """
    loaded: dict[str, str] = {}
    for name in again:
        os.environ.pop(name, None)
    for folder in dict.fromkeys(folders):
        file = folder / ".env"
        if file.is_file():
            from dotenv import dotenv_values

            for name, value in dotenv_values(file, encoding="utf-8").items():
                if value is not None and name not in os.environ:
                    os.environ[name] = loaded[name] = value
    return loaded
