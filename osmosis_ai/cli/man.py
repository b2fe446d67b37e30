"""Write a man page for every command from its help: `python -m osmosis_ai.cli.man DIR`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

from osmosis_ai import __version__
from osmosis_ai.cli.app import app
from osmosis_ai.cli.help import CONTEXT

__all__ = ["helps", "man_pages"]

WIDTH = 72
"""Columns of the help, which a page indents by 7."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")
HEADING = re.compile(r"([A-Z][\w ]*):$")


def man_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each page: `osmosis-runs-show.1`."""
    for command, help in helps():
        title = command.replace(" ", "-")
        yield f"{title}.1", _page(title, help)


def helps() -> Iterator[tuple[str, str]]:
    """Yield every command with its help, as a terminal of 72 columns has it: `osmosis runs show`."""
    yield from _helps(typer.main.get_command(app), None, "osmosis")


def _helps(command: Any, parent: Any, name: str) -> Iterator[tuple[str, str]]:
    context = command.context_class(
        command, info_name=name, parent=parent, **{**CONTEXT, "terminal_width": WIDTH, "max_content_width": WIDTH}
    )
    yield context.command_path, STYLE.sub("", command.get_help(context))
    for each in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from _helps(command.get_command(context, each), context, each)


def _page(title: str, help: str) -> str:
    usage, _, rest = help.partition("\n\n")
    what, *lines = rest.split("\n")
    first = [what]
    while lines and lines[0]:
        first.append(lines.pop(0))
    summary = " ".join(first)
    parts = [
        f'.TH {title.upper()} 1 "" "osmosis {__version__}" "Osmosis"',
        ".SH NAME",
        f"{_source(title)} \\- {_source(summary.removesuffix('.'))}",
        ".SH SYNOPSIS",
        _source(usage.removeprefix("Usage: ")),
        ".SH DESCRIPTION",
        _source(summary),
        ".nf",
    ]
    for line in lines:
        heading = HEADING.match(line)
        parts += [".fi", f'.SH "{heading[1].upper()}"', ".nf"] if heading else [_source(line)]
    return "\n".join([*parts, ".fi"]) + "\n"


def _source(text: str) -> str:
    """Escape text that troff would read as a request or an escape."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    text = "".join(each if each.isascii() else rf"\[u{ord(each):04X}]" for each in text)
    return rf"\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, source in man_pages():
        (folder / file).write_text(source, encoding="utf-8")
