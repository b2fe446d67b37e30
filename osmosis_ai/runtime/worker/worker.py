"""The worker: a loaded repository that runs jobs concurrently on one event loop.

`pool` decides whether that loop has its own process or is the command's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import msgspec

from osmosis_ai import tracebacks
from osmosis_ai.code_hashes import file_hash, imported_sources
from osmosis_ai.current import rollout_scope
from osmosis_ai.discovery.repository import McpSource
from osmosis_ai.discovery.workflows import workflow_sources
from osmosis_ai.errors import FunctionError, ModelError, ModelStartError, OsmosisRolloutError, StartError, StoreError
from osmosis_ai.imports import import_from
from osmosis_ai.models.base import ChatModel, Listen, streamed
from osmosis_ai.models.host import HostOptions, ModelHost, create_model
from osmosis_ai.models.repeat import RepeatingModel
from osmosis_ai.records import (
    Completion,
    Failure,
    FinishReason,
    FunctionRef,
    JsonObject,
    Message,
    Row,
    Score,
    ScoringInput,
    StoredInput,
    Tool,
    ToolCall,
    Turn,
)
from osmosis_ai.reward_fn.expected import COLUMN, expects_tools
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.worker.admission import Admission
from osmosis_ai.runtime.worker.deadlines import Deadline, Deadlines, elapsed_ms
from osmosis_ai.runtime.worker.scorer import Scorer, load_scorer
from osmosis_ai.runtime.worker.stepping import Stepper
from osmosis_ai.shortage import NO_THREAD
from osmosis_ai.store.codec import decode_scoring_input
from osmosis_ai.tasks import task_group

if TYPE_CHECKING:
    from osmosis_ai.masking import Masker
    from osmosis_ai.mcp_tools.host import ToolHost
    from osmosis_ai.mcp_tools.session import CallOutcome, ToolSession
    from osmosis_ai.mcp_tools.setups import Setup
    from osmosis_ai.models.cache import ReplyCache
    from osmosis_ai.models.cassette import Cassette
    from osmosis_ai.rollout.client import TrainerPool
    from osmosis_ai.rollout.core.base import CompletionsResult
    from osmosis_ai.rollout.core.schemas import RolloutRequest
    from osmosis_ai.runtime.worker.agent_loop import McpContext
    from osmosis_ai.runtime.worker.agents import LoadedAgent
    from osmosis_ai.runtime.worker.sandbox import Forks, SandboxedScorers, SandboxedSession, SandboxedTools
    from osmosis_ai.runtime.worker.setups import SetupRun
    from osmosis_ai.runtime.worker.workflows.workflow import WorkflowServer

__all__ = [
    "LoadedRepository",
    "Worker",
    "current_job",
    "follow_orders",
    "job_label",
    "label_of",
    "labels_of",
    "load_repository",
]

SCORE_GRACE_SECONDS = 1.0
DECODED_AT_ONCE = 16
"""Conversations to decode before yielding to other tasks on the event loop; each can be megabytes."""

THREAD_SECONDS = 0.25
LOOK_SECONDS = 30.0
"""How long an agent loop may take to list its tools."""

current_job: ContextVar[str | None] = ContextVar("current_job", default=None)
"""The job that the running code belongs to; tasks and threads started by the job inherit it."""

job_label: ContextVar[str | None] = ContextVar("job_label", default=None)
"""A label of the same job for users, shown in the log."""


def label_of(job: protocol.Job) -> str:
    """Return the label of a job for users."""
    if isinstance(job, protocol.RolloutJob):
        return f"row {job.row.index} run {job.run_index}"
    if isinstance(job, protocol.ScoreJob):
        return labels_of(job)[0] if len(job.inputs) == 1 else "scores"
    if isinstance(job, (protocol.ServeJob, protocol.ToolsJob)):
        return f"rollout {job.request.get('rollout_id')}"
    return "probe"


def labels_of(job: protocol.Job) -> list[str]:
    """Return every label under which a job's code may have printed."""
    if isinstance(job, protocol.ScoreJob):
        return [_scoring_label(given.row_index) for given in job.inputs]
    return [label_of(job)]


def _scoring_label(row_index: int) -> str:
    return f"row {row_index} scores"


@dataclass(frozen=True)
class LoadedRepository:
    """Imported user code: the server (or how to reach one) and its setups, or the agent loop; the functions; and the
    failures to load. `python` is the interpreter for a rollout server.
    """

    spec: protocol.WorkerSpec
    server: object
    setups: list[Setup]
    agent: LoadedAgent | None
    scorers: dict[str, Scorer]
    problems: list[Failure]
    tool_sources: dict[str, str]
    function_sources: dict[str, str]
    rubric_files: dict[str, str]
    python: Path | None = None


