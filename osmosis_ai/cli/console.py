"""Print results to stdout and everything else to stderr, with keys masked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NewType, TypeAlias

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from osmosis_ai.cli.status import STATUS
from osmosis_ai.cli.streams import discard_stdout
from osmosis_ai.cli.tables import Table
from osmosis_ai.errors import OutputError
from osmosis_ai.masking import Masker
from osmosis_ai.text import Shown, visible, visible_in_ci, visible_json

__all__ = ["BAD", "CAUTION", "FAINT", "GOOD", "HEADING", "Line", "Output", "Part"]

Part: TypeAlias = "str | tuple[str, str]"
"""A text, or a text and its style."""
Line = NewType("Line", Text)
"""Styled text that consists of `Shown` only; `Output.styled` makes it."""

# Red and green are the terminal's own, which its theme makes readable; its yellow often isn't on a light background.
GOOD, BAD, CAUTION, FAINT, HEADING = "green", "red", "dark_orange3", "dim", "bold"

# rich's own bar is pink, which looks like a failure.
_THEME = Theme(
    {
        "bar.complete": "blue",
        "bar.finished": "blue",
        "bar.pulse": "blue",
        "bar.back": "dim",
        "progress.remaining": "dim",
    }
)


class _Messages:
    """Stderr. A message that can't be written is dropped, because it mustn't cost the run."""

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
    """The two output streams of a command.

    Everything printed passes `shown`, because a part of it may come from a model, a tool or a file.
    """

    def __init__(self, masker: Masker | None = None, *, quiet: bool = False) -> None:
        self.masker = masker or Masker()
        self.quiet = quiet
        self.results = _console(sys.stdout)
        self.messages = _console(_Messages(sys.stderr))
        # A CI runner obeys lines such as `::error::`, wherever they come from.
        self._escape = visible_in_ci if os.environ.get("CI") else visible

    def shown(self, text: str) -> Shown:
        """Mask the keys in a text, and escape what a terminal or a CI run would obey."""
        return self._escape(self.masker.text(text))

    def styled(self, *parts: Part, style: str = "") -> Line:
        """Return a line of these parts for a rich console."""
        pairs = [(part, "") if isinstance(part, str) else part for part in parts]
        return Line(Text.assemble(*((self.shown(text), part) for text, part in pairs), style=style))

    def say(self, text: str) -> None:
        """Print a status line, unless quiet."""
        if not self.quiet:
            _print(self.messages, self.styled(text))

    def warn(self, text: str) -> None:
        """Print a line that the user should see even if quiet."""
        _print(self.messages, self.styled(text, style=CAUTION))

    def fail(self, text: str) -> None:
        """Print an error: the problem, its place and the remedy."""
        _print(self.messages, self.styled(("error:", f"bold {BAD}"), " ", text))

    def line(self, text: str, style: str = "") -> None:
        """Print a line to stdout; raise OutputError."""
        if style:
            self._result(self.styled(text, style=style))
        else:
            self._write(self.shown(text))

    def json(self, data: bytes) -> None:
        """Print encoded JSON to stdout; raise OutputError."""
        self._write(visible_json(self.masker.encoded(data).decode("utf-8")))

    def ci_command(self, text: str) -> None:
        """Print a workflow command for CI; the caller has escaped its parts. Raise OutputError."""
        # Not through `shown`, which in CI would escape the command too.
        self._write(visible(self.masker.text(text)))

    def result(self, *parts: Part) -> None:
        """Print a line of these parts to stdout; raise OutputError."""
        self._result(self.styled(*parts))

    def table(self, table: Table) -> None:
        """Print a table to stdout; raise OutputError."""
        self._result(Line(Text("\n").join(table.lines(self.width, self.shown))))

    @property
    def width(self) -> int | None:
        """Width for results: COLUMNS if it is set, else the terminal's; None for no limit, as in a pipe."""
        columns = os.environ.get("COLUMNS", "")
        if columns.isdecimal() and int(columns):
            return int(columns)
        return self.results.width if self.results.file.isatty() else None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an error of writing to stdout in the block into an OutputError."""
        try:
            yield
        except BrokenPipeError:
            # Not an error: the reader, such as `head`, has seen enough. `command_session` handles it.
            raise
        except OSError as error:
            discard_stdout()
            raise OutputError(f"stdout can't be written: {error.strerror or error}") from error

    def _write(self, text: Shown) -> None:
        STATUS.clear()
        with self.writing():
            # Not through rich, which needs seconds for a line of some megabytes.
            self.results.file.write(f"{text}\n")
            self.results.file.flush()

    def _result(self, line: Line) -> None:
        with self.writing():
            _print(self.results, line)


def _console(stream: Any) -> Console:
    # With COLUMNS=0 rich would print nothing.
    return Console(file=stream, theme=_THEME, width=80 if os.environ.get("COLUMNS") == "0" else None)


def _print(console: Console, line: Line) -> None:
    STATUS.clear()
    # The terminal itself wraps long lines, so that a path in them can be copied.
    console.print(line, soft_wrap=True)
