"""The main function of a worker process, and the channel it shares with the run.

Frames are a length of four bytes and a JSON record. Jobs and events have a socket each: events are written with
blocking calls from any thread, so that what was reported has left the process before user code can take it down.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec

from osmosis_ai.collector import calm_collector
from osmosis_ai.errors import StartError
from osmosis_ai.masking import Masker
from osmosis_ai.models import import_model
from osmosis_ai.process_tree import end_processes
from osmosis_ai.records import Record
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.logs import Capture, LogWriter, capture_output, output_in_file
from osmosis_ai.runtime.protocol import Event, Job, Order, WorkerSpec
from osmosis_ai.runtime.worker.watchdog import JobTasks, Watchdog
from osmosis_ai.runtime.worker.worker import (
    LoadedRepository,
    Worker,
    current_job,
    job_label,
    label_of,
    labels_of,
    load_repository,
)
from osmosis_ai.tracebacks import describe

__all__ = ["Boot", "Exited", "Forked", "TemplateEvent", "pack", "read_frame", "template_main", "worker_main"]

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 30


class Boot(Record, frozen=True):
    """What a worker process needs before its first job."""

    spec: WorkerSpec
    log: str | None = None
    debug: bool = False
    keys: list[str] = []
    environ: dict[str, str] = {}


def pack(record: Record) -> bytes:
    """One frame."""
    body = protocol.encode(record)
    return HEADER.pack(len(body)) + body


class Forked(Record, frozen=True, tag=True):
    """A template has forked a worker."""

    pid: int


class Exited(Record, frozen=True, tag=True):
    """A worker that a template forked has ended; `code` is negative for the signal that ended it."""

    pid: int
    code: int


TemplateEvent = Forked | Exited


class Outbox:
    """Sends events to the run, in order, from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._copied = False
        os.register_at_fork(after_in_child=self._close_copy)

    def send(self, event: Event) -> None:
        """Hand an event to the operating system. When nobody reads any more, this process has no purpose: it ends."""
        if self._copied:
            os._exit(0)
        data = pack(event)
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                end_group()

    def _close_copy(self) -> None:
        """User code has forked this process: the copy has no say, and its end of the socket must not outlive it."""
        self._copied = True
        self._sock.close()


def end_group() -> None:
    """Kill everything this process started, and itself."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        # Without children there is nobody who may have left the group, and looking for them takes a while.
        os.killpg(0, signal.SIGKILL)
    end_processes(os.getpid())


def end_with_run() -> None:
    """Have the kernel kill this process's group when the run is gone: also while user code holds the interpreter.

    Where that is not to be had, the end of the job socket and events that can't be sent tell of it.
    """
    run = multiprocessing.parent_process()
    if sys.platform != "linux" or run is None:
        return
    # The pipe that the run holds open, opened anew because the owner of its signal belongs to an opened file.
    lifeline = os.open(f"/proc/self/fd/{run.sentinel}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        end_group()


def worker_main(jobs: socket.socket, events: socket.socket, boot: bytes) -> None:
    """Run a worker until it is told to stop, in a session of its own so that its whole group can be ended.

    Args:
        jobs: Where jobs come from; its end means that the run is gone.
        events: Where events go.
        boot: An encoded Boot.
    """
    os.setsid()
    end_with_run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outbox = Outbox(events)
    order = msgspec.json.decode(boot, type=Boot)
    os.environ.update(order.environ)
    output = capture_output(log_writer(order), worker_label)
    try:
        loaded = load_repository(order.spec)
    except StartError as error:
        output.close()
        outbox.send(protocol.NotReady(type(error).__name__, str(error)))
        return
    serve(loaded, jobs, outbox, output)


def template_main(control: socket.socket, reports: socket.socket, boot: bytes) -> None:
    """Load the repository once, then fork a worker of it whenever asked, until the run is gone.

    Args:
        control: Where requests come from, each with a worker's ends of its two sockets.
        reports: Where Forked and Exited go.
        boot: An encoded Boot.
    """
    os.setsid()
    end_with_run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = msgspec.json.decode(boot, type=Boot)
    os.environ.update(order.environ)
    writer = log_writer(order)
    failure: protocol.NotReady | None = None
    loaded: LoadedRepository | None = None
    # No thread may run where a fork is to come, so what is printed meanwhile waits in a file.
    with output_in_file(writer):
        try:
            loaded = load_repository(order.spec)
            for model in order.spec.policies.values():
                import_model(model)
        except StartError as error:
            failure = protocol.NotReady(type(error).__name__, str(error))
    children: set[int] = set()
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    # A handler that did more could be interrupted by itself.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()
    while True:
        readable, _, _ = select.select([control, wake], [], [])
        if wake in readable:
            wake.recv(4096)
            _reap(children, reports)
        if control not in readable:
            continue
        request, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not request:
            end_group()
        jobs, events = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        with jobs, events:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                # What user code forks in turn must not keep the template's own sockets open.
                for own in (control, reports, wake, waker):
                    own.close()
                _run_forked(writer, loaded, failure, jobs, Outbox(events))
            children.add(pid)
            reports.sendall(pack(Forked(pid)))


def _run_forked(
    writer: LogWriter,
    loaded: LoadedRepository | None,
    failure: protocol.NotReady | None,
    jobs: socket.socket,
    outbox: Outbox,
) -> None:
    """Be the worker that a template has just forked; doesn't return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    end_with_run()
    output = capture_output(writer, worker_label)
    if loaded is None:
        assert failure is not None
        outbox.send(failure)
        os._exit(0)
    serve(loaded, jobs, outbox, output)


