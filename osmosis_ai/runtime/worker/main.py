"""The main functions of a worker process and of a template.

Jobs and events have a socket each: events are written with blocking calls from any thread, so that what was reported
has left the process before user code can take it down.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import anyio

from osmosis_ai.collector import calm_collector
from osmosis_ai.errors import StartError
from osmosis_ai.masking import Masker
from osmosis_ai.models import import_model
from osmosis_ai.process_tree import end_processes
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.logs import Capture, LogWriter, capture_output, output_in_file
from osmosis_ai.runtime.protocol import Boot, Event, Job, Order, pack, read_frame, receive_frame
from osmosis_ai.runtime.worker.forking import WORKER, Forker
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

__all__ = ["template_main", "worker_main"]


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


def end_with_run(lifeline: int) -> None:
    """Have the kernel kill this process's group when the run is gone: also while user code holds the interpreter.

    Elsewhere than on Linux, EOF on the job socket and events that can't be sent tell of it.

    Args:
        lifeline: The file descriptor of a pipe's end whose other end the run holds open.
    """
    if sys.platform != "linux":
        return
    # Opened anew, because the owner of its signal belongs to an opened file.
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([own], [], [], 0)[0]:
        end_group()


def worker_main(jobs: socket.socket, events: socket.socket, lifeline: int) -> None:
    """Run a worker in this process, the leader of a group of its own, until it is told to stop.

    Args:
        jobs: Where an encoded Boot and then jobs come from; its end means that the run is gone.
        events: Where events go.
        lifeline: See `end_with_run`.
    """
    end_with_run(lifeline)
    outbox = Outbox(events)
    boot = _boot(jobs)
    output = capture_output(log_writer(boot), worker_label)
    try:
        loaded = load_repository(boot.spec)
    except StartError as error:
        output.close()
        outbox.send(protocol.NotReady(type(error).__name__, str(error)))
        return
    serve(loaded, jobs, outbox, output)


def template_main(requests: socket.socket, reports: socket.socket, lifeline: int) -> None:
    """Load the repository once in this process, then fork a worker of it whenever asked, until the run is gone.

    Args:
        requests: Where an encoded Boot comes from, and then requests for workers.
        reports: Where Forked and Exited go.
        lifeline: See `end_with_run`.
    """
    end_with_run(lifeline)
    boot = _boot(requests)
    writer = log_writer(boot)
    failure: protocol.NotReady | None = None
    loaded: LoadedRepository | None = None
    # No thread may run where a fork is to come, so what is printed meanwhile waits in a file.
    with output_in_file(writer):
        try:
            loaded = load_repository(boot.spec)
            for model in boot.spec.policies.values():
                import_model(model)
        except StartError as error:
            failure = protocol.NotReady(type(error).__name__, str(error))

    def run_worker(jobs: socket.socket, events: socket.socket) -> None:
        end_with_run(lifeline)
        outbox = Outbox(events)
        output = capture_output(writer, worker_label)
        if failure is not None:
            outbox.send(failure)
        elif loaded is not None:
            serve(loaded, jobs, outbox, output)

    Forker(requests, reports, {WORKER: run_worker}).serve()


def _boot(sock: socket.socket) -> Boot:
    try:
        boot = protocol.decode_boot(receive_frame(sock))
    except (EOFError, ConnectionError):
        end_group()
        raise
    os.environ.update(boot.environ)
    return boot


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
