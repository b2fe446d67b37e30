"""Find, read and parse Python source, with bounds on its size and without running it."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from osmosis_ai.folders import UnreadableError, read_bounded
from osmosis_ai.records import Failure, Record

__all__ = [
    "MAX_FILE_BYTES",
    "FunctionNode",
    "Problem",
    "UnreadableError",
    "aliases_of",
    "decorated_as",
    "dotted_name",
    "importable_functions",
    "parse_file",
    "python_files",
    "read_file",
    "relative_to_root",
    "statements",
]

MAX_FILE_BYTES = 5_000_000
"""A syntax tree takes many times its source's size in memory."""

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}
FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Problem(Record, frozen=True):
    """A file or folder that could not be read, and the reason; `file` is relative to the repository's root."""

    file: str
    line: int | None
    message: str

    def __str__(self) -> str:
        return f"{self.file if self.line is None else f'{self.file}:{self.line}'}: {self.message}"

    def as_failure(self, origin: Literal["reward", "rubric"]) -> Failure:
        """Return it as the failure to load the functions of the file."""
        return Failure(origin, str(self), kind="load", file=self.file, line=self.line)


def python_files(folder: Path, root: Path, problems: list[Problem]) -> Iterator[Path]:
    """Yield the Python files in a repository's folder and its subfolders; add unreadable entries to `problems`."""
    real_root = root.resolve()
    seen: set[Path] = set()
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        try:
            is_folder, is_link = path.is_dir(), path.is_symlink()
            if not is_folder and (path.suffix != ".py" or path == folder):
                continue
            if is_link and not path.exists():
                raise UnreadableError("a link to something that doesn't exist")
            real = path.resolve()
            if not real.is_relative_to(real_root):
                raise UnreadableError("a link to a place outside the repository")
            # Links may lead back to a parent folder.
            if real in seen:
                continue
            seen.add(real)
            if not is_folder:
                yield path
            # A virtual environment, whatever its folder is called.
            elif not (path / "pyvenv.cfg").exists():
                entries = sorted(path.iterdir(), reverse=True)
                waiting += [entry for entry in entries if entry.name[0] != "." and entry.name not in _SKIPPED_FOLDERS]
        except UnreadableError as error:
            problems.append(Problem(relative_to_root(path, root), None, error.message))
        except OSError as error:
            problems.append(Problem(relative_to_root(path, root), None, f"can't be read: {error.strerror or error}"))


def relative_to_root(path: Path, root: Path) -> str:
    """Return a path for display: relative to the repository's root if inside, with forward slashes."""
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def read_file(path: Path) -> str:
    """Return a source file's text; raises UnreadableError."""
    too_large = f"larger than {MAX_FILE_BYTES // 1_000_000} MB, too large to be source"
    return _decoded(read_bounded(path, MAX_FILE_BYTES, too_large))


def parse_file(path: Path) -> ast.Module:
    """Return a file's syntax tree; raises UnreadableError."""
    source = read_file(path)
    try:
        with warnings.catch_warnings():
            # Importing the file will show the compiler's warnings, for example about escapes.
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError as error:
        raise UnreadableError(f"{type(error).__name__}: {error.msg}", error.lineno) from None
    except ValueError as error:
        # Null bytes, which are a SyntaxError from Python 3.12 on.
        raise UnreadableError(f"can't be parsed: {error}") from None
    except (RecursionError, MemoryError):
        # CPython's parser raises MemoryError when its stack is full, however much memory is free.
        raise UnreadableError("can't be parsed: nested too deeply") from None


def _decoded(data: bytes) -> str:
    """Decode source as UTF-8, else by its declared encoding; raises UnreadableError."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8 (byte 0x{data[error.start]:02x}), and no other encoding is declared"
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        raise UnreadableError(message, line) from None


# Syntax trees


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, in order, but not those inside functions and classes."""
    waiting: list[ast.AST] = [*reversed(tree.body)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        children: list[ast.AST] = []
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            if field == "body" and isinstance(node, ast.If) and _never_on_import(node.test):
                continue
            inner = getattr(node, field, None)
            children += inner if isinstance(inner, list) else []
        waiting += reversed(children)


def _never_on_import(test: ast.expr) -> bool:
    """Return True if a condition is `__name__ == "__main__"` or `TYPE_CHECKING`."""
    if isinstance(test, ast.Compare):
        sides = [test.left, *test.comparators]
        # The body of `if __name__ != "__main__"` does run on import.
        return any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides) and isinstance(
            test.ops[0], ast.Eq
        )
    return dotted_name(test, {}).rpartition(".")[2] == "TYPE_CHECKING"


def importable_functions(tree: ast.Module) -> Iterator[FunctionNode]:
    """Yield the functions that a module defines when imported, in order."""
    return (node for node in statements(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def aliases_of(tree: ast.Module) -> dict[str, str]:
    """Map imported names to full names: `from osmosis_ai import osmosis_reward as r` maps r."""
    aliases = {}
    for node in statements(tree):
        if isinstance(node, ast.Import):
            aliases.update({name.asname: name.name for name in node.names if name.asname})
        elif isinstance(node, ast.ImportFrom):
            aliases.update({name.asname or name.name: f"{node.module or ''}.{name.name}" for name in node.names})
    return aliases


def dotted_name(node: ast.expr, aliases: dict[str, str]) -> str:
    """Return the full name that an expression such as `a.b` or `a.b()` refers to; empty if it refers to none."""
    if isinstance(node, ast.Call):
        node = node.func
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([aliases.get(node.id, node.id), *reversed(parts)])


_DECORATORS: dict[str, Literal["reward", "rubric"]] = {"osmosis_reward": "reward", "osmosis_rubric": "rubric"}


def decorated_as(node: FunctionNode, aliases: dict[str, str]) -> Literal["reward", "rubric"] | None:
    """Return the kind of a function's decorator, None if it has neither."""
    for decorator in node.decorator_list:
        # Only the last part counts, so that a decorator re-exported by the repository's own module is recognized.
        kind = _DECORATORS.get(dotted_name(decorator, aliases).rpartition(".")[2])
        if kind is not None:
            return kind
    return None
