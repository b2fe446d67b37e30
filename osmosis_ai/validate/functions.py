"""Check `reward_fn/` and `reward_rubric/` from their source."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from osmosis_ai.discovery.scan import Component
from osmosis_ai.discovery.source import (
    FunctionNode,
    UnreadableError,
    aliases_of,
    decorated_as,
    importable_functions,
    parse_file,
    python_files,
    relative_to_root,
    statements,
)
from osmosis_ai.errors import FunctionError
from osmosis_ai.records import Failure
from osmosis_ai.validate.check import FOLDERS, Check, Subject
from osmosis_ai.validate.findings import Finding, Place, finding

__all__ = ["CHECKS", "check_functions", "check_load_problems", "is_about_form", "reads_ground_truth"]

_FOLDERS = {kind: folder for folder, kind in FOLDERS.items()}
_DECORATORS = {"reward": "@osmosis_reward", "rubric": "@osmosis_rubric"}
_LOOKALIKE = re.compile(r"(^|_)(reward|rubric|score|grade)s?(_|$)|^compute_(reward|score)", re.IGNORECASE)
_FORM_WORDS = re.compile(
    # Stems of words by which a function says that it rewards form. They are compared with case-folded text.
    r"\b(?:format|brevity|brief|concis|length|short|long|style|tone|languag|penal|tool|step|struct|syntax|tag|think|json"
    r"|latex|markdown|polite|repetit|verbos|turn|effort|readab)"
)
_FIRST_PARAMETERS = {"solution_str", "messages"}


def check_functions(
    folder: Path, root: Path, kind: Literal["reward", "rubric"], found: Sequence[Component]
) -> Iterator[Finding]:
    """Check one of the two folders: signatures, unreachable functions, undecorated functions that look like rewards."""
    if not found:
        hint = f"Write {_DECORATORS[kind]} above the functions that score, or remove the folder."
        message = f"there is no {_DECORATORS[kind]} function in {_FOLDERS[kind]}/"
        yield finding("OSM204", message, Place(_FOLDERS[kind]), hint)
    for path in python_files(folder, root, []):
        try:
            tree = parse_file(path)
        except UnreadableError:
            continue  # the scan reports it
        file = relative_to_root(path, root)
        aliases = aliases_of(tree)
        reachable = {node.name: node for node in importable_functions(tree)}
        here = {component.name: component for component in found if component.file == file}
        for component in here.values():
            yield from _check_signature(component, reachable[component.name], tree, root)
        yield from _check_unreachable(tree, aliases, kind, reachable, file)
        yield from _check_lookalikes(tree, aliases, kind, file)


def _check_unreachable(
    tree: ast.Module,
    aliases: dict[str, str],
    kind: Literal["reward", "rubric"],
    reachable: Mapping[str, FunctionNode],
    file: str,
) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        decorated = decorated_as(node, aliases)
        if decorated is None:
            continue
        if reachable.get(node.name) is not node:
            again = reachable.get(node.name)
            if again is not None and decorated_as(again, aliases) is not None:
                why = f"{node.name} is defined again in line {again.lineno}, which replaces this one"
                hint = "Rename one of the two."
            else:
                why = f"{node.name} is decorated, but an import can't reach it: it isn't at the top level of the module"
                hint = "Move it to the top level of the file."
        elif decorated != kind:
            why = f"{node.name} is a {_DECORATORS[decorated]} function, but {_FOLDERS[kind]}/ isn't searched for those"
            hint = f"Move it to {_FOLDERS[decorated]}/."
        else:
            continue
        yield finding("OSM205", why, Place(file, node.lineno, node.name), hint)


def _check_lookalikes(
    tree: ast.Module, aliases: dict[str, str], kind: Literal["reward", "rubric"], file: str
) -> Iterator[Finding]:
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in importable_functions(tree):
        if node.decorator_list and decorated_as(node, aliases) is not None:
            continue
        arguments = [*node.args.posonlyargs, *node.args.args]
        first = arguments[0].arg if arguments else ""
        named = bool(_LOOKALIKE.search(node.name))
        # A private function, or one that the file itself uses, is a helper.
        if node.name.startswith("_") or node.name in used or not named or first not in _FIRST_PARAMETERS:
            continue
        message = f"{node.name} looks like a {kind} function but isn't decorated, so Osmosis doesn't find it"
        hint = f"Write {_DECORATORS[kind]} above it, or give it another name."
        yield finding("OSM206", message, Place(file, node.lineno, node.name), hint)


# Signatures


def _check_signature(component: Component, node: FunctionNode, tree: ast.Module, root: Path) -> Iterator[Finding]:
    from osmosis_ai.reward_fn.decorator import osmosis_reward
    from osmosis_ai.reward_rubric.decorator import osmosis_rubric
    from osmosis_ai.runtime.worker.scorer import Scorer

    # The decorator and the scorer check the stub as they would the function, so both say the same as a run.
    stub = _stub(node, tree)
    if stub is None:
        return
    try:
        wrapped = (osmosis_rubric if component.kind == "rubric" else osmosis_reward)(stub)
        Scorer(component.ref(root), wrapped)
    except (TypeError, FunctionError) as error:
        message = str(error).removeprefix(f"{_DECORATORS[component.kind]}: ")
        yield finding("OSM201", message, Place(component.file, node.lineno, component.name))


def _stub(node: FunctionNode, tree: ast.Module) -> Any:
    """Return a no-op function with the same signature: annotations are text, defaults are None.

    Return None if an annotation uses a name that only running the module could resolve.
    """
    # A copy, because the caller's tree must keep its annotations.
    arguments = ast.parse(ast.unparse(_bare(node))).body[0]
    assert isinstance(arguments, (ast.FunctionDef, ast.AsyncFunctionDef))
    known = _known_names(tree)
    every = arguments.args
    for argument in [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]:
        if argument is not None and argument.annotation is not None:
            if _unknown(argument.annotation, known):
                return None
            argument.annotation = _inert(argument.annotation)
    if arguments.returns is not None:
        if _unknown(arguments.returns, known):
            return None
        arguments.returns = _inert(arguments.returns)
    # Only a default's presence counts; its expression could run code.
    every.defaults = [ast.Constant(None) for _ in every.defaults]
    every.kw_defaults = [None if default is None else ast.Constant(None) for default in every.kw_defaults]
    arguments.decorator_list = []
    arguments.body = [ast.Pass()]
    module = ast.fix_missing_locations(ast.Module([arguments], []))
    names: dict[str, Any] = {}
    # Safe to run: only names are left of the user's code. `dont_inherit` keeps this module's own future import from
    # turning annotations into text.
    exec(compile(module, "<signature>", "exec", dont_inherit=True), names)  # noqa: S102
    return names[node.name]


def _inert(annotation: ast.expr) -> ast.expr:
    """Return an annotation that runs no code: a builtin type unchanged, anything else as text."""
    if isinstance(annotation, ast.Constant) or (isinstance(annotation, ast.Name) and annotation.id in dir(builtins)):
        return annotation
    return ast.Constant(ast.unparse(annotation))


def _bare(node: FunctionNode) -> FunctionNode:
    """Return the function without its body, which may be long."""
    kind = ast.AsyncFunctionDef if isinstance(node, ast.AsyncFunctionDef) else ast.FunctionDef
    bare: Any = kind(name=node.name, args=node.args, body=[ast.Pass()], decorator_list=[], returns=node.returns)
    if hasattr(node, "type_params"):
        bare.type_params = []
    fixed: FunctionNode = ast.fix_missing_locations(bare)
    return fixed


def _known_names(tree: ast.Module) -> set[str]:
    """Return the names that need no import to resolve: builtins and imports from `typing` and `collections.abc`."""
    known = set(dir(builtins))
    for node in statements(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name in ("typing", "typing_extensions"):
                    known.add(name.asname or name.name)
        elif isinstance(node, ast.ImportFrom) and node.module in ("typing", "typing_extensions", "collections.abc"):
            known |= {name.name for name in node.names if name.asname is None}
    return known


def _unknown(annotation: ast.expr, known: set[str]) -> bool:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value.strip(), mode="eval").body
        except SyntaxError:
            return True
    return any(isinstance(node, ast.Name) and node.id not in known for node in ast.walk(annotation))


def check_load_problems(problems: Sequence[Failure], signatures: Sequence[Finding]) -> Iterator[Finding]:
    """Report each load problem once, unless it is a signature error that the source check already found."""
    said = {finding.file for finding in signatures if finding.code == "OSM201"}
    seen: set[str] = set()
    for problem in problems:
        shown = any(f"TypeError: {decorator}" in problem.message for decorator in _DECORATORS.values())
        if problem.message in seen or (problem.file in said and (shown or "parameter" in problem.message)):
            continue
        seen.add(problem.message)
        place = re.match(r"([^\s:]+\.py):(\d+): ", problem.message)
        message, _, remedy = (problem.message[place.end() :] if place else problem.message).partition("\n")
        at = Place(place[1], int(place[2])) if place else Place(problem.file, problem.line)
        yield finding("OSM202", message, at, remedy or "Functions in this file can't score until this is fixed.")


# What functions read


def _node_of(component: Component, root: Path) -> FunctionNode | None:
    try:
        tree = parse_file(root / component.file)
    except UnreadableError:
        return None
    return {node.name: node for node in importable_functions(tree)}.get(component.name)


def reads_ground_truth(component: Component, root: Path) -> bool:
    """Return True if a function's own body mentions the ground truth, as a name or as a key."""
    node = _node_of(component, root)
    if node is None:
        return True
    # The body alone: the classic signature names the ground truth in any case.
    names = (getattr(part, "id", getattr(part, "value", None)) for inner in node.body for part in ast.walk(inner))
    return "ground_truth" in names


def is_about_form(component: Component, root: Path) -> bool:
    """Return True if a function's name or the first line of its docstring says that it rewards form."""
    node = _node_of(component, root)
    docstring = (ast.get_docstring(node) or "") if node is not None else ""
    said = " ".join([component.name.replace("_", " "), *docstring.splitlines()[:1]])
    return bool(_FORM_WORDS.search(said.casefold()))


def _check_folder(folder: str, subject: Subject) -> Iterator[Finding]:
    kind = FOLDERS[folder]
    if (subject.root / folder).is_dir():
        yield from check_functions(subject.root / folder, subject.root, kind, subject.components[kind])


CHECKS = tuple(Check(folder, "OSM201 OSM204 OSM205 OSM206", partial(_check_folder, folder)) for folder in FOLDERS)
