"""`osmosis init`: create a small, complete repository."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from osmosis_ai.errors import UsageError

__all__ = ["init"]

_TEMPLATES = Path(__file__).parents[1] / "templates" / "repository"
# Templates have no leading dot, so that no tool mistakes their settings for this project's.
_HIDDEN = {"gitignore": ".gitignore", "env.example": ".env.example", "github": ".github"}


def init(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The folder to create; it may exist.", show_default=False),
    ],
) -> None:
    """Create a small, complete repository to start from.

    It has tools, a reward function, a rubric, rows and a CI workflow. No file is overwritten.
    """
    from osmosis_ai.cli.console import Output

    files = {folder / path: text for path, text in _files(_project_name(folder))}
    _check(folder, list(files))
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} can't be written: {error.strerror or error}") from None
    output = Output()
    for path in sorted(files):
        output.line(str(path))
    output.say("\nnext:")
    for command in (
        f"cd {shlex.quote(str(folder))}" if folder != Path() else "",
        "osmosis validate    # check the repository",
        "osmosis test        # run the agent over the rows, offline",
        "osmosis eval --n 3  # with statistics",
        "git init && git add --all && git commit -m 'Start'",
    ):
        if command:
            output.say(f"  {command}")


def _check(folder: Path, files: list[Path]) -> None:
    """Check before writing that no file or folder is in the way; raises UsageError."""
    existing = [path for path in files if path.exists() or path.is_symlink()]
    if existing:
        names = ", ".join(path.relative_to(folder).as_posix() for path in existing[:5])
        more = f" and {len(existing) - 5} more" if len(existing) > 5 else ""
        raise UsageError(f"{folder} already has {names}{more}, and init overwrites nothing; choose another folder")
    blocking = [parent for path in files for parent in path.parents if parent.exists() and not parent.is_dir()]
    if blocking:
        raise UsageError(f"{blocking[0]} is a file, not a folder")


def _files(name: str) -> Iterator[tuple[Path, str]]:
    for template in sorted(_TEMPLATES.rglob("*.txt")):
        parts = template.relative_to(_TEMPLATES).with_suffix("").parts
        path = Path(*(_HIDDEN.get(part, part) for part in parts))
        yield path, template.read_text(encoding="utf-8").replace("@NAME@", name)


def _project_name(folder: Path) -> str:
    """Convert the folder's name to a valid distribution name (PEP 508)."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._").lower()
    return name or "agent-repository"
