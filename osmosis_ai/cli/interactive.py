"""`osmosis test --interactive`: a prompt at every step of a rollout."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import anyio.from_thread
import msgspec

from osmosis_ai.cli import steps
from osmosis_ai.cli.execute import FAILED, INTERRUPTED, Start, loaded, open_store, pool_options, prepared
from osmosis_ai.cli.options import RunOptions
from osmosis_ai.cli.prompt import Prompt, edited_text
from osmosis_ai.data.dataset import DatasetSummary
from osmosis_ai.errors import UsageError
from osmosis_ai.runtime.pool.pool import SteppingPool
from osmosis_ai.runtime.protocol import Paused
from osmosis_ai.runtime.run.debugger import Debugger, Ended, RefusedError
from osmosis_ai.runtime.run.prepare import RunRequest
from osmosis_ai.runtime.run.report import build_report, run_summary, score_names
from osmosis_ai.runtime.run.resume import run_config, run_identity
from osmosis_ai.runtime.run.run import POLICY, RunPlan
from osmosis_ai.store import RunStore
from osmosis_ai.store.scratch import ScratchStore
from osmosis_ai.text import visible

__all__ = ["check_interactive", "interact"]

HELP = """\
n, next            go on to the next step: request, reply, results
c, continue        go on to the rollout's end
m, messages        the messages so far, in full
t, tools           the tools with their schemas
e, edit            change what is shown (request, reply or results) in $EDITOR before going on
s, score           score the messages so far with every reward function
call TOOL [JSON]   call a tool by hand in this rollout's session
save [FILE]        write the trajectory as JSON
r, row [N]         start row N; without N the same row again
q, quit            end
?, help            this list"""


def check_interactive(options: RunOptions) -> None:
    """Refuse what doesn't go with `--interactive`.

    Raises:
        UsageError: The option, and why.
    """
    excluded = {
        "--watch": (options.watch, "one stops at every step, the other runs by itself"),
        "--json": (options.json, "what is shown at each step is text; -o FILE writes the results as JSON"),
        "--quiet": (options.quiet, "it would have nothing to show"),
        "--resume": (options.resume or options.resume_run is not None, "an interactive run is always a new one"),
        "--retry-failed": (options.retry_failed, "an interactive run is always a new one"),
    }
    for name, (given, why) in excluded.items():
        if given:
            raise UsageError(f"--interactive and {name} don't go together: {why}")


def interact(request: RunRequest, options: RunOptions, row: int | None) -> int:
    """Step through rollouts until the user quits.

    Args:
        request: What may be run.
        options: How to run it; one worker unless they say otherwise.
        row: The first row, None for the first of the dataset.

    Returns:
        The exit code.
    """
    check_interactive(options)
    if options.workers is None:
        options = msgspec.structs.replace(options, workers=1)
    return prepared(request, options, lambda start: _Session(start, options, row).run())


class _Session:
    """One run of the command, from a prepared request to the exit code."""

    def __init__(self, start: Start, options: RunOptions, row: int | None) -> None:
        self._start = start
        self._options = options
        self._row = row
        self._output = start.output
        self._began = monotonic()
        self._interrupted = False
        self._pool: SteppingPool | None = None

    def run(self) -> int:
        """Run it all; gives the exit code."""
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        # With --workers 0 descriptor 1 leads to stderr while the repository is loaded; results go on to stdout.
        self._output.results.file = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            with open_store(self._start) as store, anyio.from_thread.start_blocking_portal() as portal:
                return self._run_in(portal, store)
        except KeyboardInterrupt:
            self._output.warn("interrupted before the first rollout")
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGINT, before)

    def _run_in(self, portal: anyio.from_thread.BlockingPortal, store: RunStore) -> int:
        workers = pool_options(self._options, store, self._start.keys, self._start.environ)
        prompt = Prompt(store.path.parent / "interactive_history", self._output.mask)
        with (
            portal.wrap_async_context_manager(ScratchStore.open(self._start.masker)) as scratch,
            portal.wrap_async_context_manager(loaded(self._start, workers, scratch.path)) as (pool, plan, summary),
        ):
            self._pool = pool
            rows = range(plan.offset, plan.offset + plan.total_rows)
            if self._row is not None and self._row not in rows:
                raise UsageError(f"--row {self._row}: the rows are {rows.start} to {rows.stop - 1}")
            run_id = portal.call(_begin, store, pool, plan, summary)
            debugger = Debugger(portal, pool, store, scratch, run_id, plan)
            try:
                with prompt:
                    commands = _Commands(self._start, debugger, prompt)
                    commands.talk(rows.start if self._row is None else self._row, self._allow_interrupt)
            except KeyboardInterrupt:
                self._interrupted = True
                debugger.leave()
            finally:
                code = portal.call(self._finish, store, pool, plan, run_id)
            return code

    async def _finish(self, store: RunStore, pool: SteppingPool, plan: RunPlan, run_id: str) -> int:
        outcomes = list(store.outcomes(run_id))
        plan = msgspec.structs.replace(plan, total_rows=len(outcomes))
        names = score_names(pool.loaded, {name for outcome in outcomes for name in outcome.scores})
        wall_ms = (monotonic() - self._began) * 1000
        report = build_report(plan, names, outcomes, run_id=run_id, store=store.path, wall_ms=wall_ms, interactive=True)
        if outcomes:
            await store.mark(run_id, "interrupted" if self._interrupted else "finished", run_summary(report))
            self._output.say(f"run {run_id}")
        else:
            await store.delete_run(run_id)
        if self._start.output_file is not None:
            data = self._start.masker.encoded(report.to_json(lambda: outcomes))
            self._start.output_file.write_bytes(msgspec.json.format(data, indent=2) + b"\n")
            self._output.say(f"results written to {self._start.output_file}")
        if self._interrupted:
            return INTERRUPTED
        return 0 if report.whole else FAILED

    def _allow_interrupt(self) -> None:
        self._interrupted = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C stops what goes on; a second one before that has stopped ends at once."""
        if self._interrupted:
            if self._pool is not None:
                self._pool.kill()
            os._exit(INTERRUPTED)
        self._interrupted = True
        raise KeyboardInterrupt


