"""`LocalBackend`: workflows and graders on this process's event loop."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osmosis_ai.rollout.artifacts import artifact_root, artifacts_dir
from osmosis_ai.rollout.backend.base import ExecutionBackend, ResultCallback
from osmosis_ai.rollout.backend.local.deadline import DeadlineError, within
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext, RolloutContext, get_rollout_context
from osmosis_ai.rollout.types.output import output_of
from osmosis_ai.rollout.types.sample import ExecutionOutcome, ExecutionRequest, ExecutionResult, RolloutSample
from osmosis_ai.rollout.vocabulary import NOT_GRADED, RolloutErrorCategory, RolloutStatus, category_of
from osmosis_ai.tracebacks import locate, short_traceback

if TYPE_CHECKING:
    from osmosis_ai.rollout.agent_workflow import AgentWorkflow
    from osmosis_ai.rollout.grader import Grader
    from osmosis_ai.rollout.types.config import AgentWorkflowConfig, GraderConfig

__all__ = ["LocalBackend"]

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 4
"""Maximum number of concurrent workflows without a configuration."""

SHOWN_QUEUE_TIME = 0.1
"""Queue time in seconds above which a deadline's error message mentions it."""


class LocalBackend(ExecutionBackend):
    """Runs workflows and graders in this process, and enforces their deadlines.

    A workflow that fails, or exceeds its deadline, isn't graded. Without a grader, and for rows with neither a label
    nor metadata, grading fails.

    Args:
        workflow: The AgentWorkflow class. This and the other arguments can also be given as `"module:attribute"`.
        workflow_config: Its configuration. `concurrency.max_concurrent` limits concurrent workflows; without a
            configuration, the limit is 4.
        grader: The Grader class.
        grader_config: Its configuration.
    """

    def __init__(
        self,
        *,
        workflow: type[AgentWorkflow[Any]] | str,
        workflow_config: AgentWorkflowConfig | str | None = None,
        grader: type[Grader] | str | None = None,
        grader_config: GraderConfig | str | None = None,
    ) -> None:
        self.workflow_cls: type[AgentWorkflow[Any]] = _resolved(workflow)
        self.workflow_config: AgentWorkflowConfig | None = _resolved(workflow_config)
        self.grader_cls: type[Grader] | None = _resolved(grader)
        self.grader_config: GraderConfig | None = _resolved(grader_config)
        config = self.workflow_config
        self._slots = _Slots(config.concurrency.max_concurrent if config else DEFAULT_CONCURRENCY)
        self.artifact_root = artifact_root()

    @property
    def max_concurrency(self) -> int:
        """Maximum number of concurrent workflows; 0 for no limit."""
        return self._slots.limit or 0

    def health(self) -> dict[str, Any]:
        """Return the numbers of queued and running rollouts."""
        slots = self._slots
        concurrency = {"max_concurrent": slots.limit, "queued": slots.queued, "running": slots.running}
        return {"status": "ok", "concurrency": concurrency}

    async def execute(
        self,
        request: ExecutionRequest,
        on_workflow_complete: ResultCallback | None = None,
        on_grader_complete: ResultCallback | None = None,
    ) -> ExecutionOutcome:
        """Run one rollout; return its results, and also pass them to the callbacks.

        With `on_workflow_complete` alone, the rollout isn't graded.
        """
        # Without a server, as in a test, there is no context; a new one takes the model's address from the environment.
        rollout = get_rollout_context() or RolloutContext(rollout_id=request.id)
        grades = request.grade and (on_grader_complete is not None or on_workflow_complete is None)
        graded = None
        asked = time.monotonic()
        async with self._slots.one(rollout):
            result = await self._run_workflow(request, rollout, time.monotonic() - asked)
            if on_workflow_complete is not None:
                await on_workflow_complete(result)
            if grades:
                graded = await self._grade(request, rollout, result)
        # The slot is free by now, so a controller that answers slowly delays only its own rollout.
        if graded is not None and on_grader_complete is not None:
            await on_grader_complete(graded)
        return ExecutionOutcome(workflow=result, grader=graded)

    async def _run_workflow(self, request: ExecutionRequest, rollout: RolloutContext, queued: float) -> ExecutionResult:
        limit = request.agent_timeout_sec
        folder = await artifacts_dir(self.artifact_root, request.id)

        async def work() -> dict[str, RolloutSample]:
            config = copy.deepcopy(self.workflow_config)
            ctx = AgentWorkflowContext(request.prompt, config, request.metadata, folder)
            with rollout:
                value = await _awaited(self.workflow_cls(config).run(ctx), "run")
                return await _samples_of(value, rollout, request.label)

        try:
            # The deadline includes the time in the queue, because the controller has waited since its request.
            samples = await within(None if limit is None else limit - queued, work)
        except DeadlineError:
            message = f"workflow exceeded its {limit}s deadline"
            if queued >= SHOWN_QUEUE_TIME:
                message += f" ({queued:.1f}s of it spent queued)"
            return _timeout(message, {})
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            return _failure(error, {})
        return _result(RolloutStatus.SUCCESS, samples)

    async def _grade(
        self, request: ExecutionRequest, rollout: RolloutContext, result: ExecutionResult
    ) -> ExecutionResult:
        if result.status is not RolloutStatus.SUCCESS:
            # Repeat the workflow's reason, because some controllers read only the grader's result.
            return result
        samples = result.samples or ({} if result.sample is None else {_name(result.sample, request): result.sample})
        grader = self.grader_cls
        if grader is None:
            return _refused(f"{NOT_GRADED}: its LocalBackend has no grader", samples)
        if request.label is None and request.metadata is None:
            return _refused(f"{NOT_GRADED}: its row has neither a label nor metadata", samples)
        await rollout.set_status(RolloutStatus.GRADING)
        folder = await artifacts_dir(self.artifact_root, request.id)
        ctx = GraderContext(request.label, None, None, request.metadata, folder, samples=samples)
        # A new context, because a grader may run its own agents, whose conversations aren't samples.
        grading = dataclasses.replace(rollout, sample_source=None, sample_sources={})

        async def work() -> None:
            with grading:
                await _awaited(grader(self.grader_config).grade(ctx), "grade")

        try:
            await within(request.grader_timeout_sec, work)
        except DeadlineError:
            return _timeout(f"grader exceeded its {request.grader_timeout_sec}s deadline", samples)
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            return _failure(error, samples)
        problem = _ungraded(ctx.samples)
        return _refused(problem, ctx.samples) if problem else _result(RolloutStatus.SUCCESS, ctx.samples)


