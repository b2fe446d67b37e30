"""The folder that this package keeps its files in."""

from __future__ import annotations

from pathlib import Path

__all__ = ["private_folder"]


def private_folder(folder: Path) -> None:
    """Make the folder this package keeps its files in, one that git ignores by itself; raises OSError."""
    folder.mkdir(exist_ok=True)
    try:
        with (folder / ".gitignore").open("x", encoding="utf-8") as file:
            file.write("*\n")
    except FileExistsError:
        return
