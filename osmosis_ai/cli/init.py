"""`osmosis init`: create a small, complete repository."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from osmosis_ai.cli.scaffold import TEMPLATES, template, write_new

__all__ = ["init"]

_TEMPLATES = TEMPLATES / "repository"
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
    write_new(folder, files, "init overwrites nothing; choose another folder")
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


def _files(name: str) -> Iterator[tuple[Path, str]]:
    for file in sorted(_TEMPLATES.rglob("*.txt")):
        parts = file.relative_to(_TEMPLATES).with_suffix("").parts
        path = Path(*(_HIDDEN.get(part, part) for part in parts))
        yield path, template(file, name)


def _project_name(folder: Path) -> str:
    """Convert the folder's name to a valid distribution name (PEP 508)."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._").lower()
    return name or "agent-repository"
