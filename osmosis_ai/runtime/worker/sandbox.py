"""Processes in sandboxes that load the repository's code for a worker: one per rollout, one per rollout to score.

The worker keeps the model's key, the agent loop and the store, and loads no code of the repository.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from osmosis_ai.errors import StartError, WorkerError, start_error
from osmosis_ai.mcp_tools.clients import SamplingHandler
from osmosis_ai.mcp_tools.session import CallOutcome
from osmosis_ai.process_tree import descendants
from osmosis_ai.records import Failure, FunctionRef, JsonObject, Score, ScoringInput, Tool
from osmosis_ai.runtime.bubblewrap import environment, sandbox_command
from osmosis_ai.runtime.code import LoadedCode
from osmosis_ai.runtime.forks import ChildProcess, ForkLine, how_it_ended
from osmosis_ai.runtime.protocol import (
    FREEZE_GRACE_SECONDS,
    HEADER,
    Event,
    Imported,
    NotReady,
    Ready,
    RolloutJob,
    WorkerSpec,
    pack,
    read_frame,
    sandboxed_part,
)
from osmosis_ai.runtime.worker.boundary import (
    MAX_ANSWER,
    Answer,
    Answered,
    Call,
    Enter,
    Open,
    Opened,
    Request,
    Sample,
    Sampled,
    Scored,
    ScoreThis,
    decode_answer,
)
from osmosis_ai.runtime.worker.entering import SIGNALLED
from osmosis_ai.runtime.worker.forking import SANDBOXED
from osmosis_ai.tracebacks import describe

__all__ = ["Forks", "SandboxedScorers", "SandboxedSession", "SandboxedTools"]

LOAD_SECONDS = 120.0
LOOK_SECONDS = 0.25
END_SECONDS = 5.0
PROCESSES = 128
SAMPLES = 16
"""Requests to the model that a rollout's tools may make at a time."""
CHUNK = 1 << 16


