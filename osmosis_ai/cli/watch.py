"""`--watch`: run, wait for a save, redo what it made stale, show what flipped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.abc
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.execute import COULD_NOT_START, INTERRUPTED, pool_options
from osmosis_ai.cli.options import RunOptions
from osmosis_ai.environment import load_env_files
from osmosis_ai.errors import ModelStartError, OsmosisError, StartError, StoreError, UsageError
from osmosis_ai.records import Record, Rollout, Score
from osmosis_ai.runtime.masking import Masker
from osmosis_ai.runtime.planning import RunRequest, check_output, find_tools, prepare
from osmosis_ai.runtime.pool import Pool
from osmosis_ai.runtime.report import results_object
from osmosis_ai.runtime.run import RunListener, RunPlan
from osmosis_ai.runtime.session import Iteration, Rerun, WatchSession
from osmosis_ai.runtime.store import RunStore
from osmosis_ai.runtime.tasks import task_group
from osmosis_ai.runtime.watch import FileHashes, Stale, classify, counts, read_gitignore, watch_files

__all__ = ["BrokenSave", "Display", "watch"]

EXCERPT_LINES = 2
KEYS = "rfdq"


class BrokenSave(Record, frozen=True):
    """Why what was saved can't be used; `excerpt` is the source around the line."""

    kind: str
    message: str
    file: str | None = None
    line: int | None = None
    excerpt: str | None = None


class Display(Protocol):
    """Shows what a watch session does, as a context manager for as long as it lasts."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: object) -> None: ...

    def begin(self, trigger: list[str], pool: Pool | None) -> None:
        """Something is being redone."""

    def listener(self, plan: RunPlan, done: int) -> RunListener:
        """Hears of the records of the iteration that begins."""
        ...

    def show(self, iteration: Iteration, result: dict[str, Any]) -> None:
        """An iteration has ended."""

    def unchanged(self) -> None:
        """The change made no difference."""

    def broken(self, broken: BrokenSave) -> None:
        """What was saved can't be used; the last good results stay."""

    def flipped_transcript(self, lines: list[str]) -> None:
        """Show the first flipped row's transcript, or take it away."""


def watch(request: RunRequest, options: RunOptions) -> int:
    """Watch the repository until the user quits.

    Args:
        request: What to run.
        options: How to show it.

    Returns:
        The exit code.
    """
    cwd = Path.cwd()
    output = Output(Masker.from_environment(os.environ).text, quiet=options.quiet)
    loaded: dict[str, str] = {}
    predecessor: WatchSession | None = None
    try:
        if options.workers == 0:
            raise UsageError(
                "--watch needs worker processes: code can't be loaded anew into this one; drop --workers 0"
            )
        while True:
            _, repository = find_tools(request.mcp, cwd)
            loaded = load_env_files(cwd, repository.root, again=loaded)
            keys = [key for key in (request.api_key, request.baseline_api_key) if key]
            masker = Masker.from_environment(os.environ, keys)
            output = Output(masker.text, quiet=options.quiet)
            prepare(request, cwd, os.environ)
            watcher = _Watcher(request, options, cwd, repository.root, output, masker, keys, loaded)
            code = asyncio.run(watcher.run(predecessor))
            if code is not None:
                return code
            predecessor = watcher.session
    except (StartError, StoreError) as error:
        output.fail(str(error))
        return COULD_NOT_START


class _Next(Record, frozen=True):
    """What the next iteration is for."""

    trigger: list[str]
    again: Rerun = Rerun()
    restart: bool = False
    quit: bool = False


