"""Send user code's output to the run's log, each line labelled with its row, and never to the command's own streams."""

from __future__ import annotations

import io
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from osmosis_ai.folders import private_file
from osmosis_ai.text import visible

__all__ = [
    "Capture",
    "LogWriter",
    "capture_output",
    "hand_over_log",
    "held_output",
    "last_lines",
    "new_log",
    "output_in_file",
]

JOB_BYTES = 1 << 20
PROCESS_BYTES = 8 << 20
LINE_CHARACTERS = 8192
KEPT_LOGS = 50
DRAIN_SECONDS = 0.5
TAIL_BYTES = 1 << 16


def new_log(folder: Path, name: str) -> Path:
    """Return the path of a log in a repository's `.osmosis` folder, and delete all but the latest older ones.

    `name` is the run's id, or a name that begins with it.
    """
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    for old in sorted(logs.glob("*.log"), key=_modified)[: -KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    return logs / f"{name}.log"


def hand_over_log(log: Path, run_id: str) -> None:
    """Name a log after the run that it turned out to belong to, beside the run's earlier logs."""
    taken = len([*log.parent.glob(f"{run_id}*.log")])
    # The first of them may be deleted by now, so this number may be taken too.
    names = (f"{run_id}-{number}.log" if number > 1 else f"{run_id}.log" for number in itertools.count(taken + 1))
    with suppress(OSError):
        log.rename(next(path for path in map(log.with_name, names) if not path.exists()))


def run_logs(folder: Path, run_id: str) -> list[Path]:
    """Return the logs in a repository's `.osmosis` folder of a run's parts, in their order."""
    return sorted((folder / "logs").glob(f"{run_id}*.log"), key=_modified)


def _modified(log: Path) -> float:
    # Another process may just have deleted it.
    return log.stat().st_mtime if log.exists() else 0.0


def last_lines(log: Path, pid: int, count: int) -> list[str]:
    """Return the last `count` lines that a process wrote to a log without belonging to a job.

    Fewer, if they are far from the log's end. Output that a dead process still held back counts, and is deleted.
    """
    held = held_output(log, pid)
    if held.exists():
        found = _tail(held)
        held.unlink()
    else:
        lines = (line.partition("] ") for line in _tail(log) if line.startswith(f"[worker {pid} "))
        found = [text for _, _, text in lines]
    return found[-count:]


def _tail(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            opened.seek(-min(TAIL_BYTES, file.stat().st_size), os.SEEK_END)
            return opened.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


class LogWriter:
    """Appends labelled lines to a log file, created by the first one; several processes may append to one file.

    Without a `path` it keeps nothing. `live` is a file descriptor that gets a copy of every line, for `--debug`.
    """

    def __init__(self, path: Path | None, mask: Callable[[str], str], live: int | None = None) -> None:
        self._path = path
        self._file: int | None = None
        self._opening = threading.Lock()
        self._mask = mask
        self._live = live
        self._written: dict[str, int] = {}

    def write(self, label: str, stream: str, line: str, budget: int = JOB_BYTES) -> None:
        """Append one line. Once a label exceeds its budget (bytes), drop its lines; the log says so."""
        size = self._written.get(label, 0)
        if size > budget:
            return
        shown = line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} … ({len(line)} characters)"
        self._written[label] = size + len(shown) + 1
        if self._written[label] > budget:
            shown = f"… further output left out, over {budget >> 20} MiB"
        data = f"[{label} {stream}] {visible(self._mask(shown))}\n".encode("utf-8", "replace")
        # A log without its folder or space on its disk must not fail the code that prints.
        with suppress(OSError):
            _append(self._opened(), data)
        with suppress(OSError):
            _append(self._live, data)

    def _opened(self) -> int | None:
        if self._file is None and self._path is not None:
            with self._opening:
                if self._file is None:
                    self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return self._file

    def forget(self, label: str) -> None:
        """Drop the count of a label, once its job is over."""
        self._written.pop(label, None)


def _append(target: int | None, line: bytes) -> None:
    if target is not None:
        # One write per line: with O_APPEND, lines of several processes don't mix.
        os.write(target, line)


class _JobStream(io.TextIOBase):
    """A replacement for sys.stdout or sys.stderr that splits output into lines per job."""

    def __init__(self, writer: LogWriter, stream: str, label: Callable[[], str], descriptor: int) -> None:
        self._writer = writer
        self._stream = stream
        self._label = label
        self._descriptor = descriptor
        self._parts: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str, /) -> int:
        label = self._label()
        with self._lock:
            *lines, rest = (self._parts.pop(label, "") + text).split("\n")
            # A line that never ends must not pile up in memory.
            if len(rest) > LINE_CHARACTERS:
                lines, rest = [*lines, rest], ""
            if rest:
                self._parts[label] = rest
            for line in lines:
                self._writer.write(label, self._stream, line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: unfinished lines wait for their end, because several jobs share the stream."""

    def finish(self, label: str) -> None:
        """Write a label's unfinished line."""
        with self._lock:
            rest = self._parts.pop(label, "")
            if rest:
                self._writer.write(label, self._stream, rest)

    def finish_all(self) -> None:
        """Write every label's unfinished line."""
        for label in list(self._parts):
            self.finish(label)


class Capture:
    """The redirection of this process's output to a log. Made by `capture_output`."""

    def __init__(self, writer: LogWriter, streams: Sequence[_JobStream], drains: Sequence[threading.Thread]) -> None:
        self._writer = writer
        self._streams = streams
        self._drains = drains

    def finish(self, label: str) -> None:
        """Log the unfinished lines of a job that is over."""
        for stream in self._streams:
            stream.finish(label)
        self._writer.forget(label)

    def close(self) -> None:
        """Log all pending output; later output of child processes is lost."""
        for stream in self._streams:
            stream.finish_all()
        null = os.open(os.devnull, os.O_WRONLY)
        # Replacing the pipes' write ends gives the drains their EOF.
        for descriptor in (1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        deadline = time.monotonic() + DRAIN_SECONDS
        for thread in self._drains:
            # A child left behind may still hold the pipe open, so don't wait forever.
            thread.join(max(0.0, deadline - time.monotonic()))


def capture_output(writer: LogWriter, label: Callable[[], str]) -> Capture:
    """Send this process's output to a log for the rest of its life.

    Output to `sys.stdout` and `sys.stderr` is labelled by job; `label` names the job of the calling code. Output that
    bypasses them (C code, child processes) has no known job and is labelled as the worker's.
    """
    drains = []
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        read_end, write_end = os.pipe()
        os.dup2(write_end, descriptor)
        os.close(write_end)
        drain = threading.Thread(target=_drain, args=(read_end, writer, name), name=f"osmosis-{name}", daemon=True)
        drain.start()
        drains.append(drain)
    streams = (_JobStream(writer, "stdout", label, 1), _JobStream(writer, "stderr", label, 2))
    sys.stdout, sys.stderr = streams
    # User code must not read the command's stdin.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return Capture(writer, streams, drains)


def held_output(log: Path, pid: int) -> Path:
    """Return the file that holds the output of a process in `output_in_file`."""
    return log.with_name(f"{log.stem}-{pid}.log")


@contextmanager
def output_in_file(writer: LogWriter, log: Path | None) -> Iterator[None]:
    """Hold back the process's output until the block ends, then log it; discard all later output.

    If the process dies first, its output remains in `held_output` beside the log.
    """
    with ExitStack() as stack:
        if log is None:
            held = stack.enter_context(tempfile.TemporaryFile())
        else:
            file = held_output(log, os.getpid())
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            private_file(file)
            held = stack.enter_context(file.open("w+b"))
            stack.callback(file.unlink, missing_ok=True)
        for descriptor in (1, 2):
            os.dup2(held.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            os.close(null)
            held.seek(0)
            for line in held.read(PROCESS_BYTES).decode("utf-8", "replace").splitlines():
                writer.write(f"worker {os.getpid()}", "output", line, PROCESS_BYTES)


def _drain(descriptor: int, writer: LogWriter, stream: str) -> None:
    with open(descriptor, "rb") as pipe:
        while chunk := pipe.readline(LINE_CHARACTERS):
            line = chunk.decode("utf-8", "replace").rstrip("\n")
            writer.write(f"worker {os.getpid()}", stream, line, PROCESS_BYTES)
