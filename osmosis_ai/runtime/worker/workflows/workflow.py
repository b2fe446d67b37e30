"""Run rollouts on one rollout server, which the worker starts. If the server ends, so does the worker."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import copy_context
from pathlib import Path
from time import monotonic
from typing import Protocol

import anyio
import msgspec

from osmosis_ai.config import LimitsConfig
from osmosis_ai.discovery.workflows import WorkflowSource
from osmosis_ai.errors import ModelError
from osmosis_ai.models.base import Listen
from osmosis_ai.records import (
    AgentReport,
    Completion,
    Failure,
    FinishReason,
    JsonObject,
    Message,
    Row,
    Tool,
    opening_messages,
)
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.worker.deadlines import elapsed_ms
from osmosis_ai.runtime.worker.ending import WorkerEndsError
from osmosis_ai.runtime.worker.observed import LimitReachedError, ObservedRollout
from osmosis_ai.runtime.worker.workflows.bridge import Bridge, ChatCall, RefusedCallError
from osmosis_ai.runtime.worker.workflows.callbacks import Ending
from osmosis_ai.runtime.worker.workflows.figures import CallFigures
from osmosis_ai.runtime.worker.workflows.listener import Listener
from osmosis_ai.runtime.worker.workflows.outcome import check_samples, judged
from osmosis_ai.runtime.worker.workflows.raised import Raised, find_raised
from osmosis_ai.runtime.worker.workflows.server_process import ServerCommand, ServerProcess
from osmosis_ai.runtime.worker.workflows.wire import ALIVE_SECONDS, Asked, RolloutServerError
from osmosis_ai.tasks import task_group

__all__ = ["WorkflowServer"]

END_SECONDS = 1.0
MAX_CONVERSATIONS = 64
"""Above this number, keep only the last one: a workflow that trims its history starts a new one with every call."""
OUTPUT_LOOKS = 5
OUTPUT_PAUSE = 0.02
LATE = ("callback_timeout", "missing_grader_callback")


class Edges(Protocol):
    """One rollout's connections to the run's model and to its own session of the repository's tools."""

    @property
    def tools(self) -> list[Tool]: ...

    @property
    def lost(self) -> Failure | None:
        """The failure that ended the tools' session, if any."""
        ...

    def complete(
        self,
        messages: list[Message],
        tools: list[Tool],
        params: JsonObject,
        replied: Callable[[Completion], None],
        listen: Listen | None,
    ) -> Awaitable[Completion]:
        """Call the model, passing on the chunks of its reply; call `replied`, then record the turn."""
        ...

    def call_tool(self, call: JsonObject) -> Awaitable[Message]:
        """Call a tool, and record the call. Returns its result for the model."""
        ...