class SandboxLostError(WorkerError):
    """A process in a sandbox ended, or was ended; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Forks(NamedTuple):
    """Forks the processes for sandboxes. `sources` is as in `protocol.Boot`."""

    line: ForkLine
    sources: dict[str, bytes]


class Sandbox:
    """One sandbox with the process that loads the repository. Made by `start`.

    `bwrap` makes the sandbox around a `cat`, which keeps it up. The process is forked from one that knows nothing of
    this run and has loaded the modules that the repository's code needs, and enters the sandbox before it loads that
    code. All processes of the sandbox end with `bwrap`.
    """

    def __init__(self, bwrap: asyncio.subprocess.Process, memory: int) -> None:
        self._bwrap = bwrap
        self._memory = memory
        self._context = contextvars.copy_context()
        self._process: ChildProcess
        self._reader: asyncio.StreamReader
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Future[None]] = []
        self._end: Failure | None = None

    @classmethod
    @asynccontextmanager
    async def start(cls, spec: WorkerSpec, command: list[str], forks: Forks) -> AsyncIterator[Sandbox]:
        """Yield a sandbox, made by `command`, with a process that starts to load a repository; raise StartError."""
        assert spec.sandbox is not None
        information, theirs = os.pipe()
        try:
            bwrap = await asyncio.create_subprocess_exec(
                *(command[0], "--info-fd", str(theirs), *command[1:]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment(os.environ),
                pass_fds=[theirs],
            )
        except OSError as error:
            os.close(information)
            raise StartError(f"a sandbox can't be started: {error}") from error
        finally:
            os.close(theirs)
        sandbox = cls(bwrap, spec.sandbox.memory)
        try:
            try:
                await sandbox._wait_for_bwrap()
                pid = json.loads(os.read(information, CHUNK))["child-pid"]
            finally:
                os.close(information)
            await sandbox._fork(forks, Enter(pid, sandboxed_part(spec), forks.sources))
            yield sandbox
        finally:
            await sandbox._close()

    async def _wait_for_bwrap(self) -> None:
        stdin, stdout, stderr = self._bwrap.stdin, self._bwrap.stdout, self._bwrap.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        # `cat` echoes the byte once the sandbox is up; if bwrap fails, its stdout ends instead.
        stdin.write(b".")
        with anyio.move_on_after(END_SECONDS):
            if await stdout.read(1):
                return
            raise StartError(f"a sandbox can't be started: {(await stderr.read()).decode('utf-8', 'replace').strip()}")
        raise StartError(f"a sandbox can't be started: {self._bwrap.pid} did not answer within {END_SECONDS:g} s")

    async def _fork(self, forks: Forks, enter: Enter) -> None:
        requests, requests_far = socket.socketpair()
        answers, answers_far = socket.socketpair()
        try:
            with requests_far, answers_far:
                self._process = await forks.line.fork(SANDBOXED, requests_far, answers_far)
        except OSError as error:
            requests.close()
            answers.close()
            raise StartError(f"a process for a sandbox can't be started: {error}") from error
        record = pack(enter)
        # The process's own stdout and stderr: what user code prints must not go to the worker's streams unlabelled.
        pipes = [os.pipe() for _ in range(2)]
        socket.send_fds(requests, [record[: HEADER.size]], [write for _, write in pipes])
        for (read, write), stream in zip(pipes, ("stdout", "stderr"), strict=True):
            os.close(write)
            self._tasks.append(asyncio.ensure_future(self._print(read, stream)))
        _, writer = await asyncio.open_unix_connection(sock=requests)
        self._reader, other = await asyncio.open_unix_connection(sock=answers)
        self._writers = [writer, other]
        writer.write(record[HEADER.size :])
        self._tasks.append(asyncio.ensure_future(self._watch()))

    def enter_context(self) -> None:
        """Label the process's output as that of the calling job."""
        self._context = contextvars.copy_context()

    def send(self, request: Request) -> None:
        """Send a request; dropped if the process has ended."""
        if not self._writers[0].is_closing():
            self._writers[0].write(pack(request))

    async def receive(self) -> Answer:
        """Return the process's next record; raise SandboxLostError once it has ended."""
        try:
            answer: Answer = decode_answer(await read_frame(self._reader, MAX_ANSWER))
            return answer
        except (asyncio.IncompleteReadError, ConnectionError):
            with anyio.move_on_after(END_SECONDS):
                await self._process.exited.wait()
            raise SandboxLostError(self._how_it_ended()) from None
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise self.lost(f"it sent what can't be read: {describe(error)}") from None

    def lost(self, how: str) -> SandboxLostError:
        """End the sandbox because of what its code did, and return the error to raise."""
        self._kill(Failure("worker", how, kind="died"))
        return SandboxLostError(self._how_it_ended())

    def blocked(self, seconds: float) -> SandboxLostError:
        """End the sandbox because it hasn't answered for so long, and return the error to raise."""
        self._kill(Failure("timeout", f"user code held the event loop for {seconds:.0f} s", kind="blocked"))
        return SandboxLostError(self._how_it_ended())

    def _kill(self, why: Failure) -> None:
        # The first reason counts: the end of the sandbox causes further errors.
        self._end = self._end or why
        with suppress(ProcessLookupError):
            self._bwrap.kill()

    async def _close(self) -> None:
        """End the sandbox, and log what its processes have printed."""
        self._kill(Failure("worker", "stopped", kind="died"))
        printing = self._tasks[:2]
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(END_SECONDS):
                await self._bwrap.wait()
                if self._writers:
                    await self._process.exited.wait()
                    # The last lines of output usually say why user code failed.
                    await asyncio.wait(printing)
            for task in self._tasks:
                task.cancel()
            if self._writers:
                self._process.kill()
        for writer in self._writers:
            writer.close()

    def _how_it_ended(self) -> Failure:
        if self._end is not None:
            return self._end
        code = self._process.exit_code
        if code is None:
            how = "it closed its connection"
        else:
            how = how_it_ended(SIGNALLED - code if code > SIGNALLED else code)
        return Failure("worker", how, kind="died")

    async def _print(self, descriptor: int, stream: str) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while chunk := await reader.read(CHUNK):
                self._context.run(getattr(sys, stream).write, chunk.decode("utf-8", "replace"))
        finally:
            transport.close()

    async def _watch(self) -> None:
        """End the sandbox once its processes are too many, or hold too much memory."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            count = held = 0
            # Two trees: the process entered the sandbox from outside, so it isn't a descendant of bwrap.
            for _, size in chain(descendants(self._process.pid), descendants(self._bwrap.pid)):
                count, held = count + 1, held + size
                if held > self._memory:
                    self.lost(f"it held more than {self._memory >> 20} MiB of memory (--worker-memory)")
                    return
                if count > PROCESSES:
                    self.lost(f"it had more than {PROCESSES} processes")
                    return


class _Sandboxes:
    """Starts sandboxes for a repository's code. `emit` reports what the code imports."""

    def __init__(self, spec: WorkerSpec, forks: Forks, emit: Callable[[Event], None]) -> None:
        assert spec.sandbox is not None
        self._spec = spec
        self._root = Path(spec.root).resolve()
        self._command = sandbox_command(spec.sandbox, self._root, ["cat"])
        self._code = LoadedCode(self._root)
        self._code.sources.update(forks.sources)
        self._forks = forks._replace(sources=self._code.sources)
        self._emit = emit

    async def load(self) -> Ready:
        """Load the code once, and return what that gave; raise StartError if it fails."""
        async with self.loaded() as (_, ready):
            return ready

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[tuple[Sandbox, Ready]]:
        """Yield a new sandbox that has loaded the code, and what it loaded; raise StartError."""
        async with Sandbox.start(self._spec, self._command, self._forks) as sandbox:
            ready = await self._ready(sandbox)
            if differing := self._code.note(ready.tool_sources | ready.function_sources):
                raise StartError(f"{', '.join(sorted(differing))} changed after the start")
            sandbox.enter_context()
            yield sandbox, ready

    def imported(self, sources: dict[str, str]) -> None:
        """Report files that a sandbox's code has imported."""
        self._emit(Imported(self._inside(sources)))

    def _inside(self, sources: dict[str, str]) -> dict[str, str]:
        """Leave out what isn't a file of the repository: these files will be read."""
        files = {name: Path(os.path.realpath(self._root / name)) for name in sources}
        return {
            name: sources[name] for name, file in files.items() if file.is_relative_to(self._root) and file.is_file()
        }

    async def _ready(self, sandbox: Sandbox) -> Ready:
        why = "the repository can't be loaded in a sandbox"
        try:
            with anyio.fail_after(LOAD_SECONDS):
                answer = await sandbox.receive()
        except TimeoutError:
            raise StartError(f"{why}: it did not finish within {LOAD_SECONDS:g} s") from None
        except SandboxLostError as lost:
            raise StartError(f"{why}: {lost}") from None
        if isinstance(answer, NotReady):
            raise start_error(answer.error, answer.message)
        if not isinstance(answer, Ready):
            raise StartError(f"{why}: it sent something else")
        tools, functions = self._inside(answer.tool_sources), self._inside(answer.function_sources)
        return msgspec.structs.replace(answer, tool_sources=tools, function_sources=functions)


