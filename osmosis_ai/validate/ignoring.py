"""Findings that a repository ignores: by `--ignore`, in pyproject.toml, or in a comment beside the code."""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from osmosis_ai.discovery.source import UnreadableError, parse_file, python_files, read_file, relative_to_root
from osmosis_ai.errors import UsageError
from osmosis_ai.toml_files import TomlError, read_toml
from osmosis_ai.validate.findings import CODES, Finding

__all__ = ["ignored_codes", "split_ignored"]

_FOLDERS = ("mcp", "reward_fn", "reward_rubric")
_COMMENT = re.compile(r"#\s*osmosis:\s*ignore\[([^\]]*)\]")


def ignored_codes(given: Iterable[str], root: Path) -> frozenset[str]:
    """Return the codes that the options and `[tool.osmosis.validate]` ignore.

    Raises UsageError if a code doesn't exist, or the table can't be used.
    """
    found = {_known(code, "--ignore") for code in given}
    file = root / "pyproject.toml"
    try:
        document = read_toml(file, root) if file.is_file() else {}
    except TomlError:
        document = {}  # a finding reports it
    table = document.get("tool")
    for name in ("osmosis", "validate"):
        table = table.get(name) if isinstance(table, dict) else None
    source = "pyproject.toml: [tool.osmosis.validate]"
    if table is None:
        return frozenset(found)
    if not isinstance(table, dict) or table.keys() - {"ignore"}:
        raise UsageError(f'{source}: the only key is ignore, such as ignore = ["OSM310"]')
    codes = table.get("ignore", [])
    if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes):
        raise UsageError(f'{source} ignore: write a list of codes, such as ["OSM310"]')
    return frozenset(found | {_known(code, f"{source} ignore =") for code in codes})


def split_ignored(
    findings: Iterable[Finding], codes: frozenset[str], root: Path
) -> tuple[list[Finding], list[Finding]]:
    """Return the findings that count, and those that are ignored; raise UsageError for an unknown code in a comment.

    A comment on a function's `def` line, on a decorator's, or on the line above counts for the whole function; any
    other comment counts for its own line.
    """
    kept: list[Finding] = []
    ignored: list[Finding] = []
    # All of them, because an unknown code is an error even beside code without findings.
    folders = [root / name for name in _FOLDERS if (root / name).is_dir()]
    files = {relative_to_root(path, root): path for folder in folders for path in python_files(folder, root, [])}
    comments = {shown: _comments(path, shown) for shown, path in files.items()}
    for one in findings:
        beside = comments.get(one.file or "", {}).get(one.line or 0, ())
        (ignored if one.code in codes or one.code in beside else kept).append(one)
    return kept, ignored


def _comments(file: Path, shown: str) -> dict[int, set[str]]:
    """Return the codes that comments in a file ignore, by line."""
    try:
        text = read_file(file)
        tree = parse_file(file)
    except UnreadableError:
        return {}
    written: dict[int, set[str]] = {}
    # Tokens rather than lines, because a string may contain the same text.
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
        if match is not None:
            line = token.start[0]
            codes = [code.strip() for code in match[1].split(",")]
            written[line] = {_known(code, f"{shown}:{line}: # osmosis: ignore[…]") for code in codes}
    ignored = {line: set(codes) for line, codes in written.items()}
    for first, body, last in _functions(tree):
        beside = {code for line in range(first - 1, body) for code in written.get(line, ())}
        for line in range(first, last + 1) if beside else ():
            ignored.setdefault(line, set()).update(beside)
    return ignored


def _functions(tree: ast.Module) -> Iterator[tuple[int, int, int]]:
    """Yield each function's first line, that of its body, and its last line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield first, max(node.body[0].lineno, node.lineno + 1), node.end_lineno or node.lineno


def _known(code: str, source: str) -> str:
    if code in CODES:
        return code
    near = difflib.get_close_matches(code.upper(), CODES, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/checks.md lists the codes"
    raise UsageError(f"{source} {code}: there is no such code; {hint}")