def load_repository(spec: protocol.WorkerSpec) -> LoadedRepository:
    """Import the spec's user code into this process, without starting an event loop or a thread.

    Sandboxed code isn't imported here, but by `Worker.open`.

    Raises StartError, with the user's file and line, if something can't be loaded.
    """
    root = Path(spec.root)
    # User code opens its files relative to the repository's root.
    os.chdir(root)
    # Hashed before they are read: a save in between must not pass for what was read.
    rubric_files = _hashes({Path(ref.root, ref.file) for ref in spec.functions if ref.file and not ref.module}, root)
    server, agent, tool_sources = None, None, {}
    setups: list[Setup] = []
    sandboxed = spec.sandbox is not None
    if spec.mcp is not None and not (sandboxed and spec.mcp.kind == "directory"):
        server, setups = _load_tools(spec.mcp, root)
        tool_sources = {**imported_sources(root), **_config_files(spec.mcp, root)}
    elif spec.agent is not None:
        from osmosis_ai.runtime.worker.agents import load_agent

        agent = load_agent(spec.agent)
        tool_sources = imported_sources(root)
    python = None
    if spec.workflow is not None:
        from osmosis_ai.runtime.worker.workflows.environments import interpreter_of

        # Before the server reads them.
        tool_sources |= workflow_sources(spec.workflow, root)
        python = interpreter_of(spec.workflow)
    functions = [ref for ref in spec.functions if not (sandboxed and ref.module)]
    scorers, problems = _load_functions(functions, keep_going=spec.keep_going)
    function_sources = imported_sources(root) if functions else {}
    sources = tool_sources, function_sources, rubric_files
    return LoadedRepository(spec, server, setups, agent, scorers, problems, *sources, python)


