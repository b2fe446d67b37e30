"""Find functions and tools in source without importing it.

Decorators are recognized by name, as written or as imported, so a scan works even if a file's imports aren't installed.
A file that can't be read or parsed becomes a `Problem`; the scan goes on.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal

from osmosis_ai.discovery.repository import Repository
from osmosis_ai.discovery.source import (
    MAX_FILE_BYTES,
    FunctionNode,
    Problem,
    UnreadableError,
    aliases_of,
    decorated_as,
    dotted_name,
    importable_functions,
    parse_file,
    python_files,
    relative_to_root,
    statements,
)
from osmosis_ai.errors import FunctionError
from osmosis_ai.records import FunctionRef, Record

__all__ = [
    "MAX_FILE_BYTES",
    "Component",
    "Problem",
    "ScanResult",
    "bound_names",
    "discovered_refs",
    "find_module",
    "is_installed",
    "near",
    "resolve_function",
    "scan_functions",
    "scan_tools",
    "tool_name",
]


_FUNCTION_KINDS: dict[str, Literal["reward", "rubric"]] = {"reward": "reward", "rubric": "rubric"}


class Component(Record, frozen=True):
    """One function, tool, agent loop or rollout server.

    `file` is relative to the repository's root, with forward slashes; `line` is the line of the `def`. `module` is the
    import path from the root. `name` is the function's name, or the tool's if it was given its own. `parameters` are
    names in order, `*args` and `**kwargs` with their stars.
    """

    kind: Literal["reward", "rubric", "tool", "agent", "rollout"]
    name: str
    file: str
    line: int
    module: str
    is_async: bool = False
    parameters: tuple[str, ...] = ()

    def ref(self, root: Path) -> FunctionRef:
        """Return the reference by which the runtime loads a function."""
        name, kind = f"{self.module}:{self.name}", _FUNCTION_KINDS[self.kind]
        return FunctionRef(name, self.module, self.name, str(root), kind, self.file, self.line)


class ScanResult(Record, frozen=True):
    """The components that a scan found, in order of file and line, and the files it could not read."""

    components: list[Component]
    problems: list[Problem]


def scan_functions(folder: Path, root: Path, kind: Literal["reward", "rubric"]) -> ScanResult:
    """Find the `@osmosis_reward` or `@osmosis_rubric` functions in a folder and its subfolders.

    Only functions at a module's top level count, including those under an `if` or `try`: others can't be imported.
    """

    def find(tree: ast.Module, file: str, module: str) -> Iterator[Component]:
        aliases = aliases_of(tree)
        # A later definition of the same name replaces the earlier one, as it does at run time.
        found = {node.name: node for node in importable_functions(tree) if decorated_as(node, aliases) == kind}
        for node in found.values():
            yield _component(kind, node.name, node, file, module)

    return _scan(folder, root, find)


def scan_tools(mcp_dir: Path, root: Path) -> ScanResult:
    """Find the tools declared by `@mcp.tool`, whatever the server's variable is called, in a folder and its subfolders.

    Tools declared inside a function count too (`def register(server): @server.tool ...`). Only the running server knows
    tools that are mounted or added by a call.
    """

    def find(tree: ast.Module, file: str, module: str) -> Iterator[Component]:
        aliases = aliases_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = next(filter(None, (tool_name(item, node, aliases) for item in node.decorator_list)), None)
                if name is not None:
                    yield _component("tool", name, node, file, module)

    return _scan(mcp_dir, root, find)


def discovered_refs(repository: Repository) -> tuple[list[FunctionRef], list[Problem]]:
    """Return a repository's reward functions, and the files that could not be read."""
    if repository.reward_dir is None:
        return [], []
    result = scan_functions(repository.reward_dir, repository.root, "reward")
    return [component.ref(repository.root) for component in result.components], result.problems


