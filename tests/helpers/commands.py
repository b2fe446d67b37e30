"""Run `osmosis` to its end: in this process, which is fast, or as the installed command, as users do."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jsonschema
import msgspec
import psutil
import typer.main

from osmosis_ai.cli.app import app, run
from osmosis_ai.cli.help import CONTEXT
from osmosis_ai.models.engines import ENGINES
from osmosis_ai.runtime.pool import forkserver
from osmosis_ai.schemas import SCHEMAS
from waiting import PATIENCE, eventually

COMMAND = Path(sys.executable).with_name("osmosis")
PUBLISHED = Path(__file__).parents[2] / "docs" / "schemas"
FORK_SERVER = "osmosis_ai.runtime.worker.fork_server"


_preloaded = ["openai_compatible", "offline"]
"""The engines that the fork server imports. LiteLLM takes 3 s, and makes every fork of it slower."""


def fork_with_litellm(wanted: bool) -> None:
    """Choose whether workers of the next commands in this process are forked from one that has imported LiteLLM."""
    if wanted != ("litellm" in _preloaded):
        forkserver.stop()
        _preloaded[2:] = ["litellm"] * wanted


class Finished(NamedTuple):
    """A command's output and exit code."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        lines = self.stdout.splitlines()
        assert len(lines) == 1, f"more than one line on stdout: {self.stdout!r} {self.stderr!r}"
        return json.loads(lines[0])


Osmosis = Callable[..., Finished]


def run_osmosis(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, typed: str = "") -> Finished:
    """Run a command line in this process to its end, and check that it leaves no process behind.

    All runs of a test process share one fork server, so only the first waits for imports. User code runs in workers as
    usual, by default in one; with `--workers 0`, which would run it here, the installed command runs.

    Args:
        arguments: The command line without `osmosis`.
        cwd: The working directory.
        env: Environment variables besides those of `clean_environment`.
        typed: The text piped to its stdin.
    """
    if "--workers 0" in " ".join(map(str, arguments)):
        return run_installed(*arguments, cwd=cwd, env=env, typed=typed)
    with Capture() as stdout, Capture() as stderr:
        code = run_here(arguments, cwd, environment_here(**(env or {})), stdout, stderr, typed)
        finished = Finished(code, stdout.text, stderr.text)
    eventually(lambda: not worker_processes(), lambda: f"left behind: {worker_processes()}\n{finished.stderr}")
    return finished


