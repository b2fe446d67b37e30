"""Find the files that a module consists of, by following its imports inside the repository."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from osmosis_ai.discovery.source import UnreadableError, parse_file

__all__ = ["module_files"]


def module_files(file: Path, root: Path) -> set[Path]:
    """Return a module's file and every file of the repository that it imports, including imports inside functions.

    Modules are searched for in the root and in the importing file's own folder. Modules imported by a name computed at
    run time are missed. The paths are resolved and lie inside the root.
    """
    root = root.resolve()
    found: set[Path] = set()
    waiting = [file.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_relative_to(root):
            continue
        found.add(path)
        try:
            tree = parse_file(path)
        except UnreadableError:
            continue  # importing it reports the error
        for folder, parts in _imports(tree, path, root):
            waiting += _files(folder, parts)
    return found


def _imports(tree: ast.Module, file: Path, root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield for each import the folders to search and the parts of the dotted name to find there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name.split(".") for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            before = node.module.split(".") if node.module else []
            # `from package import name` may import the module package.name.
            names = [[*before, name.name] for name in node.names]
        else:
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            folders = [file.parents[node.level - 1]] if node.level <= len(file.parents) else []
        else:
            folders = [root, file.parent]
        for folder in folders:
            for name in names:
                yield folder, name


def _files(folder: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the files that importing a dotted name runs: its packages' and its own."""
    for part in parts:
        yield from (path.resolve() for path in (folder / "__init__.py", folder / f"{part}.py") if path.is_file())
        folder = folder / part
        if not folder.is_dir():
            return
    if (folder / "__init__.py").is_file():
        yield (folder / "__init__.py").resolve()