def _reap(children: set[int], reports: socket.socket) -> None:
    """Report the workers that have ended; children that user code started are its own."""
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.discard(child)
            reports.sendall(pack(Exited(pid, os.waitstatus_to_exitcode(status))))


def log_writer(boot: Boot) -> LogWriter:
    """The run's log, and with `--debug` the terminal."""
    masker = Masker.from_environment(os.environ, boot.keys)
    live = os.dup(2) if boot.debug else None
    return LogWriter(Path(boot.log) if boot.log else None, masker.text, live)


def worker_label() -> str:
    """On whose behalf code runs, for the log."""
    return job_label.get() or f"worker {os.getpid()}"


def serve(loaded: LoadedRepository, jobs: socket.socket, outbox: Outbox, output: Capture) -> None:
    """Run jobs in this process until it is told to stop, then end it.

    Args:
        loaded: The repository.
        jobs: Where jobs come from.
        outbox: Where events go.
        output: Where the process's output goes.
    """
    calm_collector(loaded.spec.batch_size)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_serve(loaded, jobs, outbox, output.finish))
    except StartError as error:
        outbox.send(protocol.NotReady(type(error).__name__, str(error)))
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt from user code end the worker
        outbox.send(protocol.Dying(describe(error)))
    output.close()
    # Threads that user code left behind must not keep the process; its group goes with it.
    end_group()


async def _serve(loaded: LoadedRepository, jobs: socket.socket, outbox: Outbox, finish: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    tasks = JobTasks(current_job.get)
    loop.set_task_factory(tasks)
    reader, writer = await asyncio.open_unix_connection(sock=jobs)

    def emit(event: Event) -> None:
        # What was printed is complete before the record is, whatever becomes of this process then.
        if isinstance(event, (protocol.RolloutDone, protocol.ScoresDone, protocol.ServeDone)):
            finish(worker_label())
        outbox.send(event)

    async with Worker.open(loaded, emit) as worker:

        async def run(job: Job) -> None:
            try:
                await worker.run(job)
            finally:
                for label in labels_of(job):
                    finish(label)

        watchdog = Watchdog(
            loop,
            worker.deadlines,
            tasks,
            beat=lambda: outbox.send(protocol.Beat()),
            stuck=lambda job, seconds: _stuck(outbox, job, seconds),
            orphaned=end_group,
        )
        watchdog.start()
        async with anyio.create_task_group() as group:
            while True:
                order = await _next_order(reader)
                if isinstance(order, protocol.Stop):
                    break
                if isinstance(order, protocol.Cancel):
                    worker.cancel(order.id)
                    continue
                if isinstance(order, protocol.Resume):
                    worker.resume(order)
                    continue
                # Set before the task is made, so that the task and all it starts are known to be the job's.
                current_job.set(order.id)
                job_label.set(label_of(order))
                group.start_soon(run, order)
            group.cancel_scope.cancel()
        watchdog.stop()
    writer.close()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame's record, encoded; raises IncompleteReadError at the end."""
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(size)


async def _next_order(reader: asyncio.StreamReader) -> Order:
    try:
        order: Order = protocol.decode_order(await read_frame(reader))
        return order
    except asyncio.IncompleteReadError:
        # The run is gone, and nobody will read what this process still does.
        end_group()
        raise


def _stuck(outbox: Outbox, job: str | None, seconds: float) -> None:
    outbox.send(protocol.Stuck(job, seconds))
    end_group()