class Worker:
    """A loaded repository that runs jobs. Made by `Worker.open`."""

    def __init__(self, loaded: LoadedRepository, emit: Callable[[protocol.Event], None]) -> None:
        self.spec = loaded.spec
        self.deadlines = Deadlines()
        self.admission = Admission()
        self._emit = emit
        self._host: ToolHost | None = None
        self._sandboxed_tools: SandboxedTools | None = None
        self._sandboxed_scorers: SandboxedScorers | None = None
        self._setups = loaded.setups
        self._agent = loaded.agent
        self._workflow: WorkflowServer | None = None
        self._trainer_pool: TrainerPool | None = None
        self._models: dict[str, ModelHost] = {}
        self._scorers = loaded.scorers
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._steppers: dict[str, Stepper] = {}
        self._modules = len(sys.modules)
        self._sources = set(loaded.tool_sources) | set(loaded.function_sources)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, loaded: LoadedRepository, emit: Callable[[protocol.Event], None], forks: Forks | None = None
    ) -> AsyncIterator[Worker]:
        """Start the server and the models' clients, and emit Ready; raise StartError if the server doesn't start.

        `forks` starts the processes in sandboxes, if the spec asks for them.
        """
        worker = cls(loaded, emit)
        async with AsyncExitStack() as stack:
            tools: list[Tool] = [] if loaded.agent is None else loaded.agent.tools
            if loaded.server is not None:
                from osmosis_ai.mcp_tools.host import ToolHost

                host = ToolHost(loaded.server, root=Path(worker.spec.root), limit=worker._tool_deadline)
                worker._host = await stack.enter_async_context(host)
                tools = host.tools
            sandboxed = await worker._start_sandboxes(stack, forks)
            stack.push_async_callback(worker._close_trainers)
            cache = _open_cache(worker.spec)
            if cache is not None:
                stack.push_async_callback(cache.aclose)
            options = HostOptions(worker.spec.batch_size, cache=cache, cassette=_open_cassette(worker.spec))
            for policy, model in worker.spec.policies.items():
                worker._models[policy] = create_model(model, options)
                stack.push_async_callback(worker._models[policy].aclose)
            functions = {*worker._scorers, *sandboxed.functions}
            agent = None if loaded.agent is None else loaded.agent.name
            if worker.spec.workflow is not None and loaded.python is not None:
                worker._workflow = await stack.enter_async_context(_open_workflow(worker.spec, loaded.python))
                agent = worker._workflow.name
            emit(
                protocol.Ready(
                    tools=[*tools, *sandboxed.tools],
                    functions=[ref.name for ref in worker.spec.functions if ref.name in functions],
                    problems=[*loaded.problems, *sandboxed.problems],
                    tool_sources=loaded.tool_sources | sandboxed.tool_sources,
                    function_sources=loaded.function_sources | sandboxed.function_sources,
                    rubric_files=loaded.rubric_files,
                    agent=agent,
                )
            )
            yield worker

    async def _start_sandboxes(self, stack: AsyncExitStack, forks: Forks | None) -> protocol.Ready:
        """Load the sandboxed code once, and return what it has: tools or functions, never both."""
        spec = self.spec
        if forks is None:
            return protocol.Ready()
        stack.push_async_callback(forks.line.aclose)
        from osmosis_ai.runtime.worker.sandbox import SandboxedScorers, SandboxedTools

        functions = [ref for ref in spec.functions if ref.module]
        if spec.mcp is not None and spec.mcp.kind == "directory":
            self._sandboxed_tools = SandboxedTools(protocol.agent_part(spec, 1), forks, self._emit)
            return await self._sandboxed_tools.load()
        if functions:
            alone = msgspec.structs.replace(protocol.scorer_part(spec), functions=functions)
            self._sandboxed_scorers = SandboxedScorers(alone, forks, self._emit)
            return await self._sandboxed_scorers.load()
        return protocol.Ready()

    async def run(self, job: protocol.Job) -> None:
        """Run one job to its last event. Errors of user code or a model never make it raise."""
        current_job.set(job.id)
        with anyio.CancelScope() as scope:
            self._scopes[job.id] = scope
            try:
                if isinstance(job, protocol.RolloutJob):
                    await self._rollout(job)
                elif isinstance(job, protocol.ScoreJob):
                    await self._score(job)
                elif isinstance(job, protocol.ProbeJob):
                    await self._probe(job)
                elif isinstance(job, protocol.ServeJob):
                    await self._serve(job)
                else:
                    self._look_at_agent(job)
            finally:
                del self._scopes[job.id]
                self.admission.leave(job.id)
                self._steppers.pop(job.id, None)
                self._report_imports()

    def _report_imports(self) -> None:
        """Report files that functions imported during the job; reload depends on them too."""
        # Comparing the number of modules first saves hashing after most jobs.
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            sources = imported_sources(Path(self.spec.root))
            if sources.keys() != self._sources:
                self._sources = set(sources)
                self._emit(protocol.Imported(sources))

    def cancel(self, job: str) -> None:
        """Cancel a job, if it still runs. The job emits nothing more."""
        if job in self._scopes:
            self._scopes[job].cancel()

    def resume(self, order: protocol.Resume) -> None:
        """Pass an order on to a paused rollout, if it still runs."""
        if order.id in self._steppers:
            self._steppers[order.id].resume(order)

    async def _probe(self, job: protocol.ProbeJob) -> None:
        model = self._models[job.policy]
        try:
            if job.price and not model.price_known():
                raise ModelStartError(
                    f"no price is known for {model.spec.name}, so --max-cost can't be enforced; leave the option out"
                )
            await model.probe()
        except StartError as error:
            self._emit(protocol.Probed(job.id, str(error)))
        else:
            self._emit(protocol.Probed(job.id))

    def _tool_deadline(self, seconds: float) -> Deadline:
        return self.deadlines.limit(seconds, current_job.get() or "")

    async def _score(self, job: protocol.ScoreJob) -> None:
        try:
            trajectories = await _decode(job.inputs)
        except StoreError as error:
            self._emit(protocol.ScoresDone(job.id, error=str(error)))
            return
        sandboxed = [ref for ref in self.spec.functions if ref.name in job.functions and ref.name not in self._scorers]
        scored: dict[str, list[Score]] = {ref.name: [] for ref in sandboxed}
        for trajectory in trajectories if sandboxed else ():
            assert self._sandboxed_scorers is not None
            job_label.set(_scoring_label(trajectory.row_index))
            for score in await self._sandboxed_scorers.score(trajectory, sandboxed):
                scored[score.function].append(score)
        by_function = []
        for name in job.functions:
            if name not in scored:
                self._emit(protocol.ScoringStarted(job.id, name))
                scored[name] = await self._call_function(name, trajectories, job.id)
            by_function.append(scored[name])
        # From scores by function to scores by rollout.
        self._emit(protocol.ScoresDone(job.id, [list(scores) for scores in zip(*by_function, strict=True)]))
        self._retire_if_blocked(score for score in chain.from_iterable(by_function) if score.function in self._scorers)

    async def _call_function(self, name: str, trajectories: list[ScoringInput], owner: str) -> list[Score]:
        scorer, seconds = self._scorers[name], self.spec.limits.reward_timeout

        def begin(position: int) -> None:
            job_label.set(_scoring_label(trajectories[position].row_index))

        if not scorer.on_loop:
            return await scorer.score_all(trajectories, seconds, begin)
        scores = []
        for position, trajectory in enumerate(trajectories):
            begin(position)
            # The scorer enforces the limit itself; the watchdog needs this deadline for functions that block the loop.
            with self.deadlines.limit(seconds + SCORE_GRACE_SECONDS, owner) as clock:
                scores.append(await scorer.score(trajectory, seconds))
            if clock.cancelled_caught:
                failure = Failure(scorer.ref.kind, f"took longer than {seconds:g} s", kind="timeout")
                scores.append(Score(name, failure=failure))
        return scores

    def _retire_if_blocked(self, scores: Iterable[Score]) -> None:
        if any(score.failure is not None and score.failure.kind == "timeout" for score in scores):
            self._emit(protocol.Retiring("a function that ran out of time may still hold a thread"))

    async def _rollout(self, job: protocol.RolloutJob) -> None:
        model: ChatModel
        if job.repeat is None:
            model = self._models[job.policy].for_rollout(job.row, job.run_index, job.draw)
        else:
            model = RepeatingModel(job.repeat)
        edges = _RolloutRun(job, self.spec, model, self._emit, admission=self.admission)
        with rollout_scope(job.id, job.row.index, _shown_columns(job.row), self.spec.scratch):
            if self._agent is not None:
                await self._agent_rollout(job, edges, self._agent)
            elif self._workflow is not None:
                await self._workflow_rollout(job, edges, self._workflow)
            elif self._sandboxed_tools is not None:
                session = self._sandboxed_tools.session(job, _call_meta(job), edges.sample)
                await self._tool_rollout(job, edges, self._sandboxed_tools.tools, session, session)
            elif self._host is not None:
                opened = self._host.session(meta=_call_meta(job), sampling_handler=edges.sample)
                await self._tool_rollout(job, edges, self._host.tools, opened, self._setup(job.id))

    async def _tool_rollout(
        self,
        job: protocol.RolloutJob,
        rollout: _RolloutRun,
        tools: list[Tool],
        session: ToolSession | SandboxedSession,
        setup: SetupRun | SandboxedSession | None,
    ) -> None:
        from osmosis_ai.runtime.worker.agent_loop import McpAgentLoop, McpContext, SteppedMcpContext, row_request

        await self.admission.enter(job.id)
        limits = self.spec.limits
        make_context: Callable[..., McpContext] = McpContext
        if job.stepping:
            stepper = Stepper(job.id, self._emit, self.deadlines, rollout.call_by_hand)
            rollout.stepper = self._steppers[job.id] = stepper
            make_context = partial(SteppedMcpContext, stepper)
        started = monotonic()
        reason: FinishReason = "error"
        failure: Failure | None = None
        async with session:
            rollout.tools, rollout.session = tools, session
            context = make_context(
                row_request(job, limits),
                tools,
                rollout,
                call_tool=rollout.call_tool,
                max_tokens_total=limits.max_tokens_total,
            )
            with self.deadlines.limit(limits.timeout, job.id) as clock:
                try:
                    if setup is not None:
                        failure = await setup.run()
                    if failure is None:
                        reason = cast(FinishReason, (await McpAgentLoop().run(context)).finish_reason)
                except ModelError as error:
                    failure = Failure("model", str(error), kind=error.kind)
                except Exception as error:  # noqa: BLE001 - any error in a rollout becomes that rollout's failure
                    failure = Failure(
                        "worker",
                        tracebacks.describe(error),
                        kind="exception",
                        detail=tracebacks.short_traceback(error, Path(self.spec.root)),
                    )
            if clock.cancelled_caught:
                reason, failure = "timeout", _timed_out(limits.timeout)
            if session.lost is not None:
                # The error that tells the loop may be one of several, in a group.
                reason, failure = "timeout" if session.lost.origin == "timeout" else "error", session.lost
            if rollout.stepper is not None:
                # The duration excludes the user's pauses.
                started += rollout.stepper.paused_seconds
            # Sent before the session closes, so that a tool that keeps the session open can't delay the record.
            self._emit(protocol.RolloutDone(job.id, reason, elapsed_ms(started), failure))
        self._retire_after(job, session, setup)

    def _retire_after(
        self,
        job: protocol.RolloutJob,
        session: ToolSession | SandboxedSession,
        setup: SetupRun | SandboxedSession | None,
    ) -> None:
        if setup is not None and setup.holds_thread:
            self._emit(protocol.Retiring(f"a setup function of row {job.row.index} still holds a thread"))
        if not session.clean:
            self._emit(protocol.Retiring(f"a tool of row {job.row.index} still holds a thread"))

    async def _workflow_rollout(self, job: protocol.RolloutJob, edges: _RolloutRun, workflow: WorkflowServer) -> None:
        """Run a rollout of a server, in whose SDK the repository's tools can be called, if there are any."""
        if self._host is None:
            await workflow.run(job, edges, self._emit)
            return
        setup = self._setup(job.id)
        started = monotonic()
        session = self._host.session(meta=_call_meta(job), sampling_handler=edges.sample)
        async with session:
            edges.tools, edges.session = self._host.tools, session
            failure = None if setup is None else await setup.run()
            if failure is None:
                await workflow.run(job, edges, self._emit)
            else:
                self._emit(protocol.RolloutDone(job.id, "error", elapsed_ms(started), failure))
        self._retire_after(job, session, setup)

    async def _agent_rollout(self, job: protocol.RolloutJob, edges: _RolloutRun, agent: LoadedAgent) -> None:
        from osmosis_ai.runtime.worker.agents import AgentRollout, Ending

        spec, limits = self.spec, self.spec.limits
        if job.stepping:
            edges.stepper = self._steppers[job.id] = Stepper(job.id, self._emit, self.deadlines, _no_call_by_hand)
        rollout = AgentRollout(agent, job, edges.complete, self._emit, spec, edges.stepper)
        started = monotonic()
        # Replaced unless the deadline cancels the loop.
        ending = Ending("timeout", _timed_out(limits.timeout))
        with self.deadlines.limit(limits.timeout, job.id):
            ending = await rollout.run(self._retire_held)
        if edges.stepper is not None:
            started += edges.stepper.paused_seconds
        self._emit(protocol.RolloutDone(job.id, ending.finish_reason, elapsed_ms(started), *ending[1:]))

    async def _serve(self, job: protocol.ServeJob) -> None:
        from osmosis_ai.rollout.core.schemas import RolloutRequest
        from osmosis_ai.rollout.runner import error_response, run_loop
        from osmosis_ai.runtime.worker.agent_loop import McpAgentLoop
        from osmosis_ai.runtime.worker.agents import ReplayedChat, sendable

        self._emit(protocol.Acting(job.id))
        request = RolloutRequest.model_validate(job.request)
        seconds = self.spec.limits.timeout
        chat = ReplayedChat(self._trainers.client(request), job.id, self._emit, job.replies)
        # Replaced unless the deadline cancels the loop.
        response = error_response(request, f"the rollout did not end within {seconds:g} s")
        run = partial(
            run_loop,
            request=request,
            llm=chat,
            debug_dir=self.spec.debug_dir,
            allow_rewrites=self.spec.allow_rewrites,
            held=self._retire_held,
        )
        async with AsyncExitStack() as stack:
            stack.enter_context(rollout_scope(request.rollout_id, None, request.metadata, self.spec.scratch))
            host, session, setup = self._host, None, None
            if host is not None:
                meta = {"rollout_id": request.rollout_id, "metadata": request.metadata}
                session = await stack.enter_async_context(host.session(meta=meta))
            with self.deadlines.limit(seconds, job.id) as clock:
                if self._agent is not None:
                    response = await run(self._agent.loop)
                elif host is not None and session is not None:
                    setup = self._setup(job.id)
                    failure = None if setup is None else await setup.run()
                    if failure is None:
                        response = await run(McpAgentLoop(host.tools), make_context=self._served(request, session))
                    else:
                        response = error_response(request, f"setup: {failure.message} ({failure.file}:{failure.line})")
            if clock.cancelled_caught:
                response.final_messages = chat.conversation
            self._emit(protocol.ServeDone(job.id, sendable(response)))
        if (session is not None and not session.clean) or (setup is not None and setup.holds_thread):
            self._emit(protocol.Retiring("a tool or a setup function still holds a thread"))

    @property
    def _trainers(self) -> TrainerPool:
        if self._trainer_pool is None:
            from osmosis_ai.rollout.client import TrainerPool

            self._trainer_pool = TrainerPool()
        return self._trainer_pool

    async def _close_trainers(self) -> None:
        if self._trainer_pool is not None:
            await self._trainer_pool.aclose()

    def _served(self, request: RolloutRequest, session: ToolSession) -> Callable[..., McpContext]:
        """Return a maker of the built-in loop's context for a trainer's rollout."""
        from osmosis_ai.mcp_tools.conversion import truncate
        from osmosis_ai.runtime.worker.agent_loop import McpContext

        limits = self.spec.limits

        async def call_tool(call: JsonObject) -> Message:
            # This comes from the trainer unchecked, so it may have any form.
            function = call.get("function") or {}
            name, arguments = str(function.get("name")), function.get("arguments") or "{}"
            outcome = await session.call(name, arguments, timeout=limits.tool_timeout)
            _call_failure(outcome)
            text, _ = truncate(outcome.text, limits.max_tool_output)
            return {"role": "tool", "tool_call_id": call.get("id"), "content": text}

        return partial(
            McpContext, call_tool=call_tool, max_tokens_total=request.max_tokens_total, counted="completion_tokens"
        )

    def _setup(self, job: str) -> SetupRun | None:
        """Prepare the setup functions' run before a rollout; None if there are none."""
        if not self._setups:
            return None
        from osmosis_ai.runtime.worker.setups import SetupRun

        # If a function takes the worker down, the rollout is to blame.
        self._emit(protocol.Acting(job))
        return SetupRun(self._setups, Path(self.spec.root))

    def _look_at_agent(self, job: protocol.ToolsJob | protocol.InspectJob) -> None:
        from osmosis_ai.rollout.core.schemas import RolloutRequest
        from osmosis_ai.rollout.outcome import tool_dicts, tools_of
        from osmosis_ai.runtime.worker.agents import inspect_agent

        self._emit(protocol.Acting(job.id))
        assert self._agent is not None
        # Nothing below yields to the event loop, so the watchdog enforces this deadline.
        with self.deadlines.limit(min(LOOK_SECONDS, self.spec.limits.timeout), job.id):
            if isinstance(job, protocol.InspectJob):
                self._emit(inspect_agent(self._agent, job.id))
                return
            try:
                tools = tool_dicts(tools_of(self._agent.loop, RolloutRequest.model_validate(job.request)))
            except OsmosisRolloutError as error:
                self._emit(protocol.ToolsDone(job.id, error=str(error)))
            else:
                self._emit(protocol.ToolsDone(job.id, tools))

    def _retire_held(self) -> None:
        self._emit(protocol.Retiring("an agent loop keeps running after its cancellation"))


