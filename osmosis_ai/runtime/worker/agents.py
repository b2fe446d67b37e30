"""Load a repository's own agent loop in a worker, and run it on a row with the run's model, or for a trainer.

For workers only, because it imports pydantic.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast, get_args

import msgspec

from osmosis_ai import errors, tracebacks
from osmosis_ai.discovery.agents import AgentSource
from osmosis_ai.failures import FailureKind
from osmosis_ai.imports import import_from
from osmosis_ai.mcp_tools.loading import import_failure
from osmosis_ai.records import (
    AgentReport,
    Completion,
    Failure,
    FinishReason,
    JsonObject,
    JsonValue,
    Message,
    Score,
    Tool,
    opening_messages,
)
from osmosis_ai.rollout.client import encode
from osmosis_ai.rollout.core.base import ChatClient, CompletionsResult, RolloutAgentLoop, RolloutContext
from osmosis_ai.rollout.core.schemas import OpenAIFunctionToolSchema, RolloutRequest, RolloutResponse
from osmosis_ai.rollout.outcome import LoopOutcome, describe_raised, outcome_of, plain_messages, tool_dicts, tools_of
from osmosis_ai.rollout.validator import validate_agent_loop
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.worker.agent_loop import SteppedContext, result_of, row_request
from osmosis_ai.runtime.worker.observed import ObservedRollout
from osmosis_ai.runtime.worker.stepping import Stepper

__all__ = [
    "AgentRollout",
    "Ending",
    "LoadedAgent",
    "ReplayedChat",
    "finished",
    "inspect_agent",
    "load_agent",
    "sendable",
]

_REASONS = frozenset(get_args(FinishReason)) - {"removed", "timeout", "error"}


@dataclass(frozen=True)
class LoadedAgent:
    """An imported agent loop. `name` is the loop's own, or, if it has none, its name on the command line."""

    loop: RolloutAgentLoop
    name: str
    tools: list[Tool]


def load_agent(source: AgentSource) -> LoadedAgent:
    """Import an agent loop into this process, with its root first on `sys.path`; create a class without arguments.

    Raises RepositoryError, with the user's file and line, if the import fails, or the attribute doesn't exist or isn't
    an agent loop.
    """
    root = Path(source.root)
    import_from(root, [source.root])
    shown = source.file or source.module
    try:
        module = importlib.import_module(source.module)
    except BaseException as error:  # any exception of user code, even SystemExit, is the repository's failure
        raise errors.RepositoryError(import_failure(error, root / shown, root, shown)) from error
    if not hasattr(module, source.attribute):
        raise errors.RepositoryError(f"{shown}: has no `{source.attribute}`, which -m {source.name} names")
    found = getattr(module, source.attribute)
    if isinstance(found, type) and issubclass(found, RolloutAgentLoop):
        try:
            found = found()
        except BaseException as error:  # as above
            why = f"`{source.attribute}` can't be made without arguments: {tracebacks.describe(error)}"
            raise errors.RepositoryError(
                f"{tracebacks.locate(error, root) or shown}: {why}\n"
                "Write an instance of it into the module, and name that one."
            ) from error
    if not isinstance(found, RolloutAgentLoop):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise errors.RepositoryError(
            f"{shown}: `{source.attribute}` is {kind}, not an agent loop: "
            "derive its class from osmosis_ai.rollout.RolloutAgentLoop"
        )
    name = getattr(found, "name", None)
    return LoadedAgent(found, name if isinstance(name, str) and name.strip() else source.name, _default_tools(found))


def inspect_agent(agent: LoadedAgent, job: str) -> protocol.Inspected:
    """Validate an agent loop for a job."""
    found = validate_agent_loop(agent.loop)
    issues = [(issue, False) for issue in found.errors] + [(issue, True) for issue in found.warnings]
    findings = [protocol.LoopFinding(issue.code, issue.message, issue.subject, minor) for issue, minor in issues]
    return protocol.Inspected(job, found.agent_name, agent.tools, findings)


def _default_tools(loop: RolloutAgentLoop) -> list[Tool]:
    """Return the tools that can be listed without a row."""
    try:
        return tool_dicts(list(loop.get_default_tools()))
    except Exception:  # noqa: BLE001 - tools may depend on the row; if they fail then, the rollout fails
        return []


