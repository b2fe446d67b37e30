"""`--watch`: run, wait for a save, re-run what it affects, show which rows flipped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import anyio
import anyio.abc
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.options import Given, OutputOptions, output_options
from osmosis_ai.cli.run import begin_command, save_results
from osmosis_ai.cli.session import CommandSession, ExitCode, command_session
from osmosis_ai.cli.signals import interrupted_code
from osmosis_ai.cli.status import STATUS
from osmosis_ai.cli.view import BesideRun
from osmosis_ai.cli.watch_screen import BrokenSave, Display, Screen
from osmosis_ai.config import Command, RunConfig
from osmosis_ai.errors import FunctionError, ModelStartError, OsmosisError, StartError, StoreError, UsageError
from osmosis_ai.records import Record
from osmosis_ai.reward_rubric.resolve import rubric_files
from osmosis_ai.runtime.run.prepare import find_dataset, find_runner, find_store, prepare
from osmosis_ai.runtime.run.session import open_store, pool_options, run_environment
from osmosis_ai.runtime.watch.changes import from_root
from osmosis_ai.runtime.watch.follow import Follower, Save
from osmosis_ai.runtime.watch.session import Iteration, Rerun, WatchSession
from osmosis_ai.store.queries import RolloutFilter
from osmosis_ai.store.run_store import new_run_id
from osmosis_ai.tasks import task_group

__all__ = ["watch_command"]

EXCERPT_LINES = 2
"""Lines of source shown before and after the one with the error."""
KEYS = "rfdq"
"""Keys that do something; `watch_screen.HELP` explains them."""


def watch_command(read: Callable[[], Given], command: Command) -> int:
    """Watch the repository until the user quits, and return the exit code.

    `read` returns the typed options; it is called again when their sources, such as a config, may have changed.
    """
    given = read()
    output = output_options(given)
    with command_session(quiet=output.quiet, store_error=ExitCode.FAILED) as session:
        watcher: _Watcher | None = None
        with ExitStack() as beside:
            while watcher is None or watcher.restarts:
                # Start from scratch, because .env, pyproject.toml and configs may have changed the options.
                session.environ = dict(os.environ)
                session.use(session.cwd)
                config, results = begin_command(session, given, command, output)
                # Most saves repeat requests that were answered before. With a tokenizer a stored reply is of no use,
                # because it has no tokens.
                if config.model.cache is None and config.model.tokenizer is None:
                    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, cache=True))
                if watcher is None:
                    _check(config, session.cwd)
                    # An iteration may be a run of its own, and this page shows the last one.
                    beside.enter_context(BesideRun(session, config, shown=output.view)).open("latest")
                watcher = _Watcher(session, config, output, results, watcher)
                asyncio.run(watcher.run())
                if watcher.restarts:
                    given = read()
        return ExitCode.INTERRUPTED if watcher.interrupted else ExitCode.OK


def _check(config: RunConfig, cwd: Path) -> None:
    """Raise errors that no save can fix; an unreadable discovered function is shown like any broken save."""
    if config.resume.wanted:
        raise UsageError("--watch always starts a new run; remove --resume, --resume-run, --retry-failed and --regrade")
    if config.workers.workers == 0:
        raise UsageError("--watch needs worker processes: this process can't reload code; remove --workers 0")
    if config.workers.cluster is not None:
        raise UsageError("--watch replaces workers of this machine at every save; remove --cluster")
    if config.model.record is not None or config.model.replay is not None:
        raise UsageError("--watch keeps replies in its cache; remove --record and --replay")
    try:
        prepare(config, cwd, run_environment(config, cwd))
    except FunctionError:
        if config.scoring.eval_fn or config.scoring.rubric:
            raise


class _Next(Record, frozen=True):
    """The reason for the next iteration, and what it must re-run."""

    trigger: list[str]
    again: Rerun = Rerun()
    restart: bool = False
    quit: bool = False


class _Watcher:
    """A loop of iterations, one at a time; the next one cancels a running one.

    `before` is the watcher that this one replaces after a restart.

    Attributes:
        restarts: True if a save requires a restart: another watcher must take over.
        interrupted: True if Ctrl-C ended it.
    """

    def __init__(
        self,
        session: CommandSession,
        config: RunConfig,
        options: OutputOptions,
        results: Path | None,
        before: _Watcher | None,
    ) -> None:
        self.restarts = self.interrupted = False
        self.session: WatchSession
        self.trigger = ["start"]
        self._config = config
        self._options = options
        self._cwd = session.cwd
        _, self._repository = find_runner(config, session.cwd)
        self._root = self._repository.root.resolve()
        self._dataset = find_dataset(config.data.dataset, self._repository, session.cwd).path
        self._output = session.output
        self._masker = session.masker
        self._before = before
        self._output_file = results
        self._follower: Follower
        self._fatal: OsmosisError | None = None
        self._shown: Iteration | None = before._shown if before is not None else None
        self._terminal = ExitStack()

    async def run(self) -> None:
        """Watch until the user quits or a save requires a restart."""
        before = self._before
        folder = find_store(self._config.store, self._root, self._cwd)
        # With room, because a key press and a signal can't wait until it is read.
        send, events = anyio.create_memory_object_stream[Save | str](1000)
        with open_store(str(self._root), str(folder), self._masker) as store, self._terminal, send, events:
            async with task_group() as group:
                environ = run_environment(self._config, self._cwd)
                self.session = WatchSession(
                    self._config,
                    self._repository,
                    self._dataset,
                    self._cwd,
                    environ,
                    store,
                    pool_options(self._config, store, environ, new_run_id()),
                    group,
                    predecessor=before.session if before is not None else None,
                )
                self._follower = Follower(self._root, self.session.watched, self._outside())
                self._follower.learn()
                async with self._sending(send, group):
                    try:
                        await self._follow(self._terminal.enter_context(self._display()), events)
                    finally:
                        self.session.close()
                        # A cancelled watcher must still record how its run ended.
                        with anyio.CancelScope(shield=True):
                            await self.session.finish(interrupted=self.interrupted)
        if self._fatal is not None:
            raise self._fatal

    async def _follow(self, display: Display, events: MemoryObjectReceiveStream[Save | str]) -> None:
        following = _Next(self._before.trigger if self._before is not None else ["start"])
        while self._fatal is None and not (following.quit or following.restart):
            async with task_group() as work:
                work.start_soon(self._iterate, display, following, work)
                following = await self._next(display, events)
                work.cancel_scope.cancel()
        self.restarts, self.trigger = following.restart, following.trigger

    async def _iterate(self, display: Display, this: _Next, work: anyio.abc.TaskGroup) -> None:
        display.begin(this.trigger, self.session.pool())
        try:
            iteration = await self.session.iterate(this.trigger, display.listener, this.again)
        except (StartError, StoreError) as error:
            self._fatal = await self._fatal_error(error)
            if self._fatal is not None:
                work.cancel_scope.cancel()
                return
            display.broken(_broken(error, self._root))
        else:
            if iteration is None:
                display.unchanged()
            else:
                data = iteration.report.to_json(self.session.outcomes, iteration=iteration.done)
                data = self._masker.encoded(data)
                save_results(data, self._output_file)
                self._shown = iteration
                display.show(iteration, data)
        self._follower.learn()

    async def _fatal_error(self, error: OsmosisError) -> OsmosisError | None:
        """Return the error to end with, if no save of the code can fix this one."""
        if isinstance(error, ModelStartError) and self._shown is None:
            # The model has never worked.
            return error
        if isinstance(error, StoreError):
            try:
                await self.session.store.check()
            except StoreError as failed:
                return failed if self.session.store.lost else None
        return None

    async def _next(self, display: Display, events: MemoryObjectReceiveStream[Save | str]) -> _Next:
        """Wait for an event that triggers the next iteration."""
        async for event in events:
            if event == "d":
                display.flipped_transcript(self._transcript())
            elif isinstance(event, str):
                again = {"r": Rerun(everything=True), "f": Rerun(failed=True)}.get(event, Rerun())
                return _Next([f"key {event}"], again, quit=event == "q")
            else:
                if event.stale.everything:
                    return _Next(event.paths, restart=True)
                self.session.mark_stale(event.stale)
                return _Next(event.paths)
        return _Next([], quit=True)

    def _transcript(self) -> list[str]:
        functions = self._shown.done.flipped.functions.values() if self._shown is not None else ()
        flips = [flip for each in functions for flip in (*each.passed, *each.failed)]
        if self._shown is None or not flips:
            return ["no row has flipped"]
        from osmosis_ai.store.transcript import transcript

        first = flips[0]
        wanted = RolloutFilter(row=first.row_index, run_index=first.run_index)
        found = self.session.store.scored(self._shown.run_id, wanted, with_trajectory=True)
        return [line for each in found for line in transcript(each)]

    def _outside(self) -> dict[str, Path]:
        """Return the files outside the repository on which results depend."""
        rubrics = rubric_files(self._config.scoring.rubric, self._repository, self._cwd)
        files = [self._dataset, self._cwd / ".env", *rubrics]
        return {from_root(self._root, file): file for file in files if not file.resolve().is_relative_to(self._root)}

    def _display(self) -> AbstractContextManager[Display]:
        if self._options.json or not sys.stdout.isatty():
            return nullcontext(_JsonLines(self._output))
        STATUS.turn_off()
        return Screen(self._output, self._shown)

    @asynccontextmanager
    async def _sending(
        self, send: MemoryObjectSendStream[Save | str], group: anyio.abc.TaskGroup
    ) -> AsyncIterator[None]:
        """Merge file changes, key presses and Ctrl-C into one stream."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if self.interrupted:
                # os._exit skips clean-up, so restore the terminal first.
                self._terminal.close()
                pool = self.session.pool()
                if pool is not None:
                    pool.kill()
                os._exit(interrupted_code())
            self.interrupted = True
            send.send_nowait("q")

        stop = anyio.Event()
        await group.start(self._follower.follow, send, stop)
        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            self._terminal.enter_context(_keys(send))
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            stop.set()