class SandboxedTools(_Sandboxes):
    """The repository's tools, each rollout's in a sandbox of its own: in place of a `ToolHost`."""

    tools: list[Tool] = []
    """The tools as the model sees them, known once `load` has returned."""

    async def load(self) -> Ready:
        ready = await super().load()
        self.tools = ready.tools
        return ready

    def session(self, job: RolloutJob, meta: JsonObject, sampling: SamplingHandler) -> SandboxedSession:
        """Return one rollout's session, an async context manager. `meta` is sent with every tool call."""
        return SandboxedSession(self, Open(job.id, job.row.index, job.row.extra, meta), sampling)


class SandboxedSession:
    """One rollout's session with the tools in a sandbox: in place of a `ToolSession` and of a `SetupRun`.

    `lost` says why the sandbox ended before its rollout, None if it didn't.
    """

    clean = True
    holds_thread = False

    def __init__(self, tools: SandboxedTools, opening: Open, sampling: SamplingHandler) -> None:
        self.lost: Failure | None = None
        self._tools = tools
        self._opening = opening
        self._sampling = sampling
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox
        self._opened: asyncio.Future[Failure | None]
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[str, asyncio.Future[CallOutcome]]] = {}
        self._tasks: set[asyncio.Future[None]] = set()

    async def __aenter__(self) -> SandboxedSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._stack.aclose()

    async def run(self) -> Failure | None:
        """Open the session and run the setup functions; return why that failed, if it did."""
        try:
            self._sandbox, _ = await self._stack.enter_async_context(self._tools.loaded())
        except StartError as error:
            return Failure("worker", str(error), kind="start")
        self._opened = asyncio.get_running_loop().create_future()
        self._start(self._read())
        self._sandbox.send(self._opening)
        return await self._opened

    async def call(self, name: str, arguments: str | JsonObject, *, timeout: float) -> CallOutcome:  # noqa: ASYNC109
        """Call a tool, as `ToolSession.call`; raise SandboxLostError if the sandbox ends."""
        if self.lost is not None:
            raise SandboxLostError(self.lost)
        number = next(self._numbers)
        answer: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        self._calls[number] = name, answer
        self._sandbox.send(Call(number, name, arguments, timeout))
        try:
            # The sandbox keeps the time limit itself, unless user code holds its event loop.
            with anyio.move_on_after(timeout + FREEZE_GRACE_SECONDS):
                return await answer
            raise self._lose(self._sandbox.blocked(timeout + FREEZE_GRACE_SECONDS))
        finally:
            del self._calls[number]

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._sandbox.receive())
                # A sandbox that never stops sending must not hold the event loop.
                await anyio.lowlevel.checkpoint()
        except SandboxLostError as lost:
            self._lose(lost)

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, Opened) and not self._opened.done():
            failure = answer.failure and msgspec.structs.replace(answer.failure, origin="setup", kind="exception")
            self._opened.set_result(failure)
        elif isinstance(answer, Answered) and answer.number in self._calls:
            _, waiting = self._calls[answer.number]
            if not waiting.done():
                waiting.set_result(answer.outcome)
        elif isinstance(answer, Sample) and len(self._tasks) <= SAMPLES:
            self._start(self._sample(answer))
        elif isinstance(answer, Imported):
            self._tools.imported(answer.sources)
        else:
            raise self._sandbox.lost(f"it sent what nobody asked for: {type(answer).__name__}")

    async def _sample(self, asked: Sample) -> None:
        try:
            self._sandbox.send(Sampled(asked.number, await self._sampling(asked.messages, asked.params)))
        except Exception as error:  # noqa: BLE001 - a model's failure, or messages of any form: the tool's to hear
            self._sandbox.send(Sampled(asked.number, error=str(error) or type(error).__name__))

    def _lose(self, lost: SandboxLostError) -> SandboxLostError:
        """Fail the open calls, and return the error with their names."""
        names = ", ".join(sorted({name for name, _ in self._calls.values()}))
        where = f" (while running {names})" if names else ""
        self.lost = self.lost or msgspec.structs.replace(lost.failure, message=f"{lost.failure.message}{where}")
        if not self._opened.done():
            self._opened.set_result(self.lost)
        for _, waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(SandboxLostError(self.lost))
        return SandboxLostError(self.lost)