async def follow_orders(
    worker: Worker,
    next_order: Callable[[], Awaitable[protocol.Order]],
    run: Callable[[protocol.Job], Coroutine[object, None, None]],
) -> None:
    """Run jobs concurrently until a Stop arrives, then cancel the remaining jobs."""
    async with task_group() as group:
        while not isinstance(order := await next_order(), protocol.Stop):
            if isinstance(order, protocol.Cancel):
                worker.cancel(order.id)
            elif isinstance(order, protocol.Resume):
                worker.resume(order)
            else:
                # Set before the task is created, so that the task and everything it starts inherit the job.
                current_job.set(order.id)
                job_label.set(label_of(order))
                group.start_soon(run, order)
        group.cancel_scope.cancel()


class _RolloutRun:
    """One rollout's connections to its model and its tools' session. It emits an event for each call."""

    def __init__(
        self,
        job: protocol.RolloutJob,
        spec: protocol.WorkerSpec,
        model: ChatModel,
        emit: Callable[[protocol.Event], None],
        *,
        admission: Admission,
    ) -> None:
        self._job = job
        self._limits = spec.limits
        self._model = model
        self._emit = emit
        self._admission = admission
        self._params = spec.policies[job.policy].params
        self._turns = 0
        self.tools: list[Tool] = []
        self.session: ToolSession | SandboxedSession | None = None
        self.stepper: Stepper | None = None

    @property
    def lost(self) -> Failure | None:
        """The failure that ended the tools' session, if any."""
        return None if self.session is None else self.session.lost

    async def chat_completions(self, messages: list[Message], **params: Any) -> CompletionsResult:
        """Call the run's model for the built-in loop, without holding the loop's admission in the meantime."""
        from osmosis_ai.runtime.worker.agent_loop import result_of

        self._admission.leave(self._job.id)
        completion = await self.complete(messages, self.tools, params)
        await self._admission.enter(self._job.id)
        return result_of(completion)

    async def complete(
        self,
        messages: list[Message],
        tools: list[Tool],
        params: JsonObject,
        replied: Callable[[Completion], None] = lambda completion: None,
        listen: Listen | None = None,
    ) -> Completion:
        """Call the run's model, with `params` overriding the run's, and record the turn; before that, call `replied`
        with the reply. `listen` gets the reply's parts, if the model streams.
        """
        params = {**self._params, **params} if params else self._params
        started = monotonic()
        if listen is None:
            completion = await self._model.complete(messages, tools, params)
        else:
            completion = await streamed(self._model, messages, tools, params, listen)
        replied(completion)
        turn = self._turn(self._turns, completion, started, params)
        if self.stepper is not None:
            turn, completion = await self.stepper.after_reply(turn, completion)
        self._emit(protocol.TurnDone(self._job.id, turn, completion.message))
        self._turns += 1
        return completion

    async def sample(self, messages: list[Message], params: JsonObject) -> Message:
        started = monotonic()
        completion = await self._model.complete(messages, [], {**self._params, **params})
        # Tools run after `complete` has counted their turn, hence the -1.
        self._emit(protocol.SampleDone(self._job.id, self._turn(self._turns - 1, completion, started, self._params)))
        return completion.message

    async def call_tool(self, call: JsonObject) -> Message:
        record, text = await self._call(call["id"], call["function"]["name"], call["function"]["arguments"])
        message = {"role": "tool", "tool_call_id": call["id"], "content": text}
        self._emit(protocol.CallDone(self._job.id, record, message))
        if self.stepper is not None:
            self.stepper.called(record)
        return message

    async def call_by_hand(self, name: str, arguments: str) -> tuple[ToolCall, str]:
        """Call a tool in this rollout's session, without adding the call to the trajectory."""
        return await self._call("by hand", name, arguments)

    async def _call(self, call_id: str, name: str, arguments: str) -> tuple[ToolCall, str]:
        from osmosis_ai.mcp_tools.conversion import truncate

        started = monotonic()
        assert self.session is not None  # who calls tools has been given some
        outcome = await self.session.call(name, arguments, timeout=self._limits.tool_timeout)
        while _lacked_thread(outcome) and monotonic() - started < self._limits.tool_timeout:
            await anyio.sleep(THREAD_SECONDS)
            outcome = await self.session.call(name, arguments, timeout=self._limits.tool_timeout)
        text, truncated_from = truncate(outcome.text, self._limits.max_tool_output)
        record = ToolCall(
            # A workflow may call tools before the model.
            turn=max(self._turns - 1, 0),
            id=call_id,
            name=name,
            arguments=arguments,
            duration_ms=elapsed_ms(started),
            error=outcome.error,
            truncated_from=truncated_from,
            content=outcome.content,
            failure=_call_failure(outcome),
        )
        return record, text

    def _turn(self, index: int, completion: Completion, started: float, params: JsonObject) -> Turn:
        return Turn(
            index=index,
            finish_reason=completion.finish_reason,
            usage=completion.usage,
            duration_ms=elapsed_ms(started),
            model=completion.model,
            params=params,
            logprobs=completion.logprobs,
            token_ids=completion.token_ids,
            left_out=completion.left_out,
            attempts=completion.attempts,
            cost_usd=completion.cost_usd,
            cached=completion.cached,
        )


