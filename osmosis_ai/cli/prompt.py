"""Read commands from a terminal with line editing and history, or from a pipe; open the user's editor."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from osmosis_ai.errors import UsageError
from osmosis_ai.folders import replaced_file

__all__ = ["Prompt", "edited_text"]

HISTORY_LINES = 1000
"""Commands kept for the next session."""


class Prompt:
    """A reader of commands, and a context manager that saves their history.

    Attributes:
        on_terminal: True if commands are typed at a terminal.
    """

    def __init__(self, history: Path, mask: Callable[[str], str]) -> None:
        assert sys.__stdout__ is not None
        self.on_terminal = sys.stdin.isatty()
        self._stdout = sys.__stdout__
        # Duplicated now: with --workers 0 descriptor 1 points to stderr once the repository is loaded.
        self._descriptor = os.dup(self._stdout.fileno())
        self._history = history
        self._mask = mask
        self._readline = _readline() if self.on_terminal and os.isatty(self._descriptor) else None

    def __enter__(self) -> Prompt:
        if self._readline is not None and self._history.exists():
            for line in self._history.read_text(encoding="utf-8", errors="replace").splitlines():
                self._readline.add_history(line)
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)
        if self._readline is not None:
            length = self._readline.get_current_history_length()
            kept = range(max(1, length - HISTORY_LINES + 1), length + 1)
            # A tool may have been called by hand with a key.
            lines = [self._mask(self._readline.get_history_item(place) or "") for place in kept]
            # Without its folder or space on its disk, the earlier history stays.
            with suppress(OSError), replaced_file(self._history, private=True) as file:
                file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))

    def read(self, prompt: str) -> str | None:
        """Return the next command, None at the end of input; raises KeyboardInterrupt."""
        if self._readline is not None:
            with self._real_stdout():
                try:
                    return input(prompt)
                except EOFError:
                    return None
        if self.on_terminal:
            # On stderr, because stdout may be redirected, and results go there.
            sys.stderr.write(prompt)
            sys.stderr.flush()
        return sys.stdin.readline() or None

    @contextmanager
    def _real_stdout(self) -> Iterator[None]:
        """Restore the process's own stdout, without which line editing doesn't work."""
        replaced, descriptor = sys.stdout, os.dup(1)
        os.dup2(self._descriptor, 1)
        sys.stdout = self._stdout
        try:
            yield
        finally:
            sys.stdout = replaced
            os.dup2(descriptor, 1)
            os.close(descriptor)


def edited_text(text: str, environ: Mapping[str, str], *, on_terminal: bool) -> str:
    """Open a text in the user's editor and return the edited text.

    The editor gets the terminal only if `on_terminal`; otherwise it could consume piped commands. Raises UsageError.
    """
    editor = environ.get("VISUAL") or environ.get("EDITOR")
    if not editor:
        raise UsageError("no editor is set: set EDITOR, for example EDITOR=nano")
    with tempfile.TemporaryDirectory(prefix="osmosis-") as folder:
        file = Path(folder) / "edit.json"
        file.write_text(text, encoding="utf-8")
        stdin, stdout = (None, None) if on_terminal else (subprocess.DEVNULL, sys.stderr.fileno())
        # Leave Ctrl-C to the editor. Not SIG_IGN, which the editor would inherit.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            command = [*shlex.split(editor), str(file)]
            code = subprocess.run(command, check=False, stdin=stdin, stdout=stdout).returncode  # noqa: S603 - the user's
        except (OSError, ValueError) as error:
            raise UsageError(f"the editor {editor!r} can't be started: {error}; set EDITOR") from error
        finally:
            signal.signal(signal.SIGINT, before)
        if code:
            raise UsageError(f"the editor {editor!r} ended with code {code}, so nothing was changed")
        return file.read_text(encoding="utf-8", errors="replace")


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        # Some builds of Python lack it.
        return None
    return readline
