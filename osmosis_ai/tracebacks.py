"""Locate an exception in the repository's own code, and format its traceback without the rest."""

from __future__ import annotations

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

__all__ = ["SourceLocation", "describe", "locate", "locate_function", "short_traceback"]

_INSTALLED = {"site-packages", "dist-packages"}
_NOT_THE_USERS = tuple(os.path.realpath(path) for path in (Path(__file__).parent, sysconfig.get_path("stdlib")))


class SourceLocation(NamedTuple):
    """A line of the user's code: `file` relative to the repository's root with forward slashes, `text` stripped."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def describe(exc: BaseException, limit: int = 2000) -> str:
    """Format an exception as `NameError: name 'foo' is not defined`, even if its own `__str__` fails.

    A group of one, as task groups raise it, says nothing by itself, so the member stands for it.
    """
    while len(members := _members(exc)) == 1 and members[0] is not exc:
        exc = members[0]
    # TracebackException survives an exception whose __str__ raises.
    text = exc.msg if isinstance(exc, SyntaxError) else str(traceback.TracebackException(type(exc), exc, None))
    name = type(exc).__name__
    return _shown(f"{name}: {text}" if text else name, limit)


def locate(exc: BaseException, root: Path) -> SourceLocation | None:
    """Find the line of the user's code that raised an exception; return None if no such line took part.

    It is the deepest frame in a file under `root` that isn't part of an installed package; for a syntax error, it is
    the error's own location. If an exception has no such frame, its group's members, its cause and its context are
    searched.
    """
    for candidate in _related(exc):
        if isinstance(candidate, SyntaxError) and candidate.filename and candidate.lineno:
            file = _user_file(candidate.filename, root)
            if file is not None:
                text = candidate.text or linecache.getline(candidate.filename, candidate.lineno)
                return SourceLocation(file, candidate.lineno, _shown(text.strip(), 200))
        frames = _user_frames(candidate.__traceback__, root)
        if frames:
            return frames[-1][0]
    return None


def locate_function(function: Callable[..., Any], root: Path) -> SourceLocation | None:
    """Return the line where a function, decorators removed, begins; None if it isn't the user's code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = _user_file(code.co_filename, root) if code is not None else None
    if code is None or file is None:
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return SourceLocation(file, code.co_firstlineno, _shown(text, 200))


def short_traceback(exc: BaseException, root: Path, frames: int = 12) -> str:
    """Format an exception with only the frames of the user's code."""
    found = _user_frames(exc.__traceback__, root)
    first, last = frames // 3, frames - frames // 3
    lines = []
    if found:
        lines.append("Traceback (most recent call last, this repository's code only):")
    for number, (place, function) in enumerate(found):
        if len(found) <= frames or number < first or number >= len(found) - last:
            lines.append(f'  File "{place.file}", line {place.line}, in {function}')
            if place.text:
                lines.append(f"    {place.text}")
        elif number == first:
            lines.append(f"  … {len(found) - frames} more frames …")
    if isinstance(exc, SyntaxError) and (at := locate(exc, root)) is not None:
        lines += [f'  File "{at.file}", line {at.line}', f"    {at.text}"]
    lines.append(describe(exc))
    return "\n".join(lines)


def _related(exc: BaseException) -> Iterator[BaseException]:
    """Yield the exception, then its group's members, causes and contexts, each once."""
    seen: set[int] = set()
    waiting = [exc]
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += _members(current)
        if current.__cause__ is not None:
            waiting.append(current.__cause__)
        elif current.__context__ is not None and not current.__suppress_context__:
            waiting.append(current.__context__)


def _members(exc: BaseException) -> list[BaseException]:
    # Duck-typed: on Python 3.10 exception groups come from a backport.
    members = getattr(exc, "exceptions", None)
    members = members if isinstance(members, (tuple, list)) else []
    return [member for member in members if isinstance(member, BaseException)]


def _user_frames(tb: TracebackType | None, root: Path) -> list[tuple[SourceLocation, str]]:
    found = []
    for frame, line in traceback.walk_tb(tb):
        filename = frame.f_code.co_filename
        file = _user_file(filename, root)
        if file is not None:
            # Watch mode edits files while this process runs, so a cached line may be stale.
            linecache.checkcache(filename)
            text = linecache.getline(filename, line, frame.f_globals).strip()
            found.append((SourceLocation(file, line, _shown(text, 200)), frame.f_code.co_name))
    return found


def _user_file(filename: str, root: Path) -> str | None:
    """Return the path relative to the root if the file is the user's own, else None."""
    if filename.startswith("<"):
        return None
    real = os.path.realpath(filename)
    if any(real == place or real.startswith(place + os.sep) for place in _NOT_THE_USERS):
        return None
    # A folder of the repository may be a link to another place, and the root itself may be behind one.
    for path, base in ((Path(filename).absolute(), root.absolute()), (Path(real), root.resolve())):
        if path.is_relative_to(base):
            relative = path.relative_to(base)
            return None if _INSTALLED.intersection(relative.parts) else relative.as_posix()
    return None


def _shown(text: str, limit: int) -> str:
    # Lone surrogates can't be stored or printed.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"