def _open_workflow(spec: protocol.WorkerSpec, python: Path) -> AbstractAsyncContextManager[WorkflowServer]:
    from osmosis_ai.runtime.worker.workflows.workflow import WorkflowServer

    assert spec.workflow is not None

    def log(line: str) -> None:
        job_label.set("rollout server")
        print(line)

    return WorkflowServer.open(spec.workflow, Path(spec.root), python, spec.limits, log)


def _load_tools(source: McpSource, root: Path) -> tuple[object, list[Setup]]:
    from osmosis_ai.mcp_tools.host import read_config
    from osmosis_ai.mcp_tools.loading import load_server, prepare_path
    from osmosis_ai.mcp_tools.setups import load_setups

    if source.kind == "directory":
        entry = Path(source.path or "")
        prepare_path(entry.parent, root)
        server = load_server(entry, source.server_name)
        return server, load_setups(entry.parent, root)
    if source.kind == "config":
        return read_config(Path(source.path or "")), []
    if source.kind == "none":
        from fastmcp import FastMCP

        return FastMCP("none"), []
    return source.url, []


def _config_files(source: McpSource, root: Path) -> dict[str, str]:
    """Hash an `mcp.json` and the repository's files in its commands."""
    if source.kind != "config":
        return {}
    from osmosis_ai.mcp_tools.host import read_config

    config = Path(source.path or "")
    found = {config}
    for server in read_config(config)["mcpServers"].values():
        arguments = server.get("args")
        words = [server.get("command"), *(arguments if isinstance(arguments, list) else ())]
        programs = (root / str(server.get("cwd") or "") / str(word) for word in words)
        found.update(file for file in programs if file.is_relative_to(root) and file.is_file())
    return _hashes(found, root)