class Ending(NamedTuple):
    """The end of a loop's rollout. `messages` is the conversation that the loop returned, None if it returned none."""

    finish_reason: FinishReason
    failure: Failure | None = None
    messages: list[Message] | None = None
    report: AgentReport | None = None


def finished(outcome: LoopOutcome, agent: LoadedAgent, root: Path) -> Ending:
    """Convert a loop's outcome to the end of its rollout."""
    run = agent.loop.run
    if outcome.raised is not None:
        return Ending("error", _raised(outcome.raised, root, run))
    metrics = {} if outcome.metrics is None else outcome.metrics.model_dump()
    if outcome.kind != "completed":
        report = AgentReport(agent.name, "error", metrics=metrics) if outcome.kind == "error" else None
        return Ending(
            "error", _blamed(outcome.message or "", outcome.kind, run, root), outcome.messages or None, report
        )
    said = outcome.finish_reason
    score = None if outcome.reward is None else Score(agent.name, outcome.reward)
    if outcome.reward_problem is not None:
        kind, message = outcome.reward_problem
        score = Score(agent.name, failure=_blamed(message, kind, run, root))
    reason = cast(FinishReason, said) if said in _REASONS else "stop"
    return Ending(reason, None, outcome.messages, AgentReport(agent.name, said, score, metrics))


def _blamed(message: str, kind: FailureKind, function: Callable[..., object], root: Path) -> Failure:
    """Make a failure without a traceback, located at the function's definition."""
    place = tracebacks.locate_function(function, root)
    if place is None:
        return Failure("agent", message, kind=kind)
    return Failure("agent", message, kind=kind, file=place.file, line=place.line)


def _raised(error: BaseException, root: Path, function: Callable[..., object]) -> Failure:
    """Make a failure from an exception of a loop's method. A ModelError among the causes makes it the model's."""
    cause: BaseException | None = error
    seen = 0
    # Bounded, because user code can chain exceptions in a circle.
    while cause is not None and seen < 10:
        if isinstance(cause, errors.ModelError):
            return Failure("model", str(cause), kind=cause.kind)
        cause, seen = cause.__cause__, seen + 1
    place = tracebacks.locate(error, root) or tracebacks.locate_function(function, root)
    return Failure(
        "agent",
        describe_raised(error),
        kind="exception",
        file=place.file if place is not None else None,
        line=place.line if place is not None else None,
        detail=tracebacks.short_traceback(error, root),
    )


