"""Check a repository's layout, and that its source can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from osmosis_ai.discovery.scan import Problem, scan_functions, scan_tools
from osmosis_ai.environment import read_env_file
from osmosis_ai.errors import UsageError
from osmosis_ai.validate.check import FOLDERS, Check, Subject
from osmosis_ai.validate.findings import Finding, Place, finding
from osmosis_ai.validate.secrets import check_secrets

__all__ = ["CHECKS"]

_PLACES = ("mcp", "reward_fn", "reward_rubric", "configs", "rollouts")
_INSIDE = ("configs/eval", "configs/training", "test_data.jsonl", "pyproject.toml", "rubric_configs.yaml")


def _check_layout(subject: Subject) -> Iterator[Finding]:
    root = subject.root
    for name in (*_PLACES, *_INSIDE):
        yield from _check_link(root / name, name, root)
    try:
        read_env_file(root)
    except UsageError as error:
        yield finding("OSM006", str(error).removeprefix(f"{root / '.env'} "), Place(".env"))
    if not any((root / name).is_dir() for name in _PLACES):
        hint = "Pass the repository's root: osmosis validate REPO. To create one: osmosis init DIR."
        yield finding("OSM003", "there is no mcp/, reward_fn/, reward_rubric/ or configs/ here", hint=hint)


def _check_link(path: Path, shown: str, root: Path) -> Iterator[Finding]:
    try:
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(root.resolve()):
            yield finding("OSM002", "a link to a place outside the repository", Place(shown))
    except (OSError, RuntimeError):
        # Before Python 3.13, a loop of links is a RuntimeError.
        yield finding("OSM002", "a link to something that doesn't exist", Place(shown))


def _check_source(subject: Subject) -> Iterator[Finding]:
    """Scan the source, which fills `subject.components`."""
    root = subject.root
    problems: list[Problem] = []
    if (root / "mcp").is_dir():
        result = scan_tools(root / "mcp", root)
        subject.components["tool"] = list(result.components)
        problems += result.problems
        yield from check_secrets(root / "mcp", root)
        if not (root / "mcp" / "main.py").is_file():
            hint = 'Write one: from fastmcp import FastMCP, then mcp = FastMCP("tools").'
            yield finding("OSM101", "mcp/ has no main.py, which creates the server", Place("mcp"), hint)
    for folder, kind in FOLDERS.items():
        if (root / folder).is_dir():
            result = scan_functions(root / folder, root, kind)
            subject.components[kind] = list(result.components)
            problems += result.problems
            yield from check_secrets(root / folder, root)
    for problem in problems:
        is_link = problem.message.startswith("a link to")
        yield finding("OSM002" if is_link else "OSM001", problem.message, Place(problem.file, problem.line))


CHECKS = (
    Check("repository", "OSM002 OSM003 OSM006", _check_layout),
    Check("source", "OSM001 OSM002 OSM101 OSM208", _check_source),
)
