"""The interface of backends, `ExecutionBackend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from osmosis_ai.rollout.types import ExecutionOutcome, ExecutionRequest, ExecutionResult

__all__ = ["ExecutionBackend", "ResultCallback"]

ResultCallback: TypeAlias = "Callable[[ExecutionResult], Awaitable[Any]]"
"""Receives the result of a workflow or of a grader."""


class ExecutionBackend(ABC):
    """Runs rollouts for a rollout server. Only `execute` must be implemented."""

    @abstractmethod
    async def execute(
        self,
        request: ExecutionRequest,
        on_workflow_complete: ResultCallback | None = None,
        on_grader_complete: ResultCallback | None = None,
    ) -> ExecutionOutcome | None:
        """Run one rollout, in the task of the caller, who may cancel it.

        Backends written for SDK 0.3.3 and later take the request alone and return the outcome. Earlier ones take the
        callbacks and return None.

        Args:
            request: The rollout.
            on_workflow_complete: Awaited with the workflow's result, before grading.
            on_grader_complete: Awaited with the grader's result.
        """

    @property
    def capture_final_result(self) -> bool:
        """True to receive the grader's result even if the controller didn't request a grade."""
        return False

    @property
    def max_concurrency(self) -> int:
        """Maximum number of concurrent rollouts; 0 for no limit."""
        return 0

    def has_capacity(self) -> bool:
        """Return False to refuse further rollouts for now."""
        return True

    def rollout_status(self, rollout_id: str) -> dict[str, Any] | None:
        """Return `status`, and `reward` and `err_message` if known; None to leave it to the server."""
        return None

    def cancel_rollouts(
        self, ids: Sequence[str] | None = None, prefix: str | None = None, all: bool = False
    ) -> dict[str, str]:
        """Cancel rollouts and return each one's disposition; the server itself cancels those not in the result."""
        return {}

    def health(self) -> dict[str, Any]:
        """Return the backend's part of the server's health."""
        return {"status": "ok"}

    async def shutdown(self) -> None:  # noqa: B027  a backend without resources has nothing to do
        """Release the backend's resources, after its last rollout."""
