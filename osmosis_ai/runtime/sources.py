"""Which files of the repository a process has imported, by content."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import osmosis_ai
from osmosis_ai.imports import content_hash, hash_when_imported

__all__ = ["combined_hash", "file_hash", "imported_sources", "python_files"]

_OTHERS = tuple(f"{Path(file).parent}{os.sep}" for file in (os.__file__, osmosis_ai.__file__ or ""))
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|__pycache__)[/\\]")


def imported_sources(root: Path) -> dict[str, str]:
    """The files under `root` that this process's modules came from, with the hash of what was imported.

    Args:
        root: The repository's root folder.

    Returns:
        Paths relative to `root` with forward slashes. A file that is gone by now may have an empty hash.
    """
    root = root.resolve()
    found = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        # To resolve the paths of a thousand installed modules would take longer than most imports.
        if not isinstance(name, str) or name.startswith(_OTHERS) or _INSTALLED.search(name):
            continue
        file = Path(name).resolve()
        if file.is_relative_to(root) and not _INSTALLED.search(str(file)):
            found[file.relative_to(root).as_posix()] = hash_when_imported(file) or file_hash(file)
    return found


def python_files(folder: Path, root: Path) -> dict[str, str]:
    """Every .py file in a folder, imported or not: an import inside a function may come later."""
    root = root.resolve()
    files = sorted(folder.resolve().rglob("*.py"))
    return {
        file.relative_to(root).as_posix(): file_hash(file)
        for file in files
        if file.is_relative_to(root) and not any(part.startswith(".") for part in file.relative_to(root).parts)
    }


def file_hash(file: Path) -> str:
    """A hash of a file's content, empty when it can't be read."""
    try:
        return content_hash(file.read_bytes())
    except OSError:
        return ""


def combined_hash(sources: Mapping[str, str], *more: Iterable[str]) -> str:
    """One hash of several files and texts."""
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(sources.items()):
        digest.update(f"{name}\0{content}\n".encode())
    for texts in more:
        for text in texts:
            digest.update(f"{text}\n".encode())
    return digest.hexdigest()
