"""Run a rollout server as a child process: start, identify and watch it, and end it with this process at the latest."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

import anyio
import psutil
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from osmosis_ai.errors import RepositoryError
from osmosis_ai.process_tree import end_processes
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.rollout.vocabulary import API_KEY_VARIABLE, ARTIFACT_ROOT_VARIABLE, INSTANCE_VARIABLE, PORT_VARIABLE
from osmosis_ai.runtime.worker.workflows import keeper
from osmosis_ai.runtime.worker.workflows.raised import find_missing
from osmosis_ai.runtime.worker.workflows.wire import RolloutServer, RolloutServerError
from osmosis_ai.tasks import task_group

__all__ = ["ServerCommand", "ServerProcess"]

HEALTHY_SECONDS = 90.0
GRACE_SECONDS = 3.0
POLL_SECONDS = 0.1
TAIL_LINES = 15
KEPT_LINES = 2000
MAX_LINE = 64 * 1024
STARTS = 2
ADVICE = f"it must serve on port ${PORT_VARIABLE} until it is stopped"


class ServerCommand(Record, frozen=True):
    """How to start a rollout server, in this process's environment plus the protocol's variables.

    `artifacts` is the folder in which the server may create a folder per rollout. `env` holds the rollout's own
    environment variables.
    """

    python: str
    entrypoint: str
    artifacts: str
    env: dict[str, str] = {}

    @property
    def folder(self) -> Path:
        """The rollout's folder, in which the server runs."""
        return Path(self.entrypoint).parent

    def environment(self, port: int, instance: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the server's environment variables."""
        # The rollout's environment is separate: these variables would point its Python at ours.
        ours = () if self.python == sys.executable else ("VIRTUAL_ENV", "PYTHONPATH")
        inherited = {name: value for name, value in environ.items() if name not in ours} | self.env
        # Otherwise LiteLLM fetches its price map from the network, which takes seconds at every start.
        inherited.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        for name in ("NO_PROXY", "no_proxy"):
            # The model and the callbacks are on loopback, which a proxy can't reach.
            inherited[name] = ",".join(filter(None, [inherited.get(name), "127.0.0.1"]))
        own = {
            PORT_VARIABLE: str(port),
            "ROLLOUT_PORT": str(port),
            ARTIFACT_ROOT_VARIABLE: self.artifacts,
            INSTANCE_VARIABLE: instance,
            "_OSMOSIS_ROLLOUT_NAME": self.folder.name,
            "_OSMOSIS_REPOSITORY_PATH": str(self.folder),
            "_OSMOSIS_ENTRYPOINT_SCRIPT": self.entrypoint,
            "PYTHONUNBUFFERED": "1",
        }
        if (self.folder / "src").is_dir():
            # The rollout isn't installed in its environment, so a src layout needs the path.
            own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.folder / "src"), inherited.get("PYTHONPATH")]))
        return {**inherited, **own}


