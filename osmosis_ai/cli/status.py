"""The status line: names what a command is waiting for on the terminal, until the command prints something.

It is shown before the command itself is imported, so this module imports next to nothing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from time import monotonic

__all__ = ["STATUS", "StatusLine"]

# With wrapping off, the terminal cuts a long line, and one carriage return is enough to overwrite it.
SHOWN, CLEARED = "\r\x1b[K\x1b[?7l{}…\x1b[?7h", "\r\x1b[K"


class StatusLine:
    """One line at the end of stderr. It shows nothing until turned on, which needs a terminal.

    Attributes:
        began: When the command started, by the monotonic clock.
        waits: What the command has waited for, with the second since its start at which each wait began.
    """

    def __init__(self) -> None:
        self.began = monotonic()
        self.waits: list[tuple[str, float]] = []
        self._on = self._shown = False

    def turn_on(self) -> None:
        """Show from now on what the command is waiting for, if stderr is a terminal."""
        # stderr is None if the caller closed it.
        self._on = sys.stderr is not None and sys.stderr.isatty()

    def turn_off(self) -> None:
        """Stop showing the line, because something else writes to the terminal."""
        self.clear()
        self._on = False

    def wait_for(self, what: str) -> None:
        """Name what the command is waiting for now, such as "loading tools from mcp/"."""
        self.waits.append((what, monotonic() - self.began))
        if self._on:
            self._shown = True
            self._write(SHOWN.format(what))

    def clear(self) -> None:
        """Remove the line, because the next one will be printed in its place."""
        if self._shown:
            self._shown = False
            self._write(CLEARED)

    def elapsed(self) -> float:
        """Return the seconds since the command started."""
        return monotonic() - self.began

    def _write(self, text: str) -> None:
        # The terminal may be gone, which mustn't end the command.
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


STATUS = StatusLine()
"""The status line of this process."""
