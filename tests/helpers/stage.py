"""Run a command in this process while its test looks at it, types Ctrl-C and saves files.

Signals reach a process's main thread only. So a test with the mark `in_process` runs in a thread, and the command that
it starts with `running` in the main thread: it has this process's fork server, which has imported everything already.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
from sse_starlette.sse import AppStatus

from commands import Command, run_here, worker_processes
from waiting import PATIENCE

_stages: dict[threading.Thread, Stage] = {}


class Stage:
    """The main thread, while it plays the commands of a test."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[StagedCommand | None] = queue.SimpleQueue()

    def play(self, test: Callable[[], object]) -> None:
        """Run a test in a thread, and its commands here, one at a time; raises what the test does."""
        done: Future[None] = Future()

        def body() -> None:
            _stages[threading.current_thread()] = self
            try:
                test()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
            finally:
                del _stages[threading.current_thread()]
                self._commands.put(None)

        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            threading.Thread(target=body).start()
            while (command := self._commands.get()) is not None:
                command.run()
        finally:
            signal.signal(signal.SIGINT, before)
        done.result()

    def start(self, command: StagedCommand) -> None:
        """Have a command run as soon as the one before it has ended."""
        self._commands.put(command)


def current_stage() -> Stage | None:
    """The stage of the test that this thread runs, if it has one."""
    return _stages.get(threading.current_thread())


class StagedCommand(Command):
    """A command in the main thread of this process; `running.Running` is the same in a process of its own."""

    def __init__(self, stage: Stage, *arguments: str | Path, cwd: Path, environ: dict[str, str]) -> None:
        super().__init__()
        self._arguments, self._cwd, self._environ = arguments, cwd, environ
        self._code: int | None = None
        self._ended = threading.Event()
        stage.start(self)

    def run(self) -> None:
        """Run it; for the stage."""
        playing = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._code = run_here(self._arguments, self._cwd, self._environ, self._stdout, self._stderr)
        except Exception:
            # As Python ends.
            self._code = 1
            self._stderr.write(traceback.format_exc())
        finally:
            signal.signal(signal.SIGINT, playing)
            # A Ctrl-C that uvicorn sees ends every event stream of the process, those of later commands too.
            AppStatus.should_exit = False
            self._ended.set()

    def ended(self, seconds: float = 0.0) -> int | None:
        return self._code if self._ended.wait(seconds) else None

    def interrupt(self) -> None:
        assert not self._ended.is_set(), self.said()
        os.kill(os.getpid(), signal.SIGINT)

    def descendants(self) -> list[psutil.Process]:
        return worker_processes()

    def close(self) -> None:
        """End it, if a test has left it running."""
        if not self._ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)
        if not self._ended.wait(PATIENCE):
            # Nothing else can end the main thread; xdist tells of the test that took its process down.
            faulthandler.dump_traceback(file=sys.__stderr__)
            os._exit(70)
        super().close()