def resolve_function(spec: str, components: Sequence[Component], root: Path, cwd: Path) -> FunctionRef:
    """Resolve `module:function`, or the bare name of a discovered function.

    A module is searched for in the repository's root, then in the working directory, then among installed packages.
    Nothing is imported: the source shows, as far as it can, that the function exists. Raises FunctionError, which lists
    the functions that do.
    """
    module, colon, attribute = (part.strip() for part in spec.partition(":"))
    if not colon:
        return _by_name(module, components, root)
    if not attribute.isidentifier() or not all(module.split(".")) or any(mark in module for mark in "/\\"):
        raise FunctionError(_malformed(spec, module, attribute))
    for component in components:
        if (component.module, component.name) == (module, attribute):
            return component.ref(root)
    if module.endswith(".py"):
        raise FunctionError(_malformed(spec, module, attribute))
    found = [(base, find_module(module, base)) for base in dict.fromkeys((root, cwd))]
    for base, module_spec in found:
        if module_spec is not None and module_spec.origin is not None:
            return _in_file(spec, module, attribute, base, Path(module_spec.origin))
    if is_installed(module, [base for base, _ in found]):
        return FunctionRef(f"{module}:{attribute}", module, attribute, str(root))
    if any(module_spec is not None for _, module_spec in found):
        message = f"{spec}: {module} is a folder; name the file in it with the function. {_discovered(components)}"
        raise FunctionError(message)
    places = " or ".join(str(base) for base, _ in found)
    close = near(module, [component.module for component in components])
    raise FunctionError(f"{spec}: there is no module {module} in {places}{close} {_discovered(components)}")


# Resolving


def _by_name(name: str, components: Sequence[Component], root: Path) -> FunctionRef:
    if not name:
        raise FunctionError("a function's name is empty; write MODULE:FUNCTION or a discovered function's name")
    candidates = [component for component in components if component.name == name]
    if len(candidates) == 1:
        return candidates[0].ref(root)
    if candidates:
        listed = ", ".join(f"{component.module}:{component.name}" for component in candidates)
        raise FunctionError(f"{name}: {len(candidates)} functions have this name: {listed}. Write one of these instead")
    close = near(name, [component.name for component in components])
    raise FunctionError(f"{name}: no discovered function has this name{close} {_discovered(components)}")


def _malformed(spec: str, module: str, attribute: str) -> str:
    if attribute.isidentifier() and module:
        path = module.replace("\\", "/").removeprefix("./")
        dotted = path.removesuffix(".py").strip("/").replace("/", ".")
        if dotted != module and all(dotted.split(".")):
            return f"{spec}: the module is written with dots: {dotted}:{attribute}"
    return f"{spec!r} names no function; write MODULE:FUNCTION, for example reward_fn.compute_reward:my_reward"


def find_module(module: str, base: Path) -> ModuleSpec | None:
    """Look up a module in a folder by Python's own rules, without importing its parents."""
    # The finders cache folder listings, which would hide a file that was saved since.
    PathFinder.invalidate_caches()
    places = [str(base)]
    spec = None
    for part in module.split("."):
        # The bare part: a dotted name would make the finder ask for the imported parent.
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    return spec


def is_installed(module: str, bases: Iterable[Path]) -> bool:
    """Return True if a module's package is installed and none of the folders shadows it."""
    top = module.partition(".")[0]
    for base in bases:
        own = find_module(top, base)
        # A folder without __init__.py has no origin: Python prefers an installed package to it.
        if own is not None and own.origin is not None:
            return False
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        # `find_spec` raises ValueError for a loaded module without a spec, such as `__main__`.
        return False
    return spec is not None and spec.origin is not None


