"""Where text goes: results to stdout, everything else to stderr, and no key value to either."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Output", "table_of"]

PIPED_WIDTH = 120


class Output:
    """The two streams of a command."""

    def __init__(self, mask: Callable[[str], str] = str, *, quiet: bool = False) -> None:
        self.mask = mask
        self.quiet = quiet
        self.results = _console(sys.stdout)
        self.messages = _console(sys.stderr)

    def say(self, text: str) -> None:
        """A line about what goes on."""
        if not self.quiet:
            self.messages.print(self.mask(text), markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """A line the user should see whatever the options."""
        self.messages.print(self.mask(text), style="yellow", markup=False, highlight=False)

    def fail(self, text: str) -> None:
        """An error: what is wrong, where, what to do."""
        self.messages.print("[bold red]error:[/]", end=" ")
        self.messages.print(self.mask(text), markup=False, highlight=False)

    def result(self, renderable: Any) -> None:
        """A table or text on stdout."""
        self.results.print(renderable, highlight=False)

    def line(self, text: str) -> None:
        """One line on stdout, as it is."""
        self.results.file.write(self.mask(text) + "\n")
        self.results.file.flush()


def table_of(columns: Iterable[str], right: Iterable[str] = (), folding: Iterable[str] = (), title: str = "") -> Table:
    """A table whose `right` columns are numbers, and whose `folding` columns give way when space is short."""
    right, folding = set(right), set(folding)
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # The name may come from user code, so it is no markup.
        table.add_column(
            Text(column),
            justify="right" if column in right else "left",
            no_wrap=column not in folding,
            overflow="fold" if column in folding else "ellipsis",
        )
    return table


def _console(stream: Any) -> Console:
    # A table for a file or a pipe isn't squeezed into the 80 columns that rich assumes there.
    return Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH, soft_wrap=not stream.isatty())
