"""What `osmosis serve` does once its options are known: load, validate, listen, stop gracefully."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import anyio
from starlette.types import ASGIApp

from osmosis_ai.cli.console import Output
from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.environment import load_env_files
from osmosis_ai.errors import OsmosisRolloutError, StartError, UsageError
from osmosis_ai.folders import private_folder
from osmosis_ai.masking import Masker
from osmosis_ai.process_tree import end_strays
from osmosis_ai.records import Record
from osmosis_ai.rollout.server.app import API_KEY_VARIABLE, DEBUG_DIR_VARIABLE, build_app, debug_folder
from osmosis_ai.rollout.server.serve import address_of, choose_api_key, make_server, open_socket
from osmosis_ai.rollout.settings import ClientSettings, ServerSettings, client_settings, server_settings
from osmosis_ai.runtime.logs import new_log
from osmosis_ai.runtime.pool.pool import PoolOptions, default_workers
from osmosis_ai.runtime.protocol import Limits, WorkerSpec
from osmosis_ai.runtime.run.prepare import find_agent
from osmosis_ai.serve.workers import PoolRunner

__all__ = ["ServeOptions", "serve_agent"]

COULD_NOT_START = 2
INTERRUPTED = 130

NOT_REGISTERED = (
    "registration with the platform is not offered yet, so give the trainer this address yourself "
    "(--skip-register leaves this line out)"
)


class ServeOptions(Record, frozen=True):
    """The options as given. Times in seconds."""

    agent: str | None
    mcp: str | None
    port: int
    host: str
    api_key: str | None
    local: bool
    skip_register: bool
    validate: bool
    reload: bool
    log_level: str
    log: str | None
    max_concurrent: int | None
    workers: int | None
    timeout: float | None
    tool_timeout: float
    allow_rewrites: bool


def serve_agent(options: ServeOptions) -> int:
    """Serve an agent until SIGINT or SIGTERM.

    Args:
        options: What to serve, and how.

    Returns:
        The exit code.
    """
    cwd = Path.cwd()
    environ = load_env_files(cwd)
    output = Output(Masker.from_environment(os.environ).text)
    try:
        if options.local and options.api_key is not None:
            raise UsageError("--local asks for no key, and --api-key gives one: leave one of them out")
        source, repository = find_agent(options.mcp, options.agent, cwd)
        environ |= load_env_files(repository.root)
        key, made = choose_api_key(options.api_key, local=options.local, host=options.host)
        keys = [key] if key is not None else []
        # A key that was made for this start has to be shown, once.
        output = Output(Masker.from_environment(os.environ, [] if made else keys).text)
        settings = server_settings(
            max_concurrent_rollouts=options.max_concurrent, request_timeout_seconds=options.timeout
        )
        folder = _debug_folder(options.log)
        spec = WorkerSpec(
            root=str(repository.root),
            limits=Limits(timeout=settings.request_timeout_seconds, tool_timeout=options.tool_timeout),
            mcp=None if isinstance(source, AgentSource) else source,
            agent=source if isinstance(source, AgentSource) else None,
            batch_size=settings.max_concurrent_rollouts,
            allow_rewrites=options.allow_rewrites,
            debug_dir=None if folder is None else str(folder),
        )
        pool = PoolOptions(
            workers=options.workers or default_workers(settings.max_concurrent_rollouts),
            log=_new_log(repository.root),
            debug=options.log_level == "debug",
            keys=keys,
            environ=environ,
        )
        client = client_settings()

        async def run() -> int:
            runner = PoolRunner(spec, pool, reload=options.reload, said=output.say)
            with open_socket(options.host, options.port) as listener:
                return await _Serving(options, runner, output, listener).run(settings, client, key, made=made)

        return asyncio.run(run())
    except (StartError, OsmosisRolloutError) as error:
        output.fail(str(error))
        return COULD_NOT_START
    finally:
        end_strays()


class _Serving:
    """One server, from its start to its end."""

    def __init__(self, options: ServeOptions, runner: PoolRunner, output: Output, listener: socket.socket) -> None:
        self._options = options
        self._runner = runner
        self._output = output
        self._listener = listener
        self._ended_by: int | None = None
        self._starting = anyio.CancelScope()

    async def run(self, settings: ServerSettings, client: ClientSettings, key: str | None, *, made: bool) -> int:
        """Serve; gives the exit code.

        Raises:
            StartError: The agent can't be loaded, or isn't valid.
        """
        with self._signals(), self._starting:
            async with self._runner.running():
                if self._options.validate:
                    await self._validate()
                self._introduce(key, made)
                # From here on the server stops itself.
                await self._serve(build_app(self._runner, settings=settings, client=client, api_key=key))
        return INTERRUPTED if self._ended_by == signal.SIGINT else 0

    async def _validate(self) -> None:
        if self._options.agent is None:
            return
        found = await self._runner.inspect()
        for finding in found.findings:
            if finding.warning:
                self._output.warn(f"{finding.code}: {finding.message}")
        errors = [f"  {finding.code}: {finding.message}" for finding in found.findings if not finding.warning]
        if errors:
            listed = "\n".join(errors)
            raise StartError(f"the agent loop can't be served (--no-validate serves it all the same):\n{listed}")

    def _introduce(self, key: str | None, made: bool) -> None:
        say, options = self._output.say, self._options
        tools = ", ".join(str(tool["function"]["name"]) for tool in self._runner.loaded.tools) or "none"
        say(f"agent {self._runner.name}, tools: {tools}")
        if not (options.skip_register or options.local):
            say(NOT_REGISTERED)
        if key is None:
            say("no key is asked for (--local)")
        elif made:
            say(f"API key (made for this start; set {API_KEY_VARIABLE} for one that stays): {key}")
        say(f"serving at {address_of(self._listener)}; Ctrl-C stops it")

    async def _serve(self, app: ASGIApp) -> None:
        level = self._options.log_level
        logging.basicConfig(level=level.upper(), stream=sys.stderr, format="%(levelname)s %(message)s", force=True)
        server = make_server(app, level, log_config=None)
        self._starting.shield = True
        await server.serve(sockets=[self._listener])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Before it serves a signal ends it at once; then it is the server's, which passes it on when it has ended."""
        loop = asyncio.get_running_loop()

        def end(number: int, frame: FrameType | None) -> None:
            self._ended_by = number
            if not self._starting.shield:
                loop.call_soon_threadsafe(self._starting.cancel)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _debug_folder(log: str | None) -> Path | None:
    folder = debug_folder(log)
    if folder is None:
        return None
    above = folder.parent
    try:
        above.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        named = f"--log {log}" if log else f"${DEBUG_DIR_VARIABLE} {above}"
        raise UsageError(f"{named}: can't be made a folder: {error.strerror or error}; name another one") from error
    return folder


def _new_log(root: Path) -> str:
    folder = root / ".osmosis"
    try:
        private_folder(folder)
        return str(new_log(folder))
    except OSError as error:
        raise StartError(f"can't keep logs in {folder}: {error.strerror or error}; make {root} writable") from error
