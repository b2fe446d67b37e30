"""Schedule runs and supervise their jobs' processes, within limits and fairly between users."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from osmosis_ai.errors import DatasetError, OsmosisError, StoreError
from osmosis_ai.platform.cleaning import drop_code
from osmosis_ai.platform.database import Database, Row
from osmosis_ai.platform.datasets import Datasets
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.logs import Logs
from osmosis_ai.platform.orders import Ended, JobMessage, JobOrder, decode_message
from osmosis_ai.platform.runs import Runs
from osmosis_ai.records import JsonObject

__all__ = ["Limits", "Queue", "choose", "job_variables"]

LOSSES = 3
"""Number of processes that a run may lose without progress before it fails."""
MAX_LINE = 64 << 20
"""Longest message of a job in bytes; a log entry may hold a traceback or a list of rows."""
CLOSE_SECONDS = 10.0
"""How long a job may take to end its processes before it is killed."""
PAUSE_SECONDS = 5.0
"""Pause before another attempt when the database can't be written."""
_logger = logging.getLogger("osmosis.platform")

KEPT_VARIABLES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
    HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy no_proxy all_proxy SSH_AUTH_SOCK
    PYTHONDONTWRITEBYTECODE RAY_ADDRESS RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH
    """.split()  # noqa: SIM905 - a list of strings is harder to read
)
KEPT_PREFIXES = ("LC_", "XDG_", "UV_", "PIP_", "GIT_SSL_")
"""The operator's environment variables that jobs inherit. None is a key: a run gets only its own secrets."""


class Limits(NamedTuple):
    """The maximum number of concurrent runs, in all and per model; `trainer` is the command for training runs, and
    `workers` the options for where evaluations run: on this machine, or on the nodes of a cluster.
    """

    runs: int = 2
    runs_per_model: int | None = None
    trainer: str | None = None
    workers: JsonObject | None = None


class _Job:
    """A job's process."""

    def __init__(self, row: Row) -> None:
        self.user: str = row["creator"]
        self.model: str = row["model"]
        self.stopping = False
        self.process: asyncio.subprocess.Process | None = None

    def stop(self) -> None:
        """Tell the job that the user stops the run."""
        self.stopping = True
        if self.process is not None and self.process.stdin is not None:
            # The process may have ended by itself, which closes its pipe.
            with suppress(ConnectionError, RuntimeError):
                self.process.stdin.write(b"stop\n")