class _Slots:
    """Limits concurrent rollouts."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.queued = 0
        self.running = 0
        self._free = None if limit is None else asyncio.Semaphore(limit)

    @asynccontextmanager
    async def one(self, rollout: RolloutContext) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        if self._free is not None:
            self.queued += 1
            try:
                if self._free.locked():
                    await rollout.set_status(RolloutStatus.QUEUED)
                await self._free.acquire()
            finally:
                self.queued -= 1
        self.running += 1
        try:
            await rollout.set_status(RolloutStatus.RUNNING)
            yield
        finally:
            self.running -= 1
            if self._free is not None:
                self._free.release()


def _resolved(reference: Any) -> Any:
    """Import `"module:attribute"`; return anything else as it is. Raises ValueError or ImportError."""
    if not isinstance(reference, str):
        return reference
    module, colon, attribute = reference.rpartition(":")
    if not colon:
        raise ValueError(f"{reference!r} names nothing to import: write module:attribute")
    found = getattr(import_module(module), attribute, None)
    if found is None:
        raise ImportError(f"{module} has no attribute {attribute!r}")
    return found


async def _awaited(value: object, method: str) -> object:
    if inspect.isasyncgen(value):
        raise TypeError(f"{method}() is a generator, because it has a `yield`: return the result instead")
    if not inspect.isawaitable(value):
        raise TypeError(f"{method}() must be async: write `async def {method}(self, ctx)`")
    result: object = await value
    return result


async def _samples_of(value: object, rollout: RolloutContext, label: str | None) -> dict[str, RolloutSample]:
    """Return the samples of a workflow whose `run` returned a value."""
    if value is None:
        return await rollout.get_samples()
    try:
        output = output_of(value)
    except TypeError:
        # Workflows for SDK 0.2, which ignored the value, may return anything.
        if not rollout.has_samples:
            raise
        return await rollout.get_samples()
    if output.messages is None:
        return {}
    return {"": RolloutSample(messages=output.messages, label=label, metrics=dict(output.metrics))}


def _name(sample: RolloutSample, request: ExecutionRequest) -> str:
    return sample.id or request.id


def _ungraded(samples: Mapping[str, RolloutSample]) -> str | None:
    """Return what is missing after grading, None if nothing is."""
    if not samples:
        return "there is no sample: run() must return messages, or create an agent or session of an integration"
    # A removed sample needs no reward.
    missing = [name for name, sample in samples.items() if sample.reward is None and not sample.remove_sample]
    if not missing:
        return None
    if len(samples) == 1:
        return "the sample has no reward after grading: call ctx.set_reward(…)"
    return f"samples without a reward after grading: {', '.join(missing)}"


def _result(status: RolloutStatus, samples: Mapping[str, RolloutSample], **fields: Any) -> ExecutionResult:
    if len(samples) > 1:
        return ExecutionResult(status=status, samples=dict(samples), **fields)
    return ExecutionResult(status=status, sample=next(iter(samples.values()), None), **fields)


def _refused(message: str, samples: Mapping[str, RolloutSample]) -> ExecutionResult:
    category = RolloutErrorCategory.VALIDATION_ERROR
    return _result(RolloutStatus.FAILURE, samples, err_message=message, err_category=category)


def _timeout(message: str, samples: Mapping[str, RolloutSample]) -> ExecutionResult:
    logger.error(message)
    category = RolloutErrorCategory.TIMEOUT
    return _result(RolloutStatus.FAILURE, samples, err_message=message, err_category=category)


def _failure(error: Exception, samples: Mapping[str, RolloutSample]) -> ExecutionResult:
    root = Path.cwd()
    place = locate(error, root)
    trace = short_traceback(error, root)
    logger.error(trace)
    return _result(
        RolloutStatus.FAILURE,
        samples,
        err_message=_text(error),
        err_category=category_of(error),
        # Controllers get the location alone; the rest stays in the rollout's diagnostics file.
        extra_fields={"exception": type(error).__name__, "location": place and str(place), "traceback": trace},
    )


def _text(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001  an exception's own __str__ may fail
        return type(error).__name__
