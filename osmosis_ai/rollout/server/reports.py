"""Run a rollout on a backend, and report its results to a controller by callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from osmosis_ai.rollout.backend.base import ExecutionBackend
from osmosis_ai.rollout.server.bodies import completion_body, grader_body
from osmosis_ai.rollout.server.callbacks import CallbackClient
from osmosis_ai.rollout.server.registry import ServedRollout
from osmosis_ai.rollout.trajectory.report import TrajectoryReport, report_from_response
from osmosis_ai.rollout.types import ExecutionRequest, ExecutionResult, RolloutStatus

__all__ = ["Reports", "execute"]


class Reports:
    """The results of a rollout as they arrive, and their callbacks: each is sent once, completion first.

    Attributes:
        trajectory: The controller's report on the model calls, for the trajectory file.
    """

    def __init__(self, rollout: ServedRollout, callbacks: CallbackClient) -> None:
        self._rollout = rollout
        self._callbacks = callbacks
        self._workflow: ExecutionResult | None = None
        self._grader: ExecutionResult | None = None
        self._completion_sent = False
        self._grading_sent = False
        self.trajectory: TrajectoryReport | None = None

    @property
    def result(self) -> ExecutionResult:
        """The rollout's result: the workflow's if that failed, else the grader's if there is one."""
        workflow, grader = self._workflow, self._grader
        if workflow is None:
            return ExecutionResult(status=RolloutStatus.FAILURE, err_message="the backend reported no result")
        return grader if grader is not None and workflow.status is RolloutStatus.SUCCESS else workflow

    async def workflow_completed(self, result: ExecutionResult) -> None:
        """Take the workflow's result."""
        self._workflow = result
        await self._send_completion(result)

    async def grader_completed(self, result: ExecutionResult) -> None:
        """Take the grader's result."""
        self._grader = result
        await self._send_grading(result)

    def fail(self, result: ExecutionResult) -> None:
        """Take a failure for the part that hasn't been reported."""
        if self._workflow is None:
            self._workflow = result
        elif self._grader is None and self._workflow.status is RolloutStatus.SUCCESS:
            # Keep the ungraded sample.
            kept = {"sample": self._workflow.sample, "samples": self._workflow.samples}
            self._grader = result.model_copy(update=kept)

    async def send_missing(self) -> None:
        """Send the callbacks that haven't been sent."""
        await self._send_completion(self._workflow or self.result)
        if self._rollout.request.wants_grade:
            ungraded = ExecutionResult(status=RolloutStatus.FAILURE, err_message="the backend reported no grading")
            succeeded = self.result.status is RolloutStatus.SUCCESS
            await self._send_grading(self._grader or (ungraded if succeeded else self.result))

    async def _send_completion(self, result: ExecutionResult) -> None:
        request = self._rollout.request
        if not self._completion_sent:
            # Noted before the request, so that one that is interrupted isn't sent twice.
            self._completion_sent = True
            await self._post(request.completion_callback_url, completion_body(self._rollout.id, request, result))

    async def _send_grading(self, result: ExecutionResult) -> None:
        request = self._rollout.request
        if not self._grading_sent and request.grader_callback_url:
            self._grading_sent = True
            await self._post(request.grader_callback_url, grader_body(self._rollout.id, request, result))

    async def _post(self, url: str | None, body: bytes) -> None:
        # A polling controller already has the result.
        if url is None or self._rollout.is_polled:
            return
        answer = await self._callbacks.post(url, body, self._rollout.request.controller_api_key)
        if answer is not None:
            self.trajectory = report_from_response(answer) or self.trajectory


async def execute(backend: ExecutionBackend, request: ExecutionRequest, reports: Reports) -> None:
    """Run a rollout on a backend of either generation."""
    run: Callable[..., Any] = backend.execute
    if len(inspect.signature(run).parameters) > 1:
        wants_grader = request.grade or backend.capture_final_result
        await run(
            request,
            on_workflow_complete=reports.workflow_completed,
            on_grader_complete=reports.grader_completed if wants_grader else None,
        )
        return
    outcome = await run(request)
    await reports.workflow_completed(outcome.workflow)
    if outcome.grader is not None:
        await reports.grader_completed(outcome.grader)
