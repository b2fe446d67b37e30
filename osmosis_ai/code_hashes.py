"""Hashes of the repository's code, which tell whether stored rollouts and scores are stale."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import osmosis_ai
from osmosis_ai.discovery.closure import module_files
from osmosis_ai.imports import content_hash, hash_when_imported
from osmosis_ai.records import FunctionRef

__all__ = ["combined_hash", "file_hash", "function_code", "imported_sources", "leave_out_imported", "python_files"]

_FOLDERS = {"reward_fn": "reward", "reward_rubric": "rubric"}

_OTHERS = tuple(f"{Path(file).parent}{os.sep}" for file in (os.__file__, osmosis_ai.__file__ or ""))
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|__pycache__)[/\\]")


_last_library: str | None = None


def leave_out_imported() -> None:
    """Leave the modules imported so far out of `imported_sources`; for a fork server, which imports libraries only."""
    global _last_library
    _last_library = next(reversed(sys.modules))


def imported_sources(root: Path) -> dict[str, str]:
    """Hash the files under `root` that this process has imported, each as it was at import time.

    Paths are relative, with forward slashes. A file deleted since then may have an empty hash.
    """
    root = root.resolve()
    found = {}
    for _, module in _later_modules():
        name = getattr(module, "__file__", None)
        # Skip installed modules first: resolving a thousand paths would take longer than most imports.
        if not isinstance(name, str) or name.startswith(_OTHERS) or _INSTALLED.search(name):
            continue
        file = Path(name).resolve()
        if file.is_relative_to(root) and not _INSTALLED.search(str(file)):
            found[file.relative_to(root).as_posix()] = hash_when_imported(file) or file_hash(file)
    return found


def _later_modules() -> list[tuple[str, ModuleType]]:
    """List the modules imported after `leave_out_imported`, or all."""
    for _ in range(3):
        # The newest first: even looking at the others would copy the pages that hold them, which forks share.
        # User code may import in another thread meanwhile.
        with suppress(RuntimeError):
            return list(takewhile(lambda module: module[0] != _last_library, reversed(sys.modules.items())))
    return list(sys.modules.items())


def python_files(folder: Path, root: Path) -> dict[str, str]:
    """Hash every .py file in a folder, imported or not: a function may import one later."""
    root = root.resolve()
    files = sorted(folder.resolve().rglob("*.py"))
    return {
        file.relative_to(root).as_posix(): file_hash(file)
        for file in files
        if file.is_relative_to(root) and not any(part.startswith(".") for part in file.relative_to(root).parts)
    }


def function_code(functions: Iterable[FunctionRef], sources: Mapping[str, str], root: Path) -> dict[str, str]:
    """Hash the code behind each function; a changed hash makes the function's scores stale.

    A rubric file's entry depends on its own text, a function on its module and on the files this module imports. A file
    that no function visibly imports counts for all of them; in `reward_fn/` or `reward_rubric/` it counts for the
    functions of that kind.
    """
    root = root.resolve()
    functions = list(functions)
    made_of = {
        ref.name: {
            path.relative_to(root).as_posix(): path for path in module_files(Path(ref.root, ref.file or ""), root)
        }
        for ref in functions
        if ref.file and not ref.content
    }
    seen = {name for files in made_of.values() for name in files}

    def code(ref: FunctionRef) -> str:
        if ref.content is not None:
            return ref.content
        own = made_of.get(ref.name)
        found = {name: sources.get(name) or file_hash(path) for name, path in (own or {}).items()}
        for name, content in sources.items():
            kind = _FOLDERS.get(name.partition("/")[0], ref.kind)
            if own is None or (name not in seen and kind == ref.kind):
                found[name] = content
        return combined_hash(found)

    return {ref.name: code(ref) for ref in functions}


def file_hash(file: Path) -> str:
    """Hash a file's content; return an empty string if it can't be read or isn't a regular file."""
    try:
        # Reading a pipe or a device could block forever.
        return content_hash(file.read_bytes()) if file.is_file() else ""
    except OSError:
        return ""


def combined_hash(sources: Mapping[str, str], *more: Iterable[str]) -> str:
    """Combine file hashes and texts into one hash."""
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(sources.items()):
        digest.update(f"{name}\0{content}\n".encode())
    for texts in more:
        for text in texts:
            digest.update(f"{text}\n".encode())
    return digest.hexdigest()
