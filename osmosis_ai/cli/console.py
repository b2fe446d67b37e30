"""Print results to stdout and everything else to stderr, with keys masked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from osmosis_ai.cli.status import STATUS
from osmosis_ai.errors import OutputError

__all__ = ["Output", "table_of"]

PIPED_WIDTH = 120


class _Messages:
    """Stderr, where a message that can't be written is lost: the run is worth more."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class Output:
    """The two output streams of a command."""

    def __init__(self, mask: Callable[[str], str] = str, *, quiet: bool = False) -> None:
        self.mask = mask
        self.quiet = quiet
        self.results = _console(sys.stdout)
        self.messages = _console(_Messages(sys.stderr))

    def say(self, text: str) -> None:
        """Print a status line, unless quiet."""
        if not self.quiet:
            STATUS.clear()
            self.messages.print(self.mask(text), markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Print a line that the user should see even if quiet."""
        STATUS.clear()
        self.messages.print(self.mask(text), style="yellow", markup=False, highlight=False)

    def fail(self, text: str) -> None:
        """Print an error: the problem, its place and the remedy."""
        STATUS.clear()
        self.messages.print("[bold red]error:[/]", end=" ")
        self.messages.print(self.mask(text), markup=False, highlight=False)

    def result(self, renderable: Any) -> None:
        """Print a table or text to stdout; raise OutputError."""
        STATUS.clear()
        with self.writing():
            self.results.print(renderable, highlight=False)

    def line(self, text: str) -> None:
        """Print one line to stdout, unwrapped; raise OutputError."""
        STATUS.clear()
        with self.writing():
            self.results.file.write(self.mask(text) + "\n")
            self.results.file.flush()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an error of writing to stdout in the block into an OutputError."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"stdout can't be written: {error.strerror or error}") from error


def table_of(columns: Iterable[str], right: Iterable[str] = (), folding: Iterable[str] = (), title: str = "") -> Table:
    """Create a table; `right` columns are right-aligned, and `folding` columns wrap if space is short."""
    right, folding = set(right), set(folding)
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # Text, because a name from user code may look like markup.
        table.add_column(
            Text(column),
            justify="right" if column in right else "left",
            no_wrap=column not in folding,
            overflow="fold" if column in folding else "ellipsis",
        )
    return table


def _console(stream: Any) -> Console:
    # For files and pipes rich would assume 80 columns and squeeze tables.
    return Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH, soft_wrap=not stream.isatty())