def _hashes(files: Iterable[Path], root: Path) -> dict[str, str]:
    return {Path(os.path.relpath(file, root)).as_posix(): file_hash(file) for file in files}


def _open_cache(spec: protocol.WorkerSpec) -> ReplyCache | None:
    if spec.cache is None or not spec.policies:
        return None
    from osmosis_ai.models.cache import open_cache

    return open_cache(Path(spec.cache), _masker(spec))


def _open_cassette(spec: protocol.WorkerSpec) -> Cassette | None:
    if spec.cassette is None or not spec.policies:
        return None
    from osmosis_ai.models.cassette import Cassette

    return Cassette(spec.cassette, _masker(spec))


def _masker(spec: protocol.WorkerSpec) -> Masker:
    from osmosis_ai.masking import Masker

    return Masker.from_environment(os.environ, [model.api_key for model in spec.policies.values() if model.api_key])


def _load_functions(functions: list[FunctionRef], *, keep_going: bool) -> tuple[dict[str, Scorer], list[Failure]]:
    # Reversed, so that the first function's root ends up first on the path.
    for folder in reversed(list(dict.fromkeys(ref.root for ref in functions))):
        import_from(Path(folder), [] if folder in sys.path else [folder])
    scorers: dict[str, Scorer] = {}
    # By message, because all functions of a file fail for the same reason.
    problems: dict[str, Failure] = {}
    for ref in functions:
        try:
            scorers[ref.name] = load_scorer(ref)
        except FunctionError as error:
            place = tracebacks.locate(error.__cause__ or error, Path(ref.root))
            file, line = (ref.file, ref.line) if place is None else (place.file, place.line)
            problems.setdefault(str(error), Failure(ref.kind, str(error), kind="load", file=file, line=line))
    if problems and not keep_going:
        raise FunctionError.of_all(problems, others=bool(scorers))
    return scorers, list(problems.values())