def run_merged(*arguments: str, cwd: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Run a command line in this process; return its exit code and both streams as a terminal would show them."""
    with Capture() as shown:
        return run_here(arguments, cwd, environ, shown, shown), shown.text


def run_installed(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, typed: str = "") -> Finished:
    """Run the installed command in a folder to its end."""
    done = subprocess.run(
        [str(COMMAND), *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(**(env or {})),
        input=typed,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@functools.cache
def the_command_line() -> Any:
    """Return all commands as typer makes them, which takes a tenth of a second."""
    return typer.main.get_command(app)


def command_of(words: list[str]) -> tuple[Any, Any, list[str]]:
    """Find the command that words after `osmosis` name; return it, the context above it, and the words left over."""
    command, context = the_command_line(), None
    while words and words[0] in getattr(command, "commands", {}):
        context = command.make_context("osmosis", [], parent=context, resilient_parsing=True, **CONTEXT)
        command, words = command.commands[words[0]], words[1:]  # type: ignore[attr-defined]
    return command, context, words


def parse_command(line: str) -> None:
    """Parse a line for bash, with every option and argument of `osmosis`, and run nothing."""
    for part in line.split(" && "):
        words = shlex.split(part)
        if words.pop(0) == "osmosis":
            command, context, rest = command_of(words)
            command.make_context("osmosis", rest, parent=context)


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment without variables that choose a model, contain a key or set a terminal's width.

    Python's `readline`, which pytest imports, sets the width for every process that it starts.
    """
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_MODEL", "COLUMNS"))}
    return {**kept, **extra}


def environment_here(**extra: str) -> dict[str, str]:
    """Return the clean environment for a command in this process, where one worker does unless the test says more."""
    return clean_environment(**{"OSMOSIS_WORKERS": "1", **extra})


def documented(name: str, data: str) -> dict[str, Any]:
    """Decode JSON; assert that it matches its published schema and has no undocumented keys."""
    value: dict[str, Any] = json.loads(data)
    schema = json.loads((PUBLISHED / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    known = msgspec.json.decode(data, type=SCHEMAS[name])
    assert msgspec.json.decode(msgspec.json.encode(known)) == value
    return value


class Capture(io.TextIOWrapper):
    """A captured stream: a file, so that it also gets output that bypasses `sys.stdout`."""

    def __init__(self) -> None:
        super().__init__(tempfile.TemporaryFile("ab+", buffering=0), encoding="utf-8", write_through=True)  # noqa: SIM115

    @property
    def text(self) -> str:
        return os.pread(self.fileno(), os.fstat(self.fileno()).st_size, 0).decode()


class Command(ABC):
    """A command that runs beside the test, which looks at it, interrupts it and must not leave it running."""

    def __init__(self) -> None:
        self._stdout, self._stderr = Capture(), Capture()

    @abstractmethod
    def ended(self, seconds: float = 0.0) -> int | None:
        """Wait up to so many seconds for its end and return the exit code, or None while it runs."""

    @abstractmethod
    def interrupt(self) -> None:
        """Send Ctrl-C."""

    @abstractmethod
    def descendants(self) -> list[psutil.Process]:
        """List every live process that it has started."""

    def wait(self) -> Finished:
        """Wait until the command and all its descendants have ended."""
        code = self.ended(PATIENCE * 3)
        assert code is not None, self.said()
        finished = Finished(code, self.printed(), self.said())
        eventually(lambda: not self.descendants(), lambda: f"left behind: {self._left()}\n{finished.stderr}")
        return finished

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition that must become true while the command runs."""

        def come_true() -> object:
            assert self.ended() is None, f"it ended with {self.ended()}:\n{self.said()}"
            return condition()

        eventually(come_true, lambda: f"it never came true; the command said:\n{self.said()}")

    def printed(self) -> str:
        """Return its stdout so far."""
        return self._stdout.text

    def said(self) -> str:
        """Return its stderr so far."""
        return self._stderr.text

    def close(self) -> None:
        self._stdout.close()
        self._stderr.close()

    def _left(self) -> str:
        lines = []
        for process in self.descendants():
            with suppress(psutil.Error):
                lines.append(f"{process.pid} in group {os.getpgid(process.pid)}: {command_line(process)}")
        return "; ".join(lines)


def run_here(
    arguments: Sequence[str | Path], cwd: Path, environ: dict[str, str], stdout: TextIO, stderr: TextIO, typed: str = ""
) -> int:
    forkserver.start([*(ENGINES[name].preload for name in _preloaded), forkserver.TOOLS])
    with (
        _descriptor(1, stdout),
        _descriptor(2, stderr),
        _pipe(typed) as stdin,
        _environment(cwd, environ, stdin),
        _logging(),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            return run(list(map(str, arguments)))
        except KeyboardInterrupt:
            return 130


@contextmanager
def _descriptor(number: int, stream: TextIO) -> Iterator[None]:
    before = os.dup(number)
    os.dup2(stream.fileno(), number)
    try:
        yield
    finally:
        os.dup2(before, number)
        os.close(before)


@contextmanager
def _pipe(text: str) -> Iterator[TextIO]:
    """Open a pipe with a text to read, which must fit into the pipe's buffer."""
    end, its_end = os.pipe()
    os.write(its_end, text.encode())
    os.close(its_end)
    with os.fdopen(end, encoding="utf-8") as stream:
        yield stream


@contextmanager
def _environment(cwd: Path, environ: dict[str, str], stdin: TextIO) -> Iterator[None]:
    before = sys.stdin, Path.cwd(), dict(os.environ)
    try:
        _be_in(stdin, cwd, environ)
        yield
    finally:
        _be_in(*before)


@contextmanager
def _logging() -> Iterator[None]:
    """Remove what a command has set up to log to its streams, which are closed when it has ended."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:], level = before
        root.setLevel(level)


def _be_in(stdin: TextIO, cwd: Path, environ: dict[str, str]) -> None:
    sys.stdin = stdin
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)


def command_line(process: psutil.Process) -> str:
    """Return a process's command line; that of one that has ended is empty, whether or not it was waited for."""
    try:
        return " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return ""


def worker_processes() -> list[psutil.Process]:
    """List the live processes below this process's fork server, which adopts its workers' orphans."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            started = child.children(recursive=True) if FORK_SERVER in command_line(child) else []
            found += [process for process in started if process.status() != psutil.STATUS_ZOMBIE]
    return found
