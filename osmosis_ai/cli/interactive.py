"""`osmosis test --interactive`: step through rollouts at a prompt."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import anyio.from_thread
import msgspec

from osmosis_ai.cli import steps
from osmosis_ai.cli.options import Given, OutputOptions, output_options
from osmosis_ai.cli.prompt import Prompt, edited_text
from osmosis_ai.cli.run import begin_command, introduce, save_results
from osmosis_ai.cli.session import CommandSession, ExitCode, command_session
from osmosis_ai.cli.signals import ended_by_signal, interrupted_code
from osmosis_ai.config import RunConfig
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path, replaced_file
from osmosis_ai.runtime.protocol import Paused
from osmosis_ai.runtime.run.debugger import Debugger, Ended, RefusedError
from osmosis_ai.runtime.run.plan import POLICY
from osmosis_ai.runtime.run.session import RunSession

__all__ = ["check_interactive", "interact"]

HELP = """\
n, next            go to the next step: request, reply, results
c, continue        run to the end of the rollout
m, messages        show the messages so far, in full
t, tools           show the tools with their schemas
e, edit            edit the current request, reply or results in $EDITOR
s, score           score the messages so far with every reward function
call TOOL [JSON]   call a tool by hand in this rollout's session
save [FILE]        write the trajectory as JSON
r, row [N]         start row N; without N restart the current row
q, quit            quit
?, help            show this list"""
SHORT = {"n": "next", "c": "continue", "m": "messages", "t": "tools", "e": "edit", "s": "score", "r": "row"}
SHORT |= {"?": "help", "h": "help"}


def check_interactive(config: RunConfig, output: OutputOptions) -> None:
    """Refuse options that conflict with `--interactive`; raises UsageError."""
    excluded = {
        "--watch": (output.watch, "one stops at every step, the other runs by itself"),
        "--json": (output.json, "the steps are shown as text; -o FILE writes the results as JSON"),
        "--view": (output.view, "the steps are in the terminal; `osmosis view` in another one shows the rows done"),
        "--quiet": (output.quiet, "it would have nothing to show"),
        "--resume": (config.resume.resume or config.resume.resume_run, "an interactive run is always a new one"),
        "--name": (config.resume.name, "an interactive run is always a new one"),
        "--rows": (config.data.rows, "--row N chooses the row to start with"),
        "--cluster": (config.workers.cluster, "the debugger pauses in a worker of this machine"),
        "--shard": (config.data.shard, "--row N chooses the row to start with"),
        "--retry-failed": (config.resume.retry_failed, "an interactive run is always a new one"),
        "--rollout": (config.workflow.rollout, "a rollout server calls the model when it wants to"),
    }
    for name, (given, why) in excluded.items():
        if given:
            raise UsageError(f"--interactive and {name} don't go together: {why}")


def interact(given: Given, row: int | None) -> int:
    """Step through rollouts until the user quits, and return the exit code."""
    output = output_options(given)
    with command_session(store_error=ExitCode.FAILED) as session:
        config, results = begin_command(session, given, "test", output)
        check_interactive(config, output)
        # Only one rollout runs at a time, so more workers would only load the repository again.
        if config.workers.workers is None:
            config = msgspec.structs.replace(config, workers=msgspec.structs.replace(config.workers, workers=1))
        return _Session(session, config, results, row).run()


class _Session:
    """One run of the command."""

    def __init__(self, session: CommandSession, config: RunConfig, results: Path | None, row: int | None) -> None:
        self._session = session
        self._config = config
        self._results = results
        self._row = row
        self._output = session.output
        self._interrupted = False
        self._run: RunSession | None = None

    def run(self) -> int:
        """Run the command and return the exit code."""
        # A byte that isn't UTF-8 mustn't end the session.
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        # With --workers 0 descriptor 1 points to stderr while the repository is loaded; results still go to stdout.
        stdout = self._output.results.file = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
        # The event loop runs in another thread: this one waits at the prompt, and gets the signals.
        before = signal.signal(signal.SIGINT, self._interrupt)
        hear = partial(introduce, self._output)
        opened = RunSession.open(self._config, self._session.cwd, listener=hear, interactive=True)
        try:
            with (
                anyio.from_thread.start_blocking_portal() as portal,
                portal.wrap_async_context_manager(opened) as self._run,
            ):
                return self._talk(portal, self._run)
        except KeyboardInterrupt:
            self._output.warn("interrupted before the first rollout")
            return ExitCode.INTERRUPTED
        finally:
            signal.signal(signal.SIGINT, before)
            stdout.close()

    def _talk(self, portal: anyio.from_thread.BlockingPortal, run: RunSession) -> int:
        rows = run.rows
        if self._row is not None and self._row not in rows:
            raise UsageError(f"--row {self._row}: the rows are {rows.start} to {rows.stop - 1}")
        portal.call(run.begin)
        prompt = Prompt(run.store.path.parent / "interactive_history", self._output.masker.text)
        debugger = Debugger(portal, run)
        try:
            with prompt:
                commands = _Commands(self._session, debugger, prompt)
                commands.talk(rows.start if self._row is None else self._row, self._allow_interrupt)
        except KeyboardInterrupt:
            self._interrupted = True
            debugger.leave()
        finally:
            code = self._finish(portal, run)
        return code

    def _finish(self, portal: anyio.from_thread.BlockingPortal, run: RunSession) -> int:
        run.interrupted = self._interrupted
        report = portal.call(run.conclude)
        if run.id:
            self._output.say(f"run {run.id}")
        if self._results is not None:
            save_results(self._session.masker.encoded(report.to_json()), self._results)
            self._output.say(f"results written to {self._results}")
        if self._interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.OK if report.whole else ExitCode.FAILED

    def _allow_interrupt(self) -> None:
        self._interrupted = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stop the running step at Ctrl-C; exit at once at a second one before it has stopped."""
        if self._interrupted:
            if self._run is not None:
                self._run.pool.kill()
            # A normal exit would wait for the thread of the event loop.
            os._exit(interrupted_code())
        self._interrupted = True
        raise KeyboardInterrupt


