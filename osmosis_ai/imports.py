"""Import a repository's modules from source, and remember the hash of what was imported.

For workers only: the import hook stays for the rest of the process.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from typing import Any

__all__ = ["SourceLoader", "content_hash", "hash_when_imported", "install_hint", "uncached_imports"]

_roots: set[Path] = set()
_imported: dict[str, str] = {}


def uncached_imports(root: Path) -> None:
    """Import modules under `root` from source only, without reading or writing `__pycache__`.

    Python trusts a cached module if the source's size and its modification time in whole seconds match, so two saves
    within a second could bring back the old code. Installed packages keep their cache.
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
    # Finders made before the hook would still use the cache.
    for path in list(sys.path_importer_cache):
        if Path(path).resolve().is_relative_to(root):
            del sys.path_importer_cache[path]


class SourceLoader(SourceFileLoader):
    """A loader that compiles a module's source at every import, and remembers its hash."""

    def path_stats(self, path: str) -> Any:
        # importlib documents OSError here as "age unknown", and then compiles the source.
        raise OSError(path)

    def get_data(self, path: str) -> bytes:
        """Read a file; raise OSError."""
        data = super().get_data(path)
        _imported[str(Path(path).resolve())] = content_hash(data)
        return data


def hash_when_imported(file: Path) -> str | None:
    """Return the hash of a module's source at import time, None if unknown; the file may have changed since.

    Args:
        file: The source's path, symbolic links resolved.
    """
    return _imported.get(str(file))


def content_hash(data: bytes) -> str:
    """Hash a file's content."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def install_hint(error: BaseException, *folders: Path) -> str | None:
    """Return what to install if an import failed because a package is missing; None if `folders` have such a module."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not package or package in sys.modules:
        return None
    if any((folder / form).exists() for folder in folders for form in (package, f"{package}.py")):
        return None
    return f"Install the package that provides it into this environment, for example: pip install {package}"
