"""Run a command in this process while its test looks at it, types Ctrl-C and saves files.

Signals reach a process's main thread only. So a test with the mark `in_process` runs in a thread, and the command that
it starts with `running` in the main thread: it has this process's fork server, which has imported everything already.
Not for `osmosis serve`: once uvicorn has seen Ctrl-C, sse-starlette ends every event stream of the process.
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

from commands import Capture, Finished, run_here, worker_processes
from waiting import PATIENCE, eventually

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


class StagedCommand:
    """A command in the main thread of this process; `running.Running` is the same in a process of its own."""

    def __init__(self, stage: Stage, *arguments: str | Path, cwd: Path, environ: dict[str, str]) -> None:
        self._arguments, self._cwd, self._environ = arguments, cwd, environ
        self._stdout, self._stderr = Capture(), Capture()
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
            self._ended.set()

    def interrupt(self) -> None:
        """Ctrl-C."""
        assert not self._ended.is_set(), self.said()
        os.kill(os.getpid(), signal.SIGINT)

    def wait(self) -> Finished:
        """Wait for its end and for that of everything it started."""
        assert self._ended.wait(PATIENCE * 3), self.said()
        assert self._code is not None
        finished = Finished(self._code, self.printed(), self.said())
        eventually(lambda: not worker_processes(), lambda: f"left behind: {worker_processes()}\n{finished.stderr}")
        return finished

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition that must come true while the command runs."""

        def come_true() -> object:
            assert not self._ended.is_set(), f"it ended with {self._code}:\n{self.said()}"
            return condition()

        eventually(come_true, lambda: f"it never came true; the command said:\n{self.said()}")

    def descendants(self) -> list[psutil.Process]:
        """Every process that it has started and that runs."""
        return worker_processes()

    def printed(self) -> str:
        """Its stdout so far."""
        return self._stdout.text

    def said(self) -> str:
        """Its stderr so far."""
        return self._stderr.text

    def close(self) -> None:
        """End it, if a test has left it running."""
        if not self._ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)
        if not self._ended.wait(PATIENCE):
            # Nothing else can end the main thread; xdist tells of the test that took its process down.
            faulthandler.dump_traceback(file=sys.__stderr__)
            os._exit(70)
        self._stdout.close()
        self._stderr.close()