class WorkflowServer:
    """A running rollout server and our listener for it. Created by `WorkflowServer.open`."""

    def __init__(
        self, source: WorkflowSource, root: Path, listener: Listener, process: ServerProcess, limits: LimitsConfig
    ) -> None:
        self.name = source.name
        self._folder = Path(source.folder)
        self._root = root
        self._listener = listener
        self._process = process
        self._limits = limits
        # Queue here and not in the server, where the wait would count against the rollout's deadline.
        self._room = anyio.CapacityLimiter(process.max_concurrent or math.inf)
        self._blocked = anyio.Event()
        self._blocked_seconds = 0.0

    @classmethod
    @asynccontextmanager
    async def open(
        cls, source: WorkflowSource, root: Path, python: Path, limits: LimitsConfig, log: Callable[[str], None]
    ) -> AsyncIterator[WorkflowServer]:
        """Start a rollout's server, and end it after the block.

        Raises RepositoryError if the server doesn't start. If it ends on its own, or user code blocks it past a
        deadline, the block is cancelled and WorkerEndsError is raised.
        """
        command = ServerCommand(str(python), source.entrypoint, source.artifacts, source.env)
        listener = Listener()
        await listener.start()
        try:
            async with ServerProcess.open(command, log) as process, task_group() as group:
                server = cls(source, root, listener, process, limits)
                group.start_soon(server._watch_end)
                group.start_soon(server._watch_blocked)
                yield server
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await listener.aclose()

    async def run(self, job: protocol.RolloutJob, edges: Edges, emit: Callable[[protocol.Event], None]) -> None:
        """Run one rollout, once the server has room for it, and emit its end."""
        async with self._room:
            await self._run(job, edges, emit)

    async def _run(self, job: protocol.RolloutJob, edges: Edges, emit: Callable[[protocol.Event], None]) -> None:
        started = monotonic()
        rollout = _Rollout(job, self._limits, edges, emit)
        emit(protocol.Acting(job.id))
        # A retry of the same job must look like a new rollout to the server.
        name = f"{job.id}-{secrets.token_hex(4)}"
        try:
            call_tool = rollout.call_tool if edges.tools else None
            answer = Bridge(rollout.complete).answer
            with self._listener.host(name, answer, call_tool, rollout.figures.acknowledgement) as hosted:
                asked = _asked(name, job.row, hosted.url, hosted.key, self._limits, edges.tools)
                ending = await self._process.server.run(asked, hosted.callbacks, rollout.taken)
        except RolloutServerError as error:
            if error.lost and (error.blocked or await self._is_gone()):
                self._blocked_seconds = elapsed_ms(started) / 1000
                self._blocked.set()
                # The worker is about to end, and this task with it.
                await anyio.sleep_forever()
            ending = Ending(trouble="rollout_protocol_error", message=str(error))
        raised = await self._find_raised(ending)
        reason, failure, report = rollout.judge(check_samples(ending, rollout.samples), self.name, raised)
        emit(protocol.RolloutDone(job.id, reason, elapsed_ms(started), failure, agent=report))
        if ending.trouble in LATE:
            emit(protocol.Retiring(f"the rollout server still runs row {job.row.index}, which is past its deadline"))

    async def _find_raised(self, ending: Ending) -> Raised | None:
        if ending.trouble not in ("workflow_failed", "grader_failed") or ending.category == "timeout":
            return None
        for _ in range(OUTPUT_LOOKS):
            raised = find_raised(self._process.output(), ending.message, self._folder, self._root)
            if raised is not None:
                return raised
            # The server's output may arrive after its report.
            await anyio.sleep(OUTPUT_PAUSE)
        return None

    async def _is_gone(self) -> bool:
        """Return True if the server no longer answers. If it has ended, wait for the worker to end instead."""
        with anyio.move_on_after(END_SECONDS):
            await self._process.wait()
        if self._process.ended is not None:
            await anyio.sleep_forever()
        try:
            await self._process.server.health(ALIVE_SECONDS)
        except RolloutServerError:
            return True
        return False

    async def _watch_end(self) -> None:
        code = await self._process.wait()
        raise WorkerEndsError(protocol.Dying(f"the rollout server ended with code {code}"))

    async def _watch_blocked(self) -> None:
        await self._blocked.wait()
        self._process.kill()
        raise WorkerEndsError(protocol.Stuck(None, self._blocked_seconds))