class _Commands:
    """The prompt's commands: each `do_` method is one."""

    def __init__(self, session: CommandSession, debugger: Debugger, prompt: Prompt) -> None:
        self._masker = session.masker
        self._output = session.output
        self._debugger = debugger
        self._prompt = prompt
        self._refused_text: tuple[Paused, str] | None = None

    def talk(self, row: int, allow_interrupt: Callable[[], None]) -> None:
        """Start a row, then run commands until the user quits; call `allow_interrupt` after handling a Ctrl-C.

        Raises KeyboardInterrupt at a Ctrl-C if the commands don't come from a terminal.
        """
        self._output.say("n goes to the next step, ? lists the commands")
        line: str | None = f"r {row}"
        while line is not None:
            word, _, rest = line.strip().partition(" ")
            if word in ("q", "quit", "exit"):
                break
            try:
                self._do(word, rest.strip())
                line = self._prompt.read(self._state())
            except KeyboardInterrupt:
                # Nobody is there to go on with another command.
                if not self._prompt.on_terminal or ended_by_signal():
                    raise
                line = self._stopped_by_hand()
                allow_interrupt()
        if line is None and self._prompt.on_terminal:
            self._output.line("")
        if self._debugger.leave():
            self._output.say(self._left())

    def _stopped_by_hand(self) -> str:
        """Handle Ctrl-C: at the prompt, discard the line; elsewhere, abandon the rollout."""
        self._output.line("")
        if self._debugger.paused is None and self._debugger.leave():
            self._output.warn(f"stopped; {self._left()}")
        return ""

    def _left(self) -> str:
        assert self._debugger.row is not None
        return f"row {self._debugger.row.index} was abandoned and isn't recorded"

    def _state(self) -> str:
        paused, row = self._debugger.paused, self._debugger.row
        if row is None:
            return "osmosis> "
        where = "ended" if paused is None else f"{paused.stage} {paused.index + 1}"
        return f"row {row.index}, {where}> "

    def _do(self, word: str, rest: str) -> None:
        if not word:
            return
        command: Callable[[str], None] | None = getattr(self, f"do_{SHORT.get(word, word)}", None)
        if command is None:
            self._output.warn(f"there is no command {word!r}; ? lists the commands")
            return
        try:
            command(rest)
        except (RefusedError, UsageError) as refused:
            self._output.warn(str(refused))

    def do_next(self, rest: str) -> None:
        self._show(self._debugger.go_on())

    def do_continue(self, rest: str) -> None:
        stop = self._debugger.go_on()
        self._show(stop)
        while isinstance(stop, Paused):
            stop = self._debugger.go_on()
            self._show(stop)

    def do_messages(self, rest: str) -> None:
        if not self._debugger.messages:
            raise RefusedError("there are no messages yet; r N starts row N")
        self._print(steps.messages(self._debugger.messages))

    def do_tools(self, rest: str) -> None:
        tools = self._debugger.pool.loaded.tools
        if not tools:
            raise RefusedError("the server has no tools")
        self._print(steps.tools(tools))

    def do_row(self, rest: str) -> None:
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

    def do_edit(self, rest: str) -> None:
        paused = self._debugger.paused
        text = self._masker.encoded(msgspec.json.encode(_single(self._debugger.editable())))
        shown = msgspec.json.format(text, indent=2).decode("utf-8") + "\n"
        # Reopen a refused edit, but only at the step it was made at.
        if self._refused_text is not None and self._refused_text[0] is paused:
            shown = self._refused_text[1]
        written = edited_text(shown, os.environ, on_terminal=self._prompt.on_terminal)
        self._refused_text = None
        try:
            read: Any = msgspec.json.decode(written)
            # Compare with the masked text that was shown, so that masked keys don't count as changed.
            changed = read != msgspec.json.decode(text) and self._debugger.edit(read)
        except (msgspec.DecodeError, RefusedError) as error:
            assert paused is not None
            self._refused_text = (paused, written)
            why = f"it isn't JSON: {error}" if isinstance(error, msgspec.DecodeError) else str(error)
            raise RefusedError(f"not changed: {why}; e reopens it as you left it") from error
        if not changed:
            raise RefusedError("nothing was changed")
        self._output.say("changed; n continues with the edit, which the record mentions")
        assert self._debugger.paused is not None
        self._show(self._debugger.paused)

    def do_score(self, rest: str) -> None:
        self._print(steps.scores(self._debugger.score()))

    def do_call(self, rest: str) -> None:
        tool, _, arguments = rest.partition(" ")
        if not tool:
            raise RefusedError('call takes a tool and its arguments, for example: call add {"a": 1, "b": 2}')
        result = self._debugger.call(tool, arguments.strip() or "{}")
        if isinstance(result, Ended):
            self._output.warn(f"the rollout ended while {tool} ran by hand")
            self._show(result)
        else:
            self._print(steps.called(tool, result))

    def do_save(self, rest: str) -> None:
        data = self._masker.encoded(msgspec.json.encode(self._debugger.trajectory()))
        file = given_path(rest, Path()) if rest else self._free_file()
        try:
            with replaced_file(file) as sink:
                sink.write(msgspec.json.format(data, indent=2) + b"\n")
        except OSError as error:
            raise RefusedError(f"{file} can't be written: {error.strerror or error}") from error
        self._output.say(f"written to {file}")

    def _free_file(self) -> Path:
        assert self._debugger.row is not None
        name = f"trajectory-row-{self._debugger.row.index}"
        names = (f"{name}-{number}.json" if number > 1 else f"{name}.json" for number in itertools.count(1))
        return next(file for file in map(Path, names) if not file.exists())

    def do_help(self, rest: str) -> None:
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
            self._output.line(text)


def _single(messages: list[Any]) -> Any:
    """Return a single message without the list around it, for the editor."""
    return messages[0] if len(messages) == 1 else messages