def _in_file(spec: str, module: str, attribute: str, base: Path, file: Path) -> FunctionRef:
    shown = relative_to_root(file, base)
    name = f"{module}:{attribute}"
    if file.suffix != ".py":
        return FunctionRef(name, module, attribute, str(base), file=shown)
    try:
        tree = parse_file(file)
    except UnreadableError as error:
        place = shown if error.line is None else f"{shown}:{error.line}"
        raise FunctionError(f"{spec}: {place}: {error.message}") from None
    functions = {node.name: node for node in importable_functions(tree)}
    if attribute in functions:
        node = functions[attribute]
        # An eval function needs no decorator.
        kind = decorated_as(node, aliases_of(tree)) or "reward"
        return FunctionRef(name, module, attribute, str(base), kind=kind, file=shown, line=node.lineno)
    bound = bound_names(tree)
    if bound is None or attribute in bound:
        return FunctionRef(name, module, attribute, str(base), file=shown, line=(bound or {}).get(attribute))
    listed = ", ".join(functions) if functions else "none"
    close = near(attribute, functions)
    raise FunctionError(f"{spec}: there is no {attribute} in {shown}{close} Its functions: {listed}")


def near(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: a suggestion, or a full stop."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else "."


def _discovered(components: Sequence[Component]) -> str:
    if not components:
        return "No functions were discovered in the repository"
    names = [f"{component.module}:{component.name}" for component in components]
    return f"Discovered: {', '.join(names[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")


# Scanning


def _scan(folder: Path, root: Path, find: Callable[[ast.Module, str, str], Iterator[Component]]) -> ScanResult:
    components: list[Component] = []
    problems: list[Problem] = []
    for path in python_files(folder, root, problems):
        file = relative_to_root(path, root)
        parts = Path(file).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            found = list(find(parse_file(path), file, module))
        except UnreadableError as error:
            problems.append(Problem(file, error.line, error.message))
            continue
        dotted = next((part for part in parts[:-1] if "." in part), None)
        if dotted is not None and found:
            message = f"can't be imported from the folder {dotted}: a folder's name can't have a dot in it"
            problems.append(Problem(file, found[0].line, message))
            continue
        components += found
    components.sort(key=lambda component: (component.file, component.line))
    problems.sort(key=lambda problem: problem.file)
    return ScanResult(components, problems)


def tool_name(decorator: ast.expr, node: FunctionNode, aliases: dict[str, str]) -> str | None:
    """Return the name of the tool that a decorator declares; None if it isn't a tool decorator."""
    call = decorator if isinstance(decorator, ast.Call) else None
    target = decorator if call is None else call.func
    if not (isinstance(target, ast.Attribute) and target.attr == "tool"):
        package, _, name = dotted_name(target, aliases).rpartition(".")
        if name != "tool" or package.partition(".")[0] not in ("fastmcp", "mcp"):
            return None
    given = [] if call is None else [*call.args[:1], *(item.value for item in call.keywords if item.arg == "name")]
    for value in reversed(given):
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return node.name


def _component(
    kind: Literal["reward", "rubric", "tool"], name: str, node: FunctionNode, file: str, module: str
) -> Component:
    arguments = node.args
    parameters = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    parameters += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    parameters += [argument.arg for argument in arguments.kwonlyargs]
    parameters += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    is_async = isinstance(node, ast.AsyncFunctionDef)
    return Component(kind, name, file, node.lineno, module, is_async, tuple(parameters))


def bound_names(tree: ast.Module) -> dict[str, int] | None:
    """Return the names other than functions that a module binds at import, with their lines; None if source can't tell
    them all."""
    if _binds_names_dynamically(tree):
        return None
    names: dict[str, int] = {}
    for node in statements(tree):
        if isinstance(node, ast.ClassDef):
            names[node.name] = node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in node.names:
                names[name.asname or name.name.partition(".")[0]] = node.lineno
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # `name: int` binds nothing.
            if isinstance(node, ast.AnnAssign) and node.value is None:
                continue
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, (ast.expr, ast.withitem))]
            stored = [name for part in parts for name in ast.walk(part) if isinstance(name, ast.Name)]
            names.update({name.id: name.lineno for name in stored if isinstance(name.ctx, ast.Store)})
    return names


def _binds_names_dynamically(tree: ast.Module) -> bool:
    """Return True if the module may bind names that its source doesn't show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("globals", "exec"):
            return True
        # Functions bind globals when they are called, and patterns store their names as plain strings.
        if isinstance(node, (ast.Global, ast.Match)):
            return True
    return any(node.name == "__getattr__" for node in importable_functions(tree))