class _Rollout:
    """Serves one rollout's model and tool calls, and observes them.

    Attributes:
        samples: The names of the samples that called the model.
        figures: Measurements of these calls.
    """

    def __init__(
        self,
        job: protocol.RolloutJob,
        limits: LimitsConfig,
        edges: Edges,
        emit: Callable[[protocol.Event], None],
    ) -> None:
        self.samples: set[str] = set()
        self.figures = CallFigures(job.id)
        self._observed = ObservedRollout(job.id, opening_messages(job.row), limits, emit)
        self._edges = edges
        self._job = job.id
        self._emit = emit
        # The listener's tasks don't belong to a job, so tool calls run in a copy of this job's context.
        self._context = copy_context()
        self._latest: ChatCall | None = None
        self._conversations: list[list[Message]] = []
        self._model_failure: Failure | None = None

    def taken(self) -> None:
        """Report that the server has accepted the rollout, unless its calls have already shown that."""
        if self._latest is None:
            self._emit(protocol.Acting(self._job, taken=True))

    async def complete(self, call: ChatCall, listen: Listen | None) -> Completion:
        """Answer a model call."""
        observed = self._observed
        try:
            observed.enforce_limits()
        except LimitReachedError as error:
            raise RefusedCallError(str(error), error.reason) from error
        self._follow(call)

        def replied(completion: Completion) -> None:
            # Another conversation of the rollout may have continued meanwhile.
            if self._latest is not call:
                self._follow(call)
            observed.replied(completion)

        try:
            completion = await self._edges.complete(call.messages, call.tools, call.params, replied, listen)
        except ModelError as error:
            self._model_failure = Failure("model", str(error), kind=error.kind)
            raise
        finally:
            observed.acting()
        self._model_failure = None
        self._converse([*call.messages, completion.message])
        self.figures.add(call.sample, completion)
        if call.sample is not None:
            self.samples.add(call.sample)
        return completion

    async def call_tool(self, name: str, arguments: JsonObject) -> str:
        """Call a tool in the rollout's session, and return its result for the model."""
        call = self._observed.claim(name, arguments)
        task: asyncio.Future[Message] = self._context.run(asyncio.ensure_future, self._edges.call_tool(call))
        return str((await task)["content"])

    def _follow(self, call: ChatCall) -> None:
        self._latest = call
        self._observed.asking(call.messages, lambda messages, position: messages)

    def _converse(self, messages: list[Message]) -> None:
        """Keep a conversation, in place of the one that it continues, if any. The latest comes last."""
        continued = next((each for each in self._conversations if _continues(messages, each)), None)
        if continued is not None:
            self._conversations.remove(continued)
        self._conversations.append(messages)

    def judge(
        self, ending: Ending, name: str, raised: Raised | None
    ) -> tuple[FinishReason, Failure | None, AgentReport | None]:
        """Return the rollout's finish reason, failure and report."""
        limit = self._observed.limit
        failure, report = judged(ending, name, raised)
        if report is not None and 1 < len(self._conversations) <= MAX_CONVERSATIONS:
            report = msgspec.structs.replace(report, conversations=self._conversations[:-1])
        if self._edges.lost is not None:
            lost = self._edges.lost
            return ("timeout" if lost.origin == "timeout" else "error"), lost, report
        if ending.removed:
            return "removed", None, report
        if failure is None:
            return (limit.reason if limit is not None else "stop"), None, report
        if failure.origin == "timeout":
            return "timeout", failure, report
        if failure.origin == "agent" and ending.trouble == "workflow_failed":
            # A workflow that doesn't handle a refused or failed model call fails because of it: report the cause.
            if limit is not None:
                return limit.reason, None, AgentReport(name, "stop")
            if self._model_failure is not None:
                return "error", self._model_failure, report
        return "error", failure, report


def _continues(messages: list[Message], earlier: list[Message]) -> bool:
    """Return True if messages continue an earlier conversation; its last reply may have been reformatted."""
    count = len(earlier) - 1
    if len(messages) <= len(earlier) or messages[:count] != earlier[:count]:
        return False
    return _said(messages[count]) == _said(earlier[count])


def _said(message: Message) -> tuple[object, list[object]]:
    return message.get("content") or "", [call.get("id") for call in message.get("tool_calls") or ()]


def _asked(name: str, row: Row, url: str, key: str, limits: LimitsConfig, tools: list[Tool]) -> Asked:
    messages = [message for message in opening_messages(row) if message["content"]]
    return Asked(
        name,
        messages,
        url,
        key,
        agent_timeout=limits.timeout,
        grader_timeout=limits.reward_timeout,
        label=_label(row),
        metadata=_metadata(row),
        tools=tools,
    )


def _label(row: Row) -> str | None:
    """Return the row's ground truth, which may be in a column called `label`."""
    label = row.extra.get("label")
    return row.ground_truth if row.ground_truth is not None or label is None else str(label)


def _metadata(row: Row) -> JsonObject | None:
    """Return the row's `metadata` column: an object, or JSON text of one."""
    given = row.extra.get("metadata")
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError:
            return None
    return given if isinstance(given, dict) else None