class _JsonLines(Display):
    """A display that prints one JSON object per iteration on a line of stdout."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def show(self, iteration: Iteration, results: bytes) -> None:
        self._output.json(results)

    def broken(self, broken: BrokenSave) -> None:
        self._output.json(msgspec.json.encode({"error": broken}))


def _broken(error: OsmosisError, root: Path) -> BrokenSave:
    message = str(error)
    found = re.match(r"(?P<file>[^:]+?)(:(?P<line>\d+))?: ", message)
    if found is None or not (root / found["file"]).is_file():
        return BrokenSave(type(error).__name__, message)
    file, line = found["file"], int(found["line"] or 0)
    return BrokenSave(type(error).__name__, message, file, line or None, _excerpt(root / file, line) if line else None)


def _excerpt(file: Path, line: int) -> str | None:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    first = max(line - 1 - EXCERPT_LINES, 0)
    return "\n".join(
        f"{'>' if number == line else ' '} {number:4} | {text}"
        for number, text in enumerate(lines[first : line + EXCERPT_LINES], start=first + 1)
    )


@contextmanager
def _keys(send: MemoryObjectSendStream[Save | str]) -> Iterator[None]:
    """Send every command key as it is pressed; only on a terminal."""
    # The kernel stops a background process that changes the terminal's settings.
    if not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def pressed() -> None:
        for key in os.read(descriptor, 64).decode("utf-8", "replace"):
            if key in KEYS:
                send.send_nowait(key)

    # Not raw mode, in which Ctrl-C would be a key like any other.
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
