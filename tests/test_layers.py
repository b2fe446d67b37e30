"""Dependencies point one way, and there are no import cycles, lazy imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "osmosis_ai"
LAYERS = [
    "cli pytest_plugin platform viewer training schemas __main__",
    "validate serve",
    "runtime.run runtime.watch testing",
    "runtime.pool",
    "runtime.worker",
    "runtime",
    "exports importers store models mcp_tools reward_fn reward_rubric rollout testing.endpoint",
    "discovery data code_hashes",
]
"""From top to bottom; modules named in none of them are the ground floor. A module imports its own layer and below."""
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}


def imports(tree: ast.AST, package: list[str], modules: set[str]) -> Iterator[str]:
    """Return the package's modules that a module imports, including inside functions but not for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            source = base if node.level else str(node.module)
            for alias in node.names:
                yield from [name for name in (f"{source}.{alias.name}", source) if name in modules][:1]
        yield from imports(node, package, modules)


def graph() -> dict[str, set[str]]:
    files = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    found = {}
    for name, file in files.items():
        package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
        found[name] = set(imports(ast.parse(file.read_text(encoding="utf-8")), package, set(files))) - {name}
    return found


def layer(module: str) -> int:
    _, *path = module.split(".")
    return LAYER.get(".".join(path[:2]), LAYER.get(".".join(path[:1]), len(LAYERS)))


def reachable(modules: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        new = modules[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_imports_point_downwards_and_close_no_cycle() -> None:
    modules = graph()
    beneath = {name: reachable(modules, name) for name in modules}
    wrong = {
        (name, used)
        for name, uses in modules.items()
        for used in uses
        if layer(used) < layer(name) or name in beneath[used]
    }
    assert sorted(wrong) == [], "these imports point upwards or close a cycle"
