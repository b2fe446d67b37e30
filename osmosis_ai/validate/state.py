"""Find module-level state in `mcp/` that tools change, which rollouts in the same worker share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.discovery.scan import Component
from osmosis_ai.discovery.source import (
    FunctionNode,
    UnreadableError,
    dotted_name,
    parse_file,
    python_files,
    relative_to_root,
    statements,
)
from osmosis_ai.validate.check import Check, Subject
from osmosis_ai.validate.findings import Finding, Place, finding

__all__ = ["CHECKS", "STATE_HINT", "check_state"]

STATE_HINT = (
    "Reset it in an @osmosis_setup function or key it by current_rollout().id, and evaluate with --isolation rollout "
    "until then."
)

_CONSTRUCTORS = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque"}
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_CHANGING = {
    *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft", "insert"),
    *("intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "rotate", "setdefault"),
    *("sort", "subtract", "symmetric_difference_update", "update"),
}
# A cache holds what could be computed again; a key of a session or a rollout keeps rollouts apart.
_CACHE = re.compile(r"cache|memo|registry|singleton", re.IGNORECASE)
_OWN_KEY = re.compile(r"session|rollout|request_id|client_id", re.IGNORECASE)


class _Module(NamedTuple):
    """A module of `mcp/`: its mutable names with their lines, its functions, and its names for others' names."""

    file: str
    name: str
    mutable: Mapping[str, int]
    functions: Sequence[FunctionNode]
    imported: Mapping[str, tuple[str, str]]


class _Change(NamedTuple):
    """A statement in a function that changes a module-level name."""

    name: str
    function: FunctionNode
    line: int


def check_state(mcp_dir: Path, root: Path, tools: Sequence[Component]) -> Iterator[Finding]:
    """Find module-level names bound to something mutable that code reachable from a tool changes."""
    modules = list(_modules(mcp_dir, root))
    by_name = {module.name.rpartition(".")[2]: module for module in modules}
    reachable = _reachable(modules, {(tool.file, tool.name) for tool in tools})
    said: set[tuple[str, str]] = set()
    for module in modules:
        for change in _changes(module):
            owner, name = _owner(change.name, module, by_name)
            if owner is None or name not in owner.mutable or _CACHE.search(name) or (owner.file, name) in said:
                continue
            if change.function not in reachable:
                continue
            said.add((owner.file, name))
            where = f"line {change.line}" if owner is module else f"{module.file}:{change.line}"
            message = f"{change.function.name} changes {name} ({where}), which all rollouts in a worker share"
            yield finding("OSM121", message, Place(owner.file, owner.mutable[name], name), STATE_HINT)


def _modules(mcp_dir: Path, root: Path) -> Iterator[_Module]:
    for path in python_files(mcp_dir, root, []):
        try:
            tree = parse_file(path)
        except UnreadableError:
            continue  # the scan reports it
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        mutable: dict[str, int] = {}
        imported: dict[str, tuple[str, str]] = {}
        for node in statements(tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and (target.id in rebound or _is_mutable(node.value)):
                        mutable[target.id] = node.lineno
            elif isinstance(node, ast.ImportFrom):
                source = (node.module or "").rpartition(".")[2]
                for alias in node.names:
                    imported[alias.asname or alias.name] = (source, alias.name)
        name = ".".join(path.relative_to(mcp_dir).with_suffix("").parts)
        yield _Module(relative_to_root(path, root), name, mutable, functions, imported)


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        # Other calls may return anything; clients and connections are meant to be shared.
        return dotted_name(value.func, {}).rpartition(".")[2] in _CONSTRUCTORS
    return isinstance(value, _DISPLAYS)


def _owner(name: str, module: _Module, by_name: Mapping[str, _Module]) -> tuple[_Module | None, str]:
    """Return the module that a changed name belongs to, and the name there; `module.NAME` has a dot."""
    first, _, attribute = name.partition(".")
    if not attribute and first in module.imported:
        source, original = module.imported[first]
        return by_name.get(source), original
    if attribute and first not in module.mutable:
        # `import state` or `from package import state`, and then `state.NAME`.
        return by_name.get(module.imported.get(first, ("", first))[1]), attribute
    return module, first


def _reachable(modules: Sequence[_Module], tools: set[tuple[str, str]]) -> set[FunctionNode]:
    """Return the functions that tools may call, by the names that they mention."""
    by_name: dict[str, list[FunctionNode]] = {}
    for module in modules:
        for function in module.functions:
            by_name.setdefault(function.name, []).append(function)
    waiting = [node for module in modules for node in module.functions if (module.file, node.name) in tools]
    found: set[FunctionNode] = set()
    while waiting:
        function = waiting.pop()
        if function in found:
            continue
        found.add(function)
        for node in ast.walk(function):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            waiting += by_name.get(name, []) if name is not None else []
    return found


def _changes(module: _Module) -> Iterator[_Change]:
    for function in module.functions:
        shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
        own = _local_names(function) - shared
        aliases = _aliases(function)
        for node in ast.walk(function):
            for changed in _changed_by(node):
                name = _root(changed)
                first = name.partition(".")[0]
                if first in own and first in aliases and not isinstance(changed, ast.Name):
                    name = aliases[first]
                    first = name.partition(".")[0]
                # Rebinding a name is a change only if it's declared global.
                if not name or first in own or (isinstance(changed, ast.Name) and name not in shared):
                    continue
                if not _OWN_KEY.search(ast.unparse(node)):
                    yield _Change(name, function, getattr(node, "lineno", function.lineno))


def _aliases(function: FunctionNode) -> dict[str, str]:
    """Return the local names for a part of something else: `account = ACCOUNTS[user]`, with the name at its root."""
    found: dict[str, str] = {}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            continue
        value = node.value
        if isinstance(value, ast.Call):
            called = value.func
            # Other calls return something new.
            if not (isinstance(called, ast.Attribute) and called.attr in ("get", "setdefault")):
                continue
            value = called.value
        name = _root(value)
        if name and not _OWN_KEY.search(ast.unparse(node)):
            found[node.targets[0].id] = found.get(name, name)
    return found


def _changed_by(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement or a call changes."""
    if isinstance(node, ast.Assign):
        yield from node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        yield node.target
    elif isinstance(node, ast.Delete):
        yield from node.targets
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        # As a subscript, so that it isn't taken for a rebinding.
        yield ast.Subscript(node.func.value, ast.Constant(0), ast.Store())


def _root(changed: ast.expr) -> str:
    """Return the name at the root of `NAME[…].attribute[…]`; `module.NAME` for an attribute of a name; else nothing."""
    attribute = ""
    while isinstance(changed, (ast.Subscript, ast.Attribute, ast.Call)):
        if isinstance(changed, ast.Attribute):
            attribute = changed.attr
        changed = changed.func if isinstance(changed, ast.Call) else changed.value
    if not isinstance(changed, ast.Name):
        return ""
    return f"{changed.id}.{attribute}" if attribute else changed.id


def _local_names(function: FunctionNode) -> set[str]:
    arguments = function.args
    names = {one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
    names |= {one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None}
    return names | {
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _check(subject: Subject) -> Iterator[Finding]:
    if (subject.root / "mcp").is_dir():
        yield from check_state(subject.root / "mcp", subject.root, subject.components["tool"])


CHECKS = (Check("state", "OSM121", _check),)
