"""The rollouts of a rollout server: their statuses, their results, and the leases of polling controllers."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress

from osmosis_ai.rollout.types import ExecutionResult, RolloutErrorCategory, RolloutInitRequest, RolloutStatus

__all__ = ["Registry", "ServedRollout"]

DELIVERED_RETENTION = 60.0
"""Seconds for which a result is kept once its controller has it, in case the answer was lost."""


class ServedRollout:
    """One rollout of a server.

    Attributes:
        request: The controller's request.
        id: Its id.
        token: The token of its lease.
        status: Its status.
        result: Its result, once the status is terminal.
        task: Runs it.
        is_polled: True once a controller has polled for it.
        disposition: What cancelling it did, if it was cancelled.
    """

    def __init__(self, request: RolloutInitRequest) -> None:
        self.request = request
        self.id = request.rollout_id or secrets.token_hex(16)
        self.token = secrets.token_urlsafe(32)
        self.status = RolloutStatus.QUEUED
        self.result: ExecutionResult | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_polled = False
        self.disposition: str | None = None
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_leased(self) -> bool:
        """True if its controller must keep polling for it. A controller with callbacks may poll, but needn't."""
        return self.is_polled or self.request.completion_callback_url is None

    def set_status(self, status: RolloutStatus) -> None:
        """Change the status of a rollout that hasn't ended. Terminal statuses come with the result alone."""
        if self.result is None and status is not self.status and not status.is_terminal:
            self._change(status)

    def finish(self, result: ExecutionResult) -> bool:
        """Set the result; return False if there is one already."""
        if self.result is not None:
            return False
        self.result = result
        self._change(result.status)
        return True

    def _change(self, status: RolloutStatus) -> None:
        self.status = status
        # Wake the current waiters; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, seconds: float) -> None:
        """Wait until the status changes, for at most `seconds`."""
        # On Python 3.10, it isn't the built-in TimeoutError.
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def after(self, seconds: float, then: Callable[[], object]) -> None:
        """Schedule a function call in `seconds`, in place of any call scheduled before."""
        self.forget()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def forget(self) -> None:
        """Cancel the scheduled call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Registry:
    """The rollouts of a server by id.

    Args:
        lease: Seconds without a poll after which a leased rollout is cancelled.
        retention: Seconds for which a result is kept.
    """

    def __init__(self, *, lease: float, retention: float) -> None:
        self._lease = lease
        self._retention = retention
        self._rollouts: dict[str, ServedRollout] = {}

    def get(self, rollout_id: str) -> ServedRollout | None:
        """Return a rollout, None if it is unknown or forgotten."""
        return self._rollouts.get(rollout_id)

    def selected(self, ids: Iterable[str] | None, prefix: str | None) -> list[str]:
        """Return the given ids, or those of all rollouts whose id starts with the prefix."""
        return [each for each in self._rollouts if each.startswith(prefix or "")] if ids is None else list(ids)

    def add(self, rollout: ServedRollout) -> bool:
        """Add a rollout and start its lease; return False if its id is taken.

        The id of an ended rollout that nobody polls for is free again.
        """
        before = self._rollouts.get(rollout.id)
        if before is not None:
            if before.result is None or before.is_leased:
                return False
            before.forget()
        self._rollouts[rollout.id] = rollout
        if rollout.is_leased:
            self.renew(rollout)
        return True

    def renew(self, rollout: ServedRollout) -> None:
        """Renew the lease of a rollout that hasn't ended."""
        rollout.after(self._lease, lambda: self._expire(rollout))

    def keep(self, rollout: ServedRollout, *, delivered: bool = False) -> None:
        """Keep an ended rollout for a time; a shorter one if its controller has the result."""
        seconds = min(self._retention, DELIVERED_RETENTION) if delivered else self._retention
        rollout.after(seconds, lambda: self._remove(rollout))

    def check(self, rollout: ServedRollout, token: str) -> bool:
        """Return True if `token` matches the rollout's lease."""
        # As bytes, because `compare_digest` refuses text that isn't ASCII.
        return hmac.compare_digest(rollout.token.encode(), token.encode())

    def close(self) -> None:
        """Stop all timers."""
        for rollout in self._rollouts.values():
            rollout.forget()

    def _expire(self, rollout: ServedRollout) -> None:
        category = RolloutErrorCategory.LEASE_EXPIRED
        message = f"polling lease expired: no poll for the result within {self._lease:g} s"
        expired = ExecutionResult(status=RolloutStatus.FAILURE, err_message=message, err_category=category)
        # The result comes first, because the first one set is the one that counts.
        if rollout.finish(expired) and rollout.task is not None:
            rollout.task.cancel()
        self.keep(rollout)

    def _remove(self, rollout: ServedRollout) -> None:
        if rollout.task is not None and not rollout.task.done():
            # The workflow ignores its cancellation and may still write; a new rollout with its id would share its
            # folder.
            self.keep(rollout)
        # Unless a later rollout has taken the id.
        elif self._rollouts.get(rollout.id) is rollout:
            del self._rollouts[rollout.id]