class Queue:
    """Starts jobs and records what they report. Calls `changed` with a run's id after every change of that run."""

    def __init__(
        self,
        database: Database,
        home: Home,
        runs: Runs,
        datasets: Datasets,
        logs: Logs,
        limits: Limits,
        changed: Callable[[str], None],
    ) -> None:
        self._database = database
        self._home = home
        self._runs = runs
        self._datasets = datasets
        self._logs = logs
        self._limits = limits
        self._changed = changed
        self._jobs: dict[str, _Job] = {}
        self._stopped: set[str] = set()
        # A spare process for the next job, because importing takes most of the time to a run's first rollout.
        self._spare: asyncio.subprocess.Process | None = None
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """Look for work again. Thread-safe."""
        self._loop.call_soon_threadsafe(self._news.set)

    def stop(self, run_id: str) -> None:
        """Stop a run's job, if it has one. Thread-safe."""
        self._loop.call_soon_threadsafe(self._stop, run_id)

    async def run(self) -> None:
        """Start jobs until cancelled. On cancellation the jobs end, and the next server continues their runs."""
        async with anyio.create_task_group() as group, self._closing_spare():
            while True:
                # Cleared before looking for work, so that news that arrives meanwhile isn't lost.
                self._news.clear()
                try:
                    await self._fill(group)
                except StoreError as error:
                    _logger.error("%s", error)
                    await anyio.sleep(PAUSE_SECONDS)
                    continue
                await self._news.wait()

    @asynccontextmanager
    async def _closing_spare(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if self._spare is not None:
                await _close(self._spare)

    async def _fill(self, group: TaskGroup) -> None:
        # A run that is still waiting for its turn needs no job to be stopped.
        while self._stopped:
            run_id = self._stopped.pop()
            if run_id not in self._jobs:
                await self._take(run_id, Ended("stopped"))
        waiting = await anyio.to_thread.run_sync(self._runs.to_do, self._limits.trainer is not None)
        for row in choose(waiting, self._jobs, self._limits):
            # Before its task starts, so that the next look for work doesn't choose the run again.
            job = self._jobs[row["id"]] = _Job(row)
            group.start_soon(self._serve, row["id"], job)
        # While the queue is full, no job could use it.
        if len(self._jobs) < self._limits.runs and self._spare is None:
            self._spare = await self._start()

    def _stop(self, run_id: str) -> None:
        job = self._jobs.get(run_id)
        if job is None:
            self._stopped.add(run_id)
        else:
            job.stop()
        self._news.set()

    async def _serve(self, run_id: str, job: _Job) -> None:
        """Run a job to its end, and record what it reports."""
        try:
            row = await anyio.to_thread.run_sync(self._runs.by_id, run_id)
            if row["stopping"]:
                # It has no rollouts in flight, so its code can be removed.
                await self._take(run_id, Ended("stopped"))
                return
            order = await anyio.to_thread.run_sync(self._order, row)
            ended = await self._process(run_id, job, order)
            # Unless `_lost` gives the run up, its status is unchanged, and the next look for work starts it again.
            if not ended:
                await self._lost(run_id)
            await anyio.to_thread.run_sync(self._drop_code, run_id)
        except StoreError as error:
            # A full disk, for example. The run continues from its records once they can be written again.
            _logger.error("%s", error)
            await anyio.sleep(PAUSE_SECONDS)
        except Exception as error:
            if not isinstance(error, OsmosisError):
                _logger.exception("a job could not be run")
            await self._fail(run_id, str(error))
        finally:
            del self._jobs[run_id]
            self._news.set()

    def _drop_code(self, run_id: str) -> None:
        if self._runs.by_id(run_id)["completed_at"] is not None:
            drop_code(self._home, run_id)

    async def _process(self, run_id: str, job: _Job, order: JobOrder) -> bool:
        """Follow a job's process to its end; return True if it reported the end of its run."""
        process, self._spare = self._spare, None
        # The spare may have been killed since.
        if process is None or process.returncode is not None:
            process = await self._start()
        job.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        ended = False
        try:
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            # The user may have stopped the run before it had a process.
            if job.stopping:
                job.stop()
            async for line in process.stdout:
                message = decode_message(line)
                ended = ended or isinstance(message, Ended)
                await self._take(run_id, message)
            await process.wait()
        finally:
            await _close(process)
        return ended

    async def _start(self) -> asyncio.subprocess.Process:
        """Start a process that waits for its order."""
        with self._home.jobs_log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "osmosis_ai.platform.job"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=job_variables(),
                cwd=self._home.folder,
                limit=MAX_LINE,
                # Its own session, so that Ctrl-C at the server doesn't reach it, and its group can be killed as a
                # whole.
                start_new_session=True,
            )

    async def _take(self, run_id: str, message: JobMessage) -> None:
        await anyio.to_thread.run_sync(self._runs.take, run_id, message)
        self._changed(run_id)

    async def _fail(self, run_id: str, message: str) -> None:
        try:
            await anyio.to_thread.run_sync(self._logs.add, run_id, "ERROR", "submit", message)
            await self._take(run_id, Ended("failed"))
        except StoreError as error:
            _logger.error("%s", error)

    async def _lost(self, run_id: str) -> None:
        losses = await anyio.to_thread.run_sync(self._runs.lost, run_id)
        said = "the run's process died without reporting an end (killed, or out of memory)"
        again = losses < LOSSES
        message = f"{said}; restarting it from the recorded results" if again else f"{said}, {losses} times"
        await anyio.to_thread.run_sync(self._logs.add, run_id, "WARNING" if again else "ERROR", "submit", message)
        if not again:
            await self._take(run_id, Ended("failed"))

    def _order(self, row: Row) -> JobOrder:
        values, scopes = self._runs.secrets_for(row)
        folder = self._home.run(row["id"])
        file, name = self._datasets.file(row["dataset"])
        # Results and pages show the file's name; a folder of its own keeps it from clashing with another file.
        dataset = folder / "dataset" / name
        dataset.parent.mkdir(parents=True, exist_ok=True)
        if not dataset.exists():
            # A hard link keeps the content for this run even if the dataset is deleted or replaced.
            try:
                dataset.hardlink_to(file)
            except FileNotFoundError:
                raise DatasetError(f"the dataset {name} was deleted before the run started; submit a new run") from None
        rows = self._database.count("SELECT row_count FROM datasets WHERE id = ?", row["dataset"])
        return JobOrder(
            run_id=row["id"],
            name=row["name"],
            document=msgspec.json.decode(row["document"]),
            folder=str(folder),
            repository=str(self._home.repository(row["workspace"])),
            store=str(self._home.store(row["workspace"])),
            dataset=str(dataset),
            dataset_sha256=row["dataset_sha256"],
            dataset_rows=rows,
            row_numbers=row["row_numbers"],
            retry_failed=bool(row["retrying"]),
            seed=row["seed"],
            sources=msgspec.json.decode(row["sources"], type=list[str]),
            commit=row["commit_sha"],
            variables=job_variables(),
            secrets=values,
            scopes=scopes,
            trainer=self._limits.trainer if row["kind"] == "training" else None,
            workers=self._limits.workers or {},
        )


async def _close(process: asyncio.subprocess.Process) -> None:
    """End a job's process by closing its stdin."""
    assert process.stdin is not None
    process.stdin.close()
    # Shielded, because a server that is shutting down cancels its tasks, and must still wait for its jobs.
    with anyio.move_on_after(CLOSE_SECONDS, shield=True) as waiting:
        await process.wait()
    if waiting.cancelled_caught:
        with suppress(ProcessLookupError):
            process.kill()


def choose(waiting: Iterable[Row], jobs: Mapping[str, _Job], limits: Limits) -> list[Row]:
    """Choose the runs to start now: repeatedly, the oldest run of the user with the fewest running ones.

    Skips runs whose model is at its limit.
    """
    free = limits.runs - len(jobs)
    users = Counter(job.user for job in jobs.values())
    models = Counter(job.model for job in jobs.values())
    left = [row for row in waiting if row["id"] not in jobs]
    chosen: list[Row] = []
    while free > len(chosen):
        fitting = [row for row in left if limits.runs_per_model is None or models[row["model"]] < limits.runs_per_model]
        if not fitting:
            break
        # `min` returns the first of equals, which is the oldest.
        row = min(fitting, key=lambda row: users[row["creator"]])
        chosen.append(row)
        left.remove(row)
        users[row["creator"]] += 1
        models[row["model"]] += 1
    return chosen


def job_variables() -> dict[str, str]:
    """Return the operator's environment variables that jobs inherit."""
    return {
        name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)
    }
