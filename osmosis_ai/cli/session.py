"""Shared by all commands: environment, masked output, errors, signals and exit codes."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from osmosis_ai.cli.signals import interrupted_code
from osmosis_ai.cli.streams import discard_stdout
from osmosis_ai.environment import environment_of
from osmosis_ai.errors import OsmosisError, OutputError, StoreError, UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.shortage import shortage_of

if TYPE_CHECKING:
    from osmosis_ai.cli.console import Output
    from osmosis_ai.masking import Masker

__all__ = [
    "CommandSession",
    "ExitCode",
    "SharedOptions",
    "Store",
    "command_session",
    "interrupts",
    "shared_options",
    "stored_runs",
]

Store = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="DIR", help="The folder of runs, as for `osmosis eval`. Default: the repository's."
    ),
]


class ExitCode(enum.IntEnum):
    """A command's exit code."""

    OK = 0
    """Everything succeeded."""
    FAILED = 1
    """A rollout failed, a score could not be computed, or a check found an error."""
    COULD_NOT_START = 2
    """An option, a file, the repository, a model or a key can't be used."""
    INTERRUPTED = 130
    """Ctrl-C. Ended by SIGTERM or SIGHUP, the process exits with 143 or 129 instead."""


class CommandSession:
    """The working environment of a command.

    Attributes:
        cwd: The working directory.
        environ: Environment variables, including those of `.env` files.
        masker: Masks the values of keys.
        output: The command's output, masked.
    """

    def __init__(self, *, quiet: bool) -> None:
        # Imported here, because `--help` and completion need no rich.
        from osmosis_ai.cli.console import Output

        self.cwd = Path.cwd()
        self.environ: dict[str, str] = dict(os.environ)
        self.output: Output = Output(quiet=quiet)
        self.use()

    def use(self, *folders: Path, keys: Iterable[str] = ()) -> None:
        """Add the variables of these folders' `.env`, and mask their keys and `keys` in all output."""
        from osmosis_ai.masking import Masker

        self.environ = environment_of(self.environ, *folders)
        self.masker: Masker = Masker.from_environment(self.environ, keys)
        self.output.masker = self.masker


@contextmanager
def command_session(
    *, quiet: bool = False, store_error: ExitCode = ExitCode.COULD_NOT_START
) -> Iterator[CommandSession]:
    """Print the error of a command's block and raise typer.Exit with its exit code.

    `store_error` is the exit code for a failing run store, which may fail after a run has started.
    """
    session = CommandSession(quiet=quiet)
    try:
        session.use(session.cwd)
        yield session
    except OutputError as error:
        # The work was done and stored; only its output failed, so this isn't "could not start".
        session.output.fail(str(error))
        raise typer.Exit(ExitCode.FAILED) from error
    except OsmosisError as error:
        session.output.fail(str(error))
        raise typer.Exit(store_error if isinstance(error, StoreError) else ExitCode.COULD_NOT_START) from error
    except BrokenPipeError as error:
        # The reader closed the pipe.
        discard_stdout()
        raise typer.Exit from error
    except (OSError, RuntimeError) as error:
        # Python raises RuntimeError if the system allows no more threads.
        shortage = shortage_of(error)
        if shortage is None:
            raise
        session.output.fail(str(shortage))
        raise typer.Exit(ExitCode.COULD_NOT_START) from error
    except KeyboardInterrupt as error:
        session.output.warn("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from error


class SharedOptions(NamedTuple):
    """The options that a group of commands shares with its subcommands."""

    root: str | None = None
    store: str | None = None
    json: bool = False


def shared_options(context: typer.Context, root: str | None, store: str | None, json: bool) -> SharedOptions:
    """Return the shared options of a subcommand; each may also be given before its name."""
    group: SharedOptions = context.obj or SharedOptions()
    return SharedOptions(root or group.root, store or group.store, json or group.json)


def stored_runs(cwd: Path, shared: SharedOptions) -> tuple[Path, Path]:
    """Return the repository and the folder of its runs, as a run in `cwd` would choose them; raises UsageError."""
    from osmosis_ai.cli.options import effective_config
    from osmosis_ai.config import StoredRunsConfig
    from osmosis_ai.discovery.repository import root_above
    from osmosis_ai.runtime.run.prepare import find_store

    root = root_above(cwd) if shared.root is None else given_path(shared.root, cwd)
    if not root.is_dir():
        raise UsageError(f"--root {shared.root}: there is no such folder")
    given = {} if shared.store is None else {"store": shared.store}
    config = effective_config(StoredRunsConfig, given, cwd, root=root).config
    return root, find_store(config.store, root, cwd)


@contextmanager
def interrupts(stop: Callable[[], None], kill: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C. At the second, call `kill`, which must leave no process behind, and exit.

    Use it in the thread of a running event loop.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            kill()
            # Clean-up may be what hangs.
            os._exit(interrupted_code())
        interrupted = True
        loop.call_soon_threadsafe(stop)

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
