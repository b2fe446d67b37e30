"""Import a repository's modules from source, without hiding libraries, and remember the hash of what was imported.

For workers only: the path and the import hooks stay for the rest of the process.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = [
    "SourceLoader",
    "content_hash",
    "hash_when_imported",
    "hiding",
    "import_from",
    "import_hint",
    "import_in_version",
]

_roots: set[Path] = set()
_imported: dict[str, str] = {}
_given: dict[str, bytes] = {}


def import_from(root: Path, folders: Sequence[str], *, scripts: Path | None = None) -> None:
    """Put folders of the repository at `root` first on `sys.path`; their modules never hide a library.

    Args:
        root: The repository.
        folders: The folders, in order.
        scripts: The one of them that holds a main script, if any. There, as when Python runs the script, the
            repository's own code finds its module ahead of the standard library's.
    """
    # An empty entry means the working directory, which is the repository's root.
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in ("", *folders))]
    _libraries.folders.update(map(os.path.realpath, folders))
    if scripts is not None:
        _libraries.scripts.add(os.path.realpath(scripts))
    if _libraries not in sys.meta_path:
        sys.meta_path.insert(0, _libraries)
    _uncached_imports(root)


class _LibrariesFirst:
    """A finder of the standard library and of this package's dependencies, for names that a repository uses too."""

    def __init__(self) -> None:
        self.folders: set[str] = set()
        self.scripts: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a library that a module of the repository would hide; leave everything else to the next finder."""
        if path is not None:
            return None
        own = PathFinder.find_spec(name, [entry for entry in sys.path if entry in self.folders])
        # A folder without __init__.py, such as mcp/, has no origin and hides nothing.
        if own is None or own.origin is None:
            return None
        others = [entry for entry in sys.path if os.path.realpath(entry) not in self.folders]
        library = PathFinder.find_spec(name, others)
        if library is None:
            return None
        if name not in sys.stdlib_module_names:
            return library if name in _dependencies() else None
        in_scripts = os.path.realpath(Path(own.origin).parent) in self.scripts
        return None if in_scripts and _imported_by_repository() else library


_libraries = _LibrariesFirst()


def _imported_by_repository() -> bool:
    """Return True if the import in progress was started by the repository's own code."""
    frame = inspect.currentframe()
    while frame is not None and (
        frame.f_code.co_filename.startswith("<frozen importlib")
        or frame.f_globals.get("__name__") in (__name__, "importlib")
    ):
        frame = frame.f_back
    return frame is not None and _in_repository(Path(frame.f_code.co_filename).resolve())


@functools.cache
def _dependencies() -> frozenset[str]:
    """Return the top-level modules of all distributions that this package depends on, directly or not."""
    from importlib import metadata

    found: set[str] = set()
    seen: set[str] = set()
    waiting = ["osmosis-ai"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            waiting += [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in distribution.requires or ()]
            found |= {file.parts[0].partition(".")[0] for file in distribution.files or ()}
    return frozenset(found)


def hiding(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the module in `folders` that has the name of a library, or None.

    `name` is that of a top-level module; the library is Python's own or one of this package's dependencies.
    """
    files = [folder / form for folder in folders for form in (f"{name}.py", f"{name}/__init__.py")]
    found = next((file for file in files if file.is_file()), None)
    known = found is not None and (name in sys.stdlib_module_names or name in _dependencies())
    return found if known else None


def _in_repository(path: Path) -> bool:
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and any(path.is_relative_to(root) for root in _roots)


def _uncached_imports(root: Path) -> None:
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
        if not _in_repository(Path(path).resolve()):
            raise ImportError(path)
        return finder(path)

    sys.path_hooks.insert(0, hook)
    # Finders made before the hook would still use the cache. There are hundreds: pathlib would take twice as long.
    for path in list(sys.path_importer_cache):
        if f"{os.path.realpath(path)}{os.sep}".startswith(f"{root}{os.sep}"):
            del sys.path_importer_cache[path]


class SourceLoader(SourceFileLoader):
    """A loader that compiles a module's source at every import, and remembers its hash."""

    def path_stats(self, path: str) -> Any:
        # importlib documents OSError here as "age unknown", and then compiles the source.
        raise OSError(path)

    def get_data(self, path: str) -> bytes:
        """Read a file, unless its content was given; raise OSError."""
        file = str(Path(path).resolve())
        data = _given[file] if file in _given else super().get_data(path)
        _imported[file] = content_hash(data)
        return data


def import_in_version(root: Path, sources: Mapping[str, bytes]) -> None:
    """Import files under `root` with the given content, whatever they hold by now."""
    root = root.resolve()
    _given.update((str(root / path), data) for path, data in sources.items())


def hash_when_imported(file: Path) -> str | None:
    """Return the hash of a module's source at import time, None if unknown; the file may have changed since.

    Args:
        file: The source's path, symbolic links resolved.
    """
    return _imported.get(str(file))


def content_hash(data: bytes) -> str:
    """Hash a file's content."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def import_hint(error: BaseException, root: Path, *folders: Path) -> str | None:
    """Return what to do if an import failed because of a missing package, or a module with the name of a library.

    `folders` are further folders of the repository at `root` that modules come from.
    """
    if not isinstance(error, ImportError):
        return None
    package = (error.name or "").partition(".")[0]
    file = hiding(package, (*folders, root))
    if file is not None and package in sys.modules:
        return _named_like_a_library(package, file, root)
    if not isinstance(error, ModuleNotFoundError) or not package or package in sys.modules:
        return None
    if any((folder / form).exists() for folder in (*folders, root) for form in (package, f"{package}.py")):
        return None
    return f"Install the package that provides it into this environment, for example: pip install {package}"


def _named_like_a_library(name: str, file: Path, root: Path) -> str:
    shown = file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)
    library = "Python's own module" if name in sys.stdlib_module_names else "an installed library"
    loaded = getattr(sys.modules[name], "__file__", None)
    if loaded is not None and Path(loaded).resolve() == file.resolve():
        return f"{shown} hides {library} `{name}` from other code; rename it."
    return f"`{name}` means {library} here, not {shown}; rename the file."