class ServerProcess:
    """A running, healthy rollout server; `server` is its client. Created by `ServerProcess.open`.

    Attributes:
        max_concurrent: How many rollouts the server runs at a time; None if it doesn't say.
    """

    def __init__(self, process: Process, port: int, log: Callable[[str], None]) -> None:
        self.port = port
        self.max_concurrent: int | None = None
        # The server inherits our environment, and with it any key that it requires.
        self.server = RolloutServer(f"http://127.0.0.1:{port}", key=os.environ.get(API_KEY_VARIABLE) or None)
        self._process = process
        self._log = log
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._drained = anyio.Event()
        self._lost_port = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        command: ServerCommand,
        log: Callable[[str], None],
        *,
        seconds: float = HEALTHY_SECONDS,
        grace: float = GRACE_SECONDS,
        port: int | None = None,
    ) -> AsyncIterator[ServerProcess]:
        """Start a server, wait until it is healthy, and end it after the block: SIGTERM, then SIGKILL after `grace`.

        Args:
            command: How to start it.
            log: Called with each line of its output.
            seconds: How many seconds it may take to become healthy.
            grace: How many seconds it may take to end.
            port: A fixed port; a free one by default.

        Raises:
            RepositoryError: It ended early, or didn't become healthy; the message has the end of its output.
        """
        async with task_group() as group:
            for start in range(STARTS):
                chosen = _free_port() if port is None else port
                instance = secrets.token_hex(16)
                kept_by = [sys.executable, "-I", "-S", keeper.__file__, str(grace)]
                process = await anyio.open_process(
                    [*kept_by, command.python, command.entrypoint],
                    # stderr goes into stdout, which keeps the lines in order.
                    stderr=subprocess.STDOUT,
                    cwd=command.folder,
                    env=command.environment(chosen, instance, os.environ),
                    start_new_session=True,
                )
                running = cls(process, chosen, log)
                group.start_soon(running._drain)
                try:
                    problem = await running._become_healthy(instance, seconds)
                    if problem is None:
                        yield running
                        break
                    # Another process may have taken the port in between; try again with another one.
                    if not (start + 1 < STARTS and port is None and running._lost_port):
                        own = command.python == sys.executable
                        missing = find_missing(running.output()[-TAIL_LINES:], command.folder, own_sdk=own)
                        advice = "" if missing is None else f"; {missing}"
                        raise RepositoryError(f"{command.entrypoint}: {problem}{advice}{running.tail()}")
                finally:
                    with anyio.CancelScope(shield=True):
                        await running._stop(grace)

    @property
    def ended(self) -> int | None:
        """The server's exit code, with a signal's number above 128; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the server has ended, and return its exit code."""
        return await self._process.wait()

    def tail(self) -> str:
        """Return the end of the server's output, for appending to a message."""
        return "".join(f"\n  {line}" for line in self.output()[-TAIL_LINES:])

    def output(self) -> list[str]:
        """Return the latest lines of the server's output."""
        return list(self._lines)

    def kill(self) -> None:
        """Kill the server and every process it has started."""
        end_processes(self._process.pid)

    async def _become_healthy(self, instance: str, seconds: float) -> str | None:
        """Wait until the server is healthy; return None, or the reason why it didn't become healthy."""
        deadline = monotonic() + seconds
        problem = "it didn't answer"
        while monotonic() < deadline:
            if self.ended is not None:
                await self._settle()
                self._lost_port = "address already in use" in self.tail().lower()
                # A script that just does its work and exits leaves no error in its output.
                advice = f": {ADVICE}" if self.ended == 0 else ""
                return f"the rollout server ended with code {self.ended} before it was healthy{advice}"
            try:
                health = await self.server.health(max(0.1, min(5.0, deadline - monotonic())))
            except RolloutServerError as error:
                # Who has the port says more than a last answer that came too late.
                problem = problem if self._lost_port else str(error)
            else:
                named = health.get("instance_id")
                if named == instance or (named is None and await self._owns_port()):
                    self.max_concurrent = _max_concurrent(health)
                    return None
                problem = f"another process answers on port {self.port}"
                self._lost_port = True
            await anyio.sleep(POLL_SECONDS)
        return f"the rollout server was not healthy within {seconds:g} s: {problem}; {ADVICE}"

    async def _owns_port(self) -> bool:
        """Return False only if the system shows that no process of the server listens on the port."""
        return await anyio.to_thread.run_sync(_listens, self._process.pid, self.port)

    async def _drain(self) -> None:
        assert self._process.stdout is not None
        lines = BufferedByteReceiveStream(self._process.stdout)
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError, anyio.BrokenResourceError):
            while True:
                try:
                    line = await lines.receive_until(b"\n", MAX_LINE)
                except anyio.DelimiterNotFound:
                    line = await lines.receive(MAX_LINE)
                self._take(line)
        if lines.buffer:
            self._take(lines.buffer)
        self._drained.set()

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self._lines.append(text)
        self._log(text)

    async def _settle(self) -> None:
        """Wait for the rest of the output, unless a process that outlives the server holds it open."""
        with anyio.move_on_after(1.0):
            await self._drained.wait()

    async def _stop(self, grace: float) -> None:
        if self._process.stdin is not None:
            await self._process.stdin.aclose()
        with anyio.move_on_after(grace + 1.0):
            await self._process.wait()
        if self.ended is None:
            self.kill()
            await self._process.wait()
        await self._settle()
        if self._process.stdout is not None:
            await self._process.stdout.aclose()
        await self.server.aclose()


def _max_concurrent(health: JsonObject) -> int | None:
    concurrency = health.get("concurrency")
    limit = concurrency.get("max_concurrent") if isinstance(concurrency, dict) else None
    return limit if isinstance(limit, int) and limit > 0 else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(pid: int, port: int) -> bool:
    try:
        family = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        # Systems other than Linux show this only to the administrator.
        return True
    except psutil.Error:
        return False
    listening = [each for each in connections if each.status == psutil.CONN_LISTEN]
    owners = {each.pid for each in listening if getattr(each.laddr, "port", None) == port}
    return bool(owners & family)