class SandboxedScorers(_Sandboxes):
    """The repository's functions; each rollout is scored in a sandbox of its own."""

    async def score(self, trajectory: ScoringInput, functions: Sequence[FunctionRef]) -> list[Score]:
        """Score a rollout; the score of a function that takes the sandbox down says so, and the others are repeated."""
        scores: list[Score] = []
        # A function that kills the sandbox loses only its own score: the rest run in a new one.
        while len(scores) < len(functions):
            waiting = functions[len(scores) :]
            try:
                async with self.loaded() as (sandbox, _):
                    sandbox.send(ScoreThis(trajectory, [ref.name for ref in waiting]))
                    for ref in waiting:
                        scores.append(await self._receive(sandbox, ref))
            except StartError as error:
                scores.append(_failed(functions[len(scores)], Failure("worker", str(error), kind="load")))
            except SandboxLostError as lost:
                scores.append(_failed(functions[len(scores)], lost.failure))
        return scores

    async def _receive(self, sandbox: Sandbox, ref: FunctionRef) -> Score:
        seconds = self._spec.limits.reward_timeout + FREEZE_GRACE_SECONDS
        with anyio.move_on_after(seconds):
            while isinstance(answer := await sandbox.receive(), Imported):
                self.imported(answer.sources)
                await anyio.lowlevel.checkpoint()
            if not isinstance(answer, Scored) or answer.score.function != ref.name:
                raise sandbox.lost(f"it sent something else than the score of {ref.name}")
            score = answer.score
            failure = score.failure and msgspec.structs.replace(score.failure, origin=ref.kind)
            # No judge is called from a sandbox.
            return msgspec.structs.replace(score, failure=failure, judge_calls=[])
        raise sandbox.blocked(seconds)


def _failed(ref: FunctionRef, failure: Failure) -> Score:
    return Score(ref.name, failure=Failure(ref.kind, failure.message, kind=failure.kind, file=ref.file, line=ref.line))
