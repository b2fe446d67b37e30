"""The main functions of a worker process and of a template.

Jobs and events each have a socket. Events are written with blocking calls from any thread, so a reported event has left
the process before user code can crash it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.collector import calm_collector
from osmosis_ai.errors import StartError
from osmosis_ai.imports import import_in_version
from osmosis_ai.masking import Masker
from osmosis_ai.models.host import import_model
from osmosis_ai.process_tree import end_group, end_with
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.forks import ForkLine
from osmosis_ai.runtime.logs import Capture, LogWriter, capture_output, output_in_file
from osmosis_ai.runtime.protocol import HEADER, Boot, Event, Job, Order, attach, pack, read_frame, receive_frame
from osmosis_ai.runtime.worker.ending import WorkerEndsError
from osmosis_ai.runtime.worker.forking import WORKER, Forker
from osmosis_ai.runtime.worker.sandbox import Forks
from osmosis_ai.runtime.worker.watchdog import JobTasks, Watchdog
from osmosis_ai.runtime.worker.worker import (
    LoadedRepository,
    Worker,
    current_job,
    follow_orders,
    job_label,
    labels_of,
    load_repository,
)
from osmosis_ai.shortage import shortage_of
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
        """Write an event to the socket. End the process if the run no longer reads."""
        if self._copied:
            os._exit(0)
        data = pack(event)
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                end_group()

    def _close_copy(self) -> None:
        """Silence a copy of this process that user code forked, and close its socket, so that EOF still means death."""
        self._copied = True
        self._sock.close()


def worker_main(jobs: socket.socket, events: socket.socket, lifeline: int) -> None:
    """Run a worker in this process, which leads its own process group, until a Stop arrives.

    `jobs` delivers an encoded Boot, then jobs; EOF means that the run is gone. For `lifeline`, see
    `process_tree.end_with`.
    """
    end_with(lifeline)
    outbox = Outbox(events)
    boot, line = _boot(jobs)
    output = _capture(log_writer(boot), outbox)
    try:
        loaded = load_repository(attach(boot.spec, boot.places))
    except StartError as error:
        output.close()
        outbox.send(protocol.NotReady(type(error).__name__, str(error)))
        return
    serve(loaded, jobs, outbox, output, _Sandboxes(line, boot.sources) if line else None)


def template_main(requests: socket.socket, reports: socket.socket, lifeline: int) -> None:
    """Load the repository once in this process, then fork workers from it on request, until the run is gone.

    `requests` delivers an encoded Boot, then requests for workers; Forked and Exited go to `reports`.
    """
    end_with(lifeline)
    boot, _ = _boot(requests)
    writer = log_writer(boot)
    failure: protocol.NotReady | None = None
    loaded: LoadedRepository | None = None
    # This process must stay single-threaded to fork safely, so no thread can drain pipes: a file holds the output.
    with output_in_file(writer, Path(boot.places.log) if boot.places.log else None):
        try:
            loaded = load_repository(attach(boot.spec, boot.places))
            for model in boot.spec.policies.values():
                import_model(model)
        except StartError as error:
            failure = protocol.NotReady(type(error).__name__, str(error))

    def run_worker(jobs: socket.socket, events: socket.socket) -> None:
        end_with(lifeline)
        outbox = Outbox(events)
        output = _capture(writer, outbox)
        if failure is not None:
            outbox.send(failure)
        elif loaded is not None:
            serve(loaded, jobs, outbox, output)

    Forker(requests, reports, {WORKER: run_worker}).serve()


class _Sandboxes(NamedTuple):
    """The sockets of a line to the process that forks those in sandboxes, and the files' content to import there."""

    line: list[socket.socket]
    sources: dict[str, bytes]


