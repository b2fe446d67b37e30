"""A command from its first line to its exit code: environment, masked output, errors, signals, stray processes."""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from osmosis_ai.cli.console import Output
from osmosis_ai.environment import environment_of
from osmosis_ai.errors import OsmosisError, StoreError
from osmosis_ai.masking import Masker

__all__ = ["CommandSession", "ExitCode", "command_session", "interrupts"]


class ExitCode(enum.IntEnum):
    """What a command's end says."""

    OK = 0
    """All ran."""
    FAILED = 1
    """A rollout ended in error, a score could not be computed, a check found an error."""
    COULD_NOT_START = 2
    """An option, a file, the repository, a model or a key can't be used."""
    INTERRUPTED = 130


class CommandSession:
    """What every command works with.

    Attributes:
        cwd: The working directory.
        environ: Environment variables, those of `.env` files included.
        masker: Knows the key values that nothing may show.
        output: Where text goes, without those values.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.cwd = Path.cwd()
        self.environ: dict[str, str] = dict(os.environ)
        self.masker = Masker.from_environment(os.environ)
        self.output = Output(self.masker.text, quiet=quiet)

    def use(self, *folders: Path, keys: Iterable[str] = ()) -> None:
        """Add the variables of these folders' `.env`, and keep their keys and these out of everything that is shown.

        Raises:
            UsageError: A `.env` can't be read.
        """
        self.environ = environment_of(self.environ, *folders)
        self.masker = Masker.from_environment(self.environ, keys)
        self.output.mask = self.masker.text


@contextmanager
def command_session(
    *, quiet: bool = False, store_error: ExitCode = ExitCode.COULD_NOT_START
) -> Iterator[CommandSession]:
    """Show the errors of a command's block, and end with the exit code they stand for.

    Args:
        quiet: Say nothing but results and errors.
        store_error: The exit code of a run store that fails: for a run, after it has started.

    Raises:
        typer.Exit: The block failed, or was interrupted.
    """
    session = CommandSession(quiet=quiet)
    try:
        session.use(session.cwd)
        yield session
    except OsmosisError as error:
        session.output.fail(str(error))
        raise typer.Exit(store_error if isinstance(error, StoreError) else ExitCode.COULD_NOT_START) from error
    except BrokenPipeError as error:
        # Whoever read has seen enough. What is still buffered must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from error
    except KeyboardInterrupt as error:
        session.output.warn("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from error


@contextmanager
def interrupts(stop: Callable[[], None], kill: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Ctrl-C once stops, twice ends the process at once. For the thread of a running event loop.

    Args:
        stop: Called on the event loop at the first Ctrl-C.
        kill: Called at the second, before the process ends: it must leave no process behind.

    Yields:
        A function that tells if there was a Ctrl-C.
    """
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            kill()
            os._exit(ExitCode.INTERRUPTED)
        interrupted = True
        loop.call_soon_threadsafe(stop)

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
