"""Run `osmosis serve` once its options are parsed: load, validate, listen, stop gracefully."""

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
from osmosis_ai.cli.options import Given, effective_config
from osmosis_ai.cli.session import ExitCode, command_session
from osmosis_ai.cli.status import STATUS
from osmosis_ai.config import LimitsConfig
from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.discovery.repository import McpSource
from osmosis_ai.errors import OsmosisRolloutError, StartError, UsageError
from osmosis_ai.folders import private_folder
from osmosis_ai.rollout.server.app import API_KEY_VARIABLE, DEBUG_DIR_VARIABLE, build_app, debug_folder
from osmosis_ai.rollout.server.serve import address_of, choose_api_key, make_server, open_socket
from osmosis_ai.rollout.settings import ClientSettings, ServerSettings, client_settings, server_settings
from osmosis_ai.runtime.logs import new_log
from osmosis_ai.runtime.pool.base import PoolOptions, default_workers
from osmosis_ai.runtime.protocol import WorkerSpec
from osmosis_ai.runtime.run.prepare import find_agent, find_store
from osmosis_ai.serve.config import ServeConfig
from osmosis_ai.serve.workers import PoolRunner
from osmosis_ai.store.run_store import new_run_id

__all__ = ["serve_agent"]

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
NOT_REGISTERED = (
    "platform registration isn't available yet, so give the trainer this address yourself "
    "(--skip-register hides this message)"
)


def serve_agent(given: Given) -> int:
    """Serve an agent until SIGINT or SIGTERM and return the exit code."""
    with command_session() as session:
        config = effective_config(ServeConfig, given, session.cwd).config
        server = config.server
        if server.local and server.api_key is not None:
            raise UsageError("--local serves without a key, but --api-key sets one: remove one of them")
        source, repository = find_agent(config.agent, session.cwd)
        session.use(repository.root)
        # The server's own settings are read from this process's environment.
        os.environ.update(session.environ)
        try:
            key, made = choose_api_key(server.api_key, local=server.local, host=server.host)
            keys = [key] if key is not None else []
            # A generated key isn't masked, because it has to be shown once.
            session.use(keys=[] if made else keys)
            settings = server_settings(
                max_concurrent_rollouts=server.max_concurrent, request_timeout_seconds=server.timeout
            )
            folder = _debug_folder(server.log)
            store = find_store(config.store, repository.root, session.cwd)
            spec = WorkerSpec(
                str(repository.root),
                LimitsConfig(timeout=settings.request_timeout_seconds, tool_timeout=server.tool_timeout),
                mcp=source if isinstance(source, McpSource) else None,
                agent=source if isinstance(source, AgentSource) else None,
                batch_size=settings.max_concurrent_rollouts,
                allow_rewrites=config.agent.allow_rewrites,
                debug_dir=None if folder is None else str(folder),
            )
            pool = PoolOptions(
                workers=server.workers or default_workers(settings.max_concurrent_rollouts),
                log=_new_log(store),
                debug=server.log_level == "debug",
                keys=keys,
                environ=session.environ,
            )
            return asyncio.run(_serve(config, spec, pool, settings, session.output, key, store, made=made))
        except OsmosisRolloutError as error:
            raise StartError(str(error)) from error


async def _serve(
    config: ServeConfig,
    spec: WorkerSpec,
    pool: PoolOptions,
    settings: ServerSettings,
    output: Output,
    key: str | None,
    store: Path,
    *,
    made: bool,
) -> int:
    runner = PoolRunner(spec, pool, reload=config.server.reload, said=output.say)
    # Before the workers load, so that a port in use shows at once.
    with open_socket(config.server.host, config.server.port) as listener:
        return await _Serving(config, runner, output, listener, store).run(settings, client_settings(), key, made=made)


class _ShownFormatter(logging.Formatter):
    """Formats log lines, which may repeat what a trainer or a tool wrote, like all other output."""

    def __init__(self, output: Output) -> None:
        super().__init__(LOG_FORMAT)
        self._output = output

    def format(self, record: logging.LogRecord) -> str:
        return self._output.shown(super().format(record))


class _Serving:
    """One server from start to stop."""

    def __init__(
        self, config: ServeConfig, runner: PoolRunner, output: Output, listener: socket.socket, store: Path
    ) -> None:
        self._undelivered = store / "undelivered"
        self._loop_is_own = config.agent.module is not None
        self._options = config.server
        self._runner = runner
        self._output = output
        self._listener = listener
        self._ended_by: int | None = None
        self._starting = anyio.CancelScope()

    async def run(self, settings: ServerSettings, client: ClientSettings, key: str | None, *, made: bool) -> int:
        """Serve and return the exit code. Raises StartError if the agent can't be loaded or isn't valid."""
        STATUS.wait_for("loading the agent")
        with self._signals(), self._starting:
            async with self._runner.running():
                if not self._options.no_validate:
                    await self._validate()
                self._introduce(key, made)
                # From here on the server handles signals and stops itself.
                app = build_app(
                    self._runner, settings=settings, client=client, api_key=key, undelivered=self._undelivered
                )
                await self._serve(app)
        return ExitCode.INTERRUPTED if self._ended_by == signal.SIGINT else 0

    async def _validate(self) -> None:
        if not self._loop_is_own:
            return
        found = await self._runner.inspect()
        for finding in found.findings:
            if finding.warning:
                self._output.warn(f"{finding.code}: {finding.message}")
        errors = [f"  {finding.code}: {finding.message}" for finding in found.findings if not finding.warning]
        if errors:
            listed = "\n".join(errors)
            raise StartError(f"the agent loop can't be served (--no-validate serves it anyway):\n{listed}")

    def _introduce(self, key: str | None, made: bool) -> None:
        say, options = self._output.say, self._options
        tools = ", ".join(str(tool["function"]["name"]) for tool in self._runner.loaded.tools) or "none"
        say(f"agent {self._runner.name}, tools: {tools}")
        if not (options.skip_register or options.local):
            say(NOT_REGISTERED)
        if key is None:
            say("requests need no key (--local)")
        elif made:
            say(f"API key (generated for this start; set {API_KEY_VARIABLE} to use a fixed one): {key}")
        say(f"serving at {address_of(self._listener)}; press Ctrl-C to stop")

    async def _serve(self, app: ASGIApp) -> None:
        level = self._options.log_level
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_ShownFormatter(self._output))
        logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
        # Without uvicorn's own configuration, its lines go through this handler.
        server = make_server(app, level, log_config=None)
        # From now on a signal is the server's to handle: `_signals` must no longer cancel.
        self._starting.shield = True
        await server.serve(sockets=[self._listener])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let a signal cancel the start; once serving, the server handles signals and raises them again at its end."""
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
        raise UsageError(f"{named}: can't create the folder: {error.strerror or error}; name another one") from error
    return folder


def _new_log(folder: Path) -> str:
    try:
        private_folder(folder)
        return str(new_log(folder, f"{new_run_id()}-serve"))
    except OSError as error:
        raise StartError(
            f"can't keep logs in {folder}: {error.strerror or error}; name another folder with --store DIR"
        ) from error