def _boot(sock: socket.socket) -> tuple[Boot, list[socket.socket]]:
    """Receive the first record, with the sockets of a line if the worker uses sandboxes."""
    try:
        head, descriptors, _, _ = socket.recv_fds(sock, HEADER.size, 2)
        boot = protocol.decode_boot(receive_frame(sock, head))
    except (EOFError, ConnectionError):
        end_group()
        raise
    for name, value in boot.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    import_in_version(Path(boot.places.root), boot.sources)
    return boot, [socket.socket(fileno=descriptor) for descriptor in descriptors]


def log_writer(boot: Boot) -> LogWriter:
    """Open the run's log; with `--debug`, copy every line to the terminal."""
    masker = Masker.from_environment(os.environ, boot.keys)
    live = os.dup(2) if boot.debug else None
    return LogWriter(Path(boot.places.log) if boot.places.log else None, masker.text, live)


def _capture(writer: LogWriter, outbox: Outbox) -> Capture:
    """Send this process's output to the log, or end the process if it can't have the threads for that."""
    try:
        return capture_output(writer, worker_label)
    except RuntimeError as error:
        _report_shortage(error, outbox)
        raise


def _report_shortage(error: BaseException, outbox: Outbox) -> None:
    shortage = shortage_of(error)
    if shortage is not None:
        outbox.send(protocol.NotReady(type(shortage).__name__, str(shortage)))
        end_group()


def worker_label() -> str:
    """Return the log label of the job that the calling code belongs to."""
    return job_label.get() or f"worker {os.getpid()}"


def serve(
    loaded: LoadedRepository,
    jobs: socket.socket,
    outbox: Outbox,
    output: Capture,
    sandboxes: _Sandboxes | None = None,
) -> None:
    """Run jobs in this process until a Stop arrives, then end it."""
    calm_collector(loaded.spec.batch_size)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_serve(loaded, jobs, outbox, output.finish, sandboxes))
    except StartError as error:
        outbox.send(protocol.NotReady(type(error).__name__, str(error)))
    except WorkerEndsError as error:
        outbox.send(error.event)
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt from user code end the worker
        _report_shortage(error, outbox)
        outbox.send(protocol.Dying(describe(error)))
    output.close()
    # Threads that user code left behind must not keep the process alive.
    end_group()


async def _serve(
    loaded: LoadedRepository,
    jobs: socket.socket,
    outbox: Outbox,
    finish: Callable[[str], None],
    sandboxes: _Sandboxes | None,
) -> None:
    loop = asyncio.get_running_loop()
    tasks = JobTasks(current_job.get)
    loop.set_task_factory(tasks)
    reader, writer = await asyncio.open_unix_connection(sock=jobs)

    def emit(event: Event) -> None:
        # The job's output is in the log before its record is sent, even if the process dies right after.
        if isinstance(event, (protocol.RolloutDone, protocol.ScoresDone, protocol.ServeDone)):
            finish(worker_label())
        outbox.send(event)

    forks = None
    if sandboxes is not None:
        requests, reports = sandboxes.line
        forks = Forks(
            ForkLine(requests, reports, "the process that forks those in sandboxes was lost"), sandboxes.sources
        )
    async with Worker.open(loaded, emit, forks) as worker:

        async def run(job: Job) -> None:
            try:
                await worker.run(job)
            finally:
                for label in labels_of(job):
                    finish(label)

        def stuck(job: str | None, seconds: float) -> None:
            outbox.send(protocol.Stuck(job, seconds))
            end_group()

        watchdog = Watchdog(
            loop, worker.deadlines, tasks, beat=lambda: outbox.send(protocol.Beat()), stuck=stuck, orphaned=end_group
        )
        watchdog.start()
        await follow_orders(worker, lambda: _next_order(reader), run)
        watchdog.stop()
    writer.close()


async def _next_order(reader: asyncio.StreamReader) -> Order:
    try:
        order: Order = protocol.decode_order(await read_frame(reader))
        return order
    except asyncio.IncompleteReadError:
        # The run is gone, so nothing reads this worker's results.
        end_group()
        raise
