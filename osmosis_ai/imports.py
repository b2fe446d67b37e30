"""How workers import a repository's modules: always from their source, and knowing what that source was.

For workers only: what is set up here holds for the rest of the process.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from typing import Any

__all__ = ["SourceLoader", "content_hash", "hash_when_imported", "uncached_imports"]

_roots: set[Path] = set()
_imported: dict[str, str] = {}


def uncached_imports(root: Path) -> None:
    """Import the repository's modules from their source only: no `__pycache__` is read or written under `root`.

    Python trusts a cached module whose source has the same size and the same modification time in whole seconds, so
    two saves within a second could bring back the old code. Installed packages keep their cache.
    """
    root = root.resolve()
    if root in _roots:
        return
    _roots.add(root)
    finder = FileFinder.path_hook((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceLoader, SOURCE_SUFFIXES))

    def hook(path: str) -> Any:
        folder = Path(path).resolve()
        if not folder.is_relative_to(root) or {"site-packages", "dist-packages"} & set(folder.parts):
            raise ImportError(path)
        return finder(path)

    sys.path_hooks.insert(0, hook)
    for path in list(sys.path_importer_cache):
        if Path(path).resolve().is_relative_to(root):
            del sys.path_importer_cache[path]


class SourceLoader(SourceFileLoader):
    """Compiles a module's source whenever it is imported, and remembers the hash of what it compiled."""

    def path_stats(self, path: str) -> Any:
        # The documented answer of a loader that can't say how old a source is: it is compiled anew.
        raise OSError(path)

    def get_data(self, path: str) -> bytes:
        """Read a file; raises OSError."""
        data = super().get_data(path)
        _imported[str(Path(path).resolve())] = content_hash(data)
        return data


def hash_when_imported(file: Path) -> str | None:
    """The hash of what a module's source held when it was imported, which it may no longer hold; None if not known.

    Args:
        file: The source, without symbolic links.
    """
    return _imported.get(str(file))


def content_hash(data: bytes) -> str:
    """A hash of a file's content."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
