"""Environment variables from `.env` files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["load_env_files"]


def load_env_files(*folders: Path) -> None:
    """Load each folder's `.env`, in order. Variables that exist already win.

    Args:
        folders: Where to look.
    """
    for folder in folders:
        file = folder / ".env"
        if file.is_file():
            from dotenv import dotenv_values

            for name, value in dotenv_values(file, encoding="utf-8").items():
                if value is not None:
                    os.environ.setdefault(name, value)