class AgentRollout:
    """One rollout of a repository's own agent loop on a row.

    `complete` calls the run's model, with tools and sampling parameters, and records the turn. The limits of turns and
    tokens are enforced here, whatever the loop does.
    """

    def __init__(
        self,
        agent: LoadedAgent,
        job: protocol.RolloutJob,
        complete: Callable[[list[Message], list[Tool], JsonObject], Awaitable[Completion]],
        emit: Callable[[protocol.Event], None],
        spec: protocol.WorkerSpec,
        stepper: Stepper | None,
    ) -> None:
        self._agent = agent
        self._job = job
        self._complete = complete
        self._emit = emit
        self._spec = spec
        self._root = Path(spec.root)
        self._stepper = stepper
        self._tools: list[Tool] = []
        self._observed = ObservedRollout(job.id, opening_messages(job.row), spec.limits, emit)
        self._model_failure: Failure | None = None

    async def run(self, held: Callable[[], None]) -> Ending:
        """Run the loop to its end; call `held` if the loop keeps running after its cancellation."""
        self._emit(protocol.Acting(self._job.id))
        request = self._request()
        try:
            given = tools_of(self._agent.loop, request)
        except errors.OsmosisRolloutError as error:
            return Ending("error", _raised(error, self._root, self._agent.loop.get_tools))
        self._tools = tool_dicts(given)
        context = self._context(given, request)
        outcome = await outcome_of(self._agent.loop, context, held=held)
        assert outcome is not None  # None means a timeout, and none was given
        return self._judge(finished(outcome, self._agent, self._root))

    def _request(self) -> RolloutRequest:
        row = self._job.row
        # Copies, so that a loop can't change the row or the run's parameters.
        metadata = copy.deepcopy({**row.extra, "row_index": row.index, "ground_truth": row.ground_truth})
        return row_request(
            self._job,
            self._spec.limits,
            params=copy.deepcopy(self._spec.policies[self._job.policy].params),
            metadata=metadata,
        )

    def _context(self, tools: list[OpenAIFunctionToolSchema | Tool], request: RolloutRequest) -> RolloutContext:
        make: Callable[..., RolloutContext] = RolloutContext
        allow_rewrites = self._spec.allow_rewrites
        if self._stepper is not None:
            make = partial(SteppedContext, self._stepper)
            # The user may change messages that the loop has sent.
            allow_rewrites = True
        return make(request, tools, self, debug_dir=self._spec.debug_dir, allow_rewrites=allow_rewrites)

    async def chat_completions(self, messages: list[Message], **params: JsonValue) -> CompletionsResult:
        """Call the run's model for the loop; the loop's sampling parameters override the run's.

        Raises OsmosisRolloutError if the request fails, or a limit is reached.
        """
        observed = self._observed
        observed.enforce_limits()
        observed.asking(messages, plain_messages)
        try:
            completion = await self._complete([*observed.conversation], self._tools, params)
        except errors.ModelError as error:
            self._model_failure = Failure("model", str(error), kind=error.kind)
            raise _translated(error) from error
        finally:
            observed.acting()
        self._model_failure = None
        observed.replied(completion)
        return result_of(msgspec.structs.replace(completion, message=copy.deepcopy(completion.message)))

    def _judge(self, ending: Ending) -> Ending:
        """Attribute the failure if the loop passed on the model's, or stopped at a limit."""
        failure = ending.failure
        if failure is not None and failure.origin == "agent":
            limit = self._observed.limit
            if limit is not None and str(limit) in failure.message:
                return Ending(limit.reason, None, ending.messages, ending.report)
            if self._model_failure is not None and self._model_failure.message in failure.message:
                return ending._replace(failure=self._model_failure)
        if ending.messages == self._observed.conversation:
            return ending._replace(messages=None)
        return ending


def _translated(error: errors.ModelError) -> errors.OsmosisRolloutError:
    """Translate a model's error to the error that the trainer's client would raise."""
    text = str(error)
    if error.kind in ("refused", "dropped"):
        return errors.OsmosisTransportError(text)
    if error.kind == "timeout":
        return errors.OsmosisTimeoutError(text)
    if error.kind in ("overloaded", "bad_reply"):
        return errors.OsmosisServerError(text, max(error.status or 500, 500))
    return errors.OsmosisValidationError(text, error.status or 400)


def sendable(response: RolloutResponse) -> JsonObject:
    """Convert a response to JSON-able data, whatever the loop put into it."""
    plain: JsonObject = msgspec.json.decode(encode(response.model_dump()))
    return plain


class ReplayedChat:
    """A trainer's chat client that reports every reply, and replays them in a second attempt instead of asking again.

    `replies` are the trainer's replies to an earlier attempt. `conversation` holds the messages of the last request,
    and its reply, if any.
    """

    def __init__(
        self, client: ChatClient, job: str, emit: Callable[[protocol.Event], None], replies: list[protocol.TrainerReply]
    ) -> None:
        self._client = client
        self._job = job
        self._emit = emit
        self._replies = list(reversed(replies))  # `pop` takes the oldest
        self.conversation: list[Message] = []

    async def chat_completions(self, messages: list[Message], **params: JsonValue) -> CompletionsResult:
        """Call the trainer; raise OsmosisRolloutError if that fails, or if a second attempt sends other messages."""
        asked = hashlib.blake2b(encode([messages, params]), digest_size=16).hexdigest()
        if self._replies:
            before = self._replies.pop()
            if before.asked != asked:
                raise errors.OsmosisRolloutError(
                    "the rollout's worker was lost, and the second attempt sent different messages; "
                    "the trainer keeps only one conversation per rollout"
                )
            result = CompletionsResult(**before.reply)
            self.conversation = [*messages, result.message]
            return result
        self.conversation = messages
        self._emit(protocol.Asked(self._job))
        try:
            result = await self._client.chat_completions(messages, **params)
            self.conversation = [*messages, result.message]
            self._emit(protocol.Replied(self._job, protocol.TrainerReply(asked, asdict(result))))
        finally:
            self._emit(protocol.Acting(self._job))
        return result