def _lacked_thread(outcome: CallOutcome) -> bool:
    """Return True if a sync tool could not be called at all, because the system starts no more threads."""
    return outcome.error == "exception" and outcome.raised is None and NO_THREAD in outcome.text


def _call_failure(outcome: CallOutcome) -> Failure | None:
    """Return why a tool call failed, and log the traceback of a tool that raised."""
    from osmosis_ai.mcp_tools.conversion import error_result

    if outcome.error is None:
        return None
    if outcome.raised is None:
        return error_result(outcome.text, outcome.error)
    print(outcome.raised.detail, file=sys.stderr)
    return outcome.raised


async def _no_call_by_hand(name: str, arguments: str) -> tuple[ToolCall, str]:
    call = ToolCall(0, "by hand", name, arguments, 0.0, error="unknown_tool")
    return call, "Error: an agent loop runs its tools itself; they can't be called by hand"


def _call_meta(job: protocol.RolloutJob) -> JsonObject:
    """Return the metadata that tools may see of their rollout: never the ground truth."""
    return {"rollout_id": job.id, "row_index": job.row.index, "metadata": _shown_columns(job.row)}


def _shown_columns(row: Row) -> JsonObject:
    """Return a row's columns without the calls that are expected of the rollout."""
    if not expects_tools(row.extra):
        return row.extra
    return {name: value for name, value in row.extra.items() if name != COLUMN}


async def _decode(inputs: list[StoredInput]) -> list[ScoringInput]:
    trajectories: list[ScoringInput] = []
    for start in range(0, len(inputs), DECODED_AT_ONCE):
        trajectories += map(decode_scoring_input, inputs[start : start + DECODED_AT_ONCE])
        await anyio.lowlevel.checkpoint()
    return trajectories


def _timed_out(seconds: float) -> Failure:
    return Failure("timeout", f"the rollout took longer than {seconds:g} s (--timeout)", kind="rollout")