class _Watcher:
    """Runs iterations, one at a time, and cancels one when the next is due."""

    def __init__(
        self,
        request: RunRequest,
        options: RunOptions,
        cwd: Path,
        root: Path,
        output: Output,
        masker: Masker,
        keys: list[str],
        environ: dict[str, str],
    ) -> None:
        self._keys = keys
        self._request = request
        self._options = options
        self._cwd = cwd
        self._root = root
        self._output = output
        self._masker = masker
        self._environ = environ
        self._output_file = check_output(options.output, cwd)
        self._hashes = FileHashes(root)
        self._interrupted = False
        self._fatal: OsmosisError | None = None
        self._first_flip: tuple[str, int, int] | None = None
        self.session: WatchSession

    async def run(self, predecessor: WatchSession | None) -> int | None:
        """Watch until the user quits; None when everything has to be set up anew."""
        display = self._display()
        with RunStore.open(self._root, masker=self._masker) as store:
            async with task_group() as group, self._events(group) as events:
                self.session = WatchSession(
                    self._request,
                    self._cwd,
                    os.environ,
                    store,
                    pool_options(self._options, store, self._keys, self._environ),
                    group,
                    predecessor=predecessor,
                )
                self._learn()
                try:
                    following = await self._follow(display, events)
                finally:
                    self.session.close()
                    with anyio.CancelScope(shield=True):
                        await self.session.finish(interrupted=self._interrupted)
            if self._fatal is not None:
                raise self._fatal
            if following.restart:
                return None
            return INTERRUPTED if self._interrupted else 0

    async def _follow(self, display: Display, events: MemoryObjectReceiveStream[set[str] | str]) -> _Next:
        following = _Next(["start"])
        with display:
            while not (following.quit or following.restart):
                async with task_group() as work:
                    work.start_soon(self._iterate, display, following, work)
                    following = await self._next(display, events)
                    work.cancel_scope.cancel()
                if self._fatal is not None:
                    break
        return following

    async def _iterate(self, display: Display, this: _Next, work: anyio.abc.TaskGroup) -> None:
        display.begin(this.trigger, self.session.pool())
        try:
            iteration = await self.session.iterate(this.trigger, display.listener, this.again)
        except ModelStartError as error:
            # Nothing that is saved can mend it.
            self._fatal = error
            work.cancel_scope.cancel()
        except (StartError, StoreError) as error:
            display.broken(_broken(error, self._root))
        else:
            if iteration is None:
                display.unchanged()
            else:
                self._show(display, iteration)
        self._learn()

    def _show(self, display: Display, iteration: Iteration) -> None:
        result = results_object(
            iteration.plan,
            iteration.report,
            self.session.outcomes,
            wall_ms=iteration.took_ms,
            run_id=iteration.run_id,
        )
        result["iteration"] = iteration.as_object()
        if self._output_file is not None:
            data = self._masker.encoded(msgspec.json.encode(result))
            self._output_file.write_bytes(msgspec.json.format(data, indent=2) + b"\n")
        flips = [*iteration.passed, *iteration.failed]
        self._first_flip = (iteration.run_id, flips[0].row_index, flips[0].run_index) if flips else None
        display.show(iteration, result)

    async def _next(self, display: Display, events: MemoryObjectReceiveStream[set[str] | str]) -> _Next:
        """Wait for something that makes the next iteration."""
        async for event in events:
            if event == "q":
                return _Next([], quit=True)
            if event == "r":
                return _Next(["key r"], Rerun(everything=True))
            if event == "f":
                return _Next(["key f"], Rerun(failed=True))
            if event == "d":
                display.flipped_transcript(self._transcript())
            elif isinstance(event, set):
                changed = self._hashes.changed(event)
                watched = self.session.watched()
                stale = Stale()
                for path in changed:
                    stale |= classify(path, watched)
                if stale.everything:
                    return _Next(changed, restart=True)
                if stale:
                    self.session.mark_stale(stale)
                    return _Next([path for path in changed if classify(path, watched)])
        return _Next([], quit=True)

    def _transcript(self) -> list[str]:
        if self._first_flip is None:
            return ["no row has flipped"]
        from osmosis_ai.runtime.transcript import transcript

        run_id, row_index, run_index = self._first_flip
        found = self.session.store.scored(run_id, with_trajectory=True, row=row_index, run_index=run_index)
        return [line for scored in found for line in transcript(scored)]

    def _learn(self) -> None:
        """Remember what the files hold that results may depend on."""
        watched = self.session.watched()
        folders = [self._root / "reward_fn", self._root / "reward_rubric"]
        if watched.mcp_dir is not None:
            folders.append(self._root / watched.mcp_dir)
        else:
            folders.append(self._root / "mcp")
        for folder in folders:
            if folder.is_dir():
                self._hashes.learn(
                    file.relative_to(self._root).as_posix() for file in folder.rglob("*") if file.is_file()
                )
        self._hashes.learn({*watched.tool_sources, *watched.function_sources, watched.dataset, ".env"} - {""})

    def _display(self) -> Display:
        if self._options.json or not sys.stdout.isatty():
            return _JsonLines(self._output, self._masker)
        from osmosis_ai.cli.watch_screen import Screen

        return Screen(self._output)

    @asynccontextmanager
    async def _events(self, group: anyio.abc.TaskGroup) -> AsyncIterator[MemoryObjectReceiveStream[set[str] | str]]:
        """Changed files, pressed keys and Ctrl-C, in one stream."""
        send, receive = anyio.create_memory_object_stream[set[str] | str](1000)
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if self._interrupted:
                pool = self.session.pool()
                if pool is not None:
                    pool.kill()
                os._exit(INTERRUPTED)
            self._interrupted = True
            send.send_nowait("q")

        stop = anyio.Event()

        async def changes() -> None:
            ignored = read_gitignore(self._root)
            async for paths in watch_files(self._root, lambda path: counts(path, ignored), stop):
                await send.send(paths)

        loop.add_signal_handler(signal.SIGINT, interrupt)
        group.start_soon(changes)
        try:
            with _keys(send):
                yield receive
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            stop.set()


class _JsonLines:
    """One object per iteration on a line of stdout."""

    def __init__(self, output: Output, masker: Masker) -> None:
        self._output = output
        self._masker = masker

    def __enter__(self) -> _JsonLines:
        return self

    def __exit__(self, *exc: object) -> None:
        """There is nothing to take down."""

    def begin(self, trigger: list[str], pool: Pool | None) -> None:
        """Nothing until it has ended."""

    def listener(self, plan: RunPlan, done: int) -> RunListener:
        return _Nobody()

    def show(self, iteration: Iteration, result: dict[str, Any]) -> None:
        self._line(result)

    def unchanged(self) -> None:
        """Nothing was redone, so there is nothing to tell."""

    def broken(self, broken: BrokenSave) -> None:
        self._line({"error": {name: getattr(broken, name) for name in broken.__struct_fields__}})

    def flipped_transcript(self, lines: list[str]) -> None:
        """There are no keys without a terminal."""

    def _line(self, value: dict[str, Any]) -> None:
        self._output.line(self._masker.encoded(msgspec.json.encode(value)).decode("utf-8"))


class _Nobody:
    def rollout_done(self, rollout: Rollout) -> None:
        """Not shown."""

    def scores_done(self, rollout: Rollout, scores: list[Score]) -> None:
        """Not shown."""


def _broken(error: OsmosisError, root: Path) -> BrokenSave:
    message = str(error)
    found = re.match(r"(?P<file>[^\s:]+\.\w+):(?P<line>\d+): ", message)
    if found is None:
        return BrokenSave(type(error).__name__, message)
    file, line = found["file"], int(found["line"])
    return BrokenSave(type(error).__name__, message, file, line, _excerpt(root / file, line))


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
def _keys(send: MemoryObjectSendStream[set[str] | str]) -> Iterator[None]:
    """Send every key that means something, as it is pressed; only on a terminal."""
    if not sys.stdin.isatty():
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

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