async def _begin(store: RunStore, pool: SteppingPool, plan: RunPlan, summary: DatasetSummary) -> str:
    """A run of its own: what a person stepped through is never resumed, and never taken for an ordinary run."""
    identity = {**run_identity(plan, summary.sha256, pool.loaded.tool_sources), "interactive": True}
    config = {**run_config(plan, pool.loaded), "interactive": True}
    # Which rows will be run is decided at the prompt.
    del config["planned"]
    return await store.create_run(plan.command, identity=identity, config=config)


class _Commands:
    """What can be typed at the prompt."""

    def __init__(self, start: Start, debugger: Debugger, prompt: Prompt) -> None:
        self._start = start
        self._output = start.output
        self._debugger = debugger
        self._prompt = prompt
        self._refused_text: tuple[Paused, str] | None = None
        self._commands: dict[str, Callable[[str], None]] = {}
        for names, command in (
            (("n", "next"), self._next),
            (("c", "continue"), self._continue),
            (("m", "messages"), self._messages),
            (("t", "tools"), self._tools),
            (("r", "row"), self._row),
            (("e", "edit"), self._edit),
            (("s", "score"), self._score),
            (("call",), self._call),
            (("save",), self._save),
            (("?", "h", "help"), self._help),
        ):
            self._commands.update(dict.fromkeys(names, command))

    def talk(self, row: int, allow_interrupt: Callable[[], None]) -> None:
        """Start a row, then do what is typed until the user quits.

        Args:
            row: The first row.
            allow_interrupt: Called whenever a Ctrl-C has been dealt with.

        Raises:
            KeyboardInterrupt: Ctrl-C, when nobody is there to go on.
        """
        self._output.say("n goes on to the next step, ? lists the commands")
        line: str | None = f"r {row}"
        while line is not None:
            word, _, rest = line.strip().partition(" ")
            if word in ("q", "quit", "exit"):
                break
            try:
                self._do(word, rest.strip())
                line = self._prompt.read(self._state())
            except KeyboardInterrupt:
                if not self._prompt.on_terminal:
                    raise
                line = self._stopped_by_hand()
                allow_interrupt()
        if line is None and self._prompt.on_terminal:
            self._output.line("")
        if self._debugger.leave():
            self._output.say(self._left())

    def _stopped_by_hand(self) -> str:
        """Ctrl-C at the prompt takes the line away; anywhere else, the rollout."""
        self._output.line("")
        if self._debugger.paused is None and self._debugger.leave():
            self._output.warn(f"stopped; {self._left()}")
        return ""

    def _left(self) -> str:
        assert self._debugger.row is not None
        return f"row {self._debugger.row.index} was left before its end and isn't recorded"

    def _state(self) -> str:
        paused, row = self._debugger.paused, self._debugger.row
        if row is None:
            return "osmosis> "
        where = "ended" if paused is None else f"{paused.stage} {paused.index + 1}"
        return f"row {row.index}, {where}> "

    def _do(self, word: str, rest: str) -> None:
        if not word:
            return
        command = self._commands.get(word)
        if command is None:
            self._output.warn(f"there is no command {word!r}; ? lists the commands")
            return
        try:
            command(rest)
        except (RefusedError, UsageError) as refused:
            self._output.warn(str(refused))

    def _next(self, rest: str) -> None:
        self._show(self._debugger.go_on())

    def _continue(self, rest: str) -> None:
        stop = self._debugger.go_on()
        self._show(stop)
        while isinstance(stop, Paused):
            stop = self._debugger.go_on()
            self._show(stop)

    def _messages(self, rest: str) -> None:
        if not self._debugger.messages:
            raise RefusedError("there are no messages yet; r N starts row N")
        self._print(steps.messages(self._debugger.messages))

    def _tools(self, rest: str) -> None:
        tools = self._debugger.pool.loaded.tools
        if not tools:
            raise RefusedError("the server has no tools")
        self._print(steps.tools(tools))

    def _row(self, rest: str) -> None:
        rows = self._debugger.rows
        if not rest and self._debugger.row is not None:
            rest = str(self._debugger.row.index)
        if not rest.isdecimal():
            raise RefusedError(f"r takes a row's number, from {rows.start} to {rows.stop - 1}")
        left = self._left() if self._debugger.paused is not None else None
        stop = self._debugger.start(int(rest))
        if left is not None:
            self._output.say(left)
        self._show(stop)

    def _edit(self, rest: str) -> None:
        paused = self._debugger.paused
        text = self._start.masker.encoded(msgspec.json.encode(_single(self._debugger.editable())))
        shown = msgspec.json.format(text, indent=2).decode("utf-8") + "\n"
        if self._refused_text is not None and self._refused_text[0] is paused:
            shown = self._refused_text[1]
        written = edited_text(shown, os.environ, on_terminal=self._prompt.on_terminal)
        self._refused_text = None
        try:
            read: Any = msgspec.json.decode(written)
            # Compared as it was shown: where a key's value was masked, it stays what it was.
            changed = read != msgspec.json.decode(text) and self._debugger.edit(read)
        except (msgspec.DecodeError, RefusedError) as error:
            assert paused is not None
            self._refused_text = (paused, written)
            why = f"it isn't JSON: {error}" if isinstance(error, msgspec.DecodeError) else str(error)
            raise RefusedError(f"not changed: {why}; e opens it again as you left it") from error
        if not changed:
            raise RefusedError("nothing was changed")
        self._output.say("changed; n goes on with it, and the record says that it was edited")
        assert self._debugger.paused is not None
        self._show(self._debugger.paused)

    def _score(self, rest: str) -> None:
        self._print(steps.scores(self._debugger.score()))

    def _call(self, rest: str) -> None:
        tool, _, arguments = rest.partition(" ")
        if not tool:
            raise RefusedError('call takes a tool and its arguments, for example: call add {"a": 1, "b": 2}')
        result = self._debugger.call(tool, arguments.strip() or "{}")
        if isinstance(result, Ended):
            self._output.warn(f"the rollout ended while {tool} ran by hand")
            self._show(result)
        else:
            self._print(steps.called(tool, result))

    def _save(self, rest: str) -> None:
        data = self._start.masker.encoded(msgspec.json.encode(self._debugger.trajectory()))
        file = Path(rest).expanduser() if rest else self._free_file()
        try:
            file.write_bytes(msgspec.json.format(data, indent=2) + b"\n")
        except OSError as error:
            raise RefusedError(f"{file} can't be written: {error.strerror or error}") from error
        self._output.say(f"written to {file}")

    def _free_file(self) -> Path:
        assert self._debugger.row is not None
        name, number = f"trajectory-row-{self._debugger.row.index}", 1
        file = Path(f"{name}.json")
        while file.exists():
            number += 1
            file = Path(f"{name}-{number}.json")
        return file

    def _help(self, rest: str) -> None:
        self._print([HELP])

    def _show(self, stop: Paused | Ended) -> None:
        if isinstance(stop, Ended):
            self._print(steps.ended(stop, edited=self._debugger.edited))
            if self._prompt.on_terminal:
                self._output.say("r N starts row N, save writes the trajectory, q quits")
        else:
            debugger = self._debugger
            self._print(steps.paused(stop, debugger.plan.policies[POLICY], debugger.pool.loaded.tools))

    def _print(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._output.line(visible(text))


def _single(messages: list[Any]) -> Any:
    """One message stands for itself in the editor, without a list around it."""
    return messages[0] if len(messages) == 1 else messages
