"""Check that a repository declares the packages it imports."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from osmosis_ai.compat import EXTRAS
from osmosis_ai.discovery.source import UnreadableError, parse_file, python_files, relative_to_root
from osmosis_ai.records import JsonObject
from osmosis_ai.toml_files import TomlError, read_toml
from osmosis_ai.validate.check import Check
from osmosis_ai.validate.findings import Finding, Place, finding

__all__ = ["CHECKS", "check_imports"]

FOLDERS = ("mcp", "reward_fn", "reward_rubric")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")


def check_imports(root: Path) -> Iterator[Finding]:
    """Check that pyproject.toml declares every package the repository imports.

    Modules of the repository and the standard library need no declaration; neither do optional imports (in a `try`) or
    those under `TYPE_CHECKING`.
    """
    file = root / "pyproject.toml"
    if not file.exists():
        message = "there is no pyproject.toml, so the repository doesn't declare its dependencies"
        hint = "Write one with [project] and dependencies; `osmosis init` creates an example."
        yield finding("OSM004", message, Place("pyproject.toml"), hint)
        return
    try:
        declared = _declared(read_toml(file, root))
    except TomlError as error:
        yield finding("OSM005", error.message, Place("pyproject.toml", error.line))
        return
    # Only the build knows dynamic dependencies.
    if declared is None:
        return
    said: set[tuple[str, str]] = set()
    local = _local_modules(root)
    distributions = importlib.metadata.packages_distributions()
    for folder in FOLDERS:
        for path in python_files(root / folder, root, []) if (root / folder).is_dir() else ():
            shown = relative_to_root(path, root)
            for module, line in _imports(path):
                # `import mcp` means the MCP SDK, not the repository's folder of that name.
                if module in sys.stdlib_module_names or (module in local and module != "mcp"):
                    continue
                if (path.parent / module).is_dir() or (path.parent / f"{module}.py").exists():
                    continue
                names = {_normalised(name) for name in (module, *distributions.get(module, ()))}
                if names & declared or (shown, module) in said:
                    continue
                said.add((shown, module))
                message = f"{module} is imported, but no dependency in pyproject.toml provides it"
                hint = f'Add "{_package(module, distributions)}" to the dependencies.'
                yield finding("OSM207", message, Place(shown, line, module), hint)


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    try:
        tree = parse_file(path)
    except UnreadableError:
        return  # the scan reports it
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno
        # Neither the body nor a handler, which often imports a substitute, needs its package.
        elif isinstance(node, ast.Try) and node.handlers:
            waiting += [*node.orelse, *node.finalbody]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _local_modules(root: Path) -> set[str]:
    """Return the modules in the root and in `mcp/`, which come first on `sys.path`."""
    found: set[str] = set()
    for folder in (root, root / "mcp"):
        if folder.is_dir():
            found |= {entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or entry.is_dir()}
    return found


def _declared(document: JsonObject) -> set[str] | None:
    """Return the distributions that a pyproject.toml declares; None if its dependencies are dynamic."""
    project = _table(document, "project")
    if "dependencies" in (project.get("dynamic") or ()):
        return None
    requirements = [item for item in project.get("dependencies") or () if isinstance(item, str)]
    groups = [*_table(project, "optional-dependencies").values(), *_table(document, "dependency-groups").values()]
    requirements += [item for group in groups if isinstance(group, list) for item in group if isinstance(item, str)]
    requirements += _table(_table(_table(document, "tool"), "poetry"), "dependencies")
    declared: set[str] = set()
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            continue
        declared.add(_normalised(match[1]))
        extras = {extra.strip() for extra in (match[2] or "").split(",")}
        # These extras added the MCP packages in earlier versions, so they still count as a declaration.
        if _normalised(match[1]) == "osmosis-ai" and any(map(EXTRAS.get, extras)):
            declared |= {"mcp", "fastmcp"}
    return declared


def _table(document: JsonObject, name: str) -> JsonObject:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _normalised(name: str) -> str:
    """Normalize a distribution's name as PEP 503 does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _package(module: str, distributions: Mapping[str, list[str]]) -> str:
    found = sorted(set(distributions.get(module, ())))
    normalised = _normalised(module)
    return normalised if not found or module == "fastmcp" or normalised in map(_normalised, found) else found[0]


CHECKS = (Check("imports", "OSM004 OSM005 OSM207", lambda subject: check_imports(subject.root)),)
