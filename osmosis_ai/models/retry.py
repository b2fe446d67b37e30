"""Failed model requests are tried again, and fewer at a time while an endpoint is overloaded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from osmosis_ai.errors import ModelError
from osmosis_ai.models.base import ChatModel
from osmosis_ai.records import Completion, JsonObject, Message, Tool
from osmosis_ai.retry import RetryPolicy, with_retries

__all__ = ["AdaptiveLimiter", "OnWait", "RetryingModel"]

THROTTLING = frozenset({429, 503, 529})

OnWait = Callable[[ModelError, float], None]
"""Told about each wait before a retry: the error and the seconds."""


class AdaptiveLimiter:
    """Lets a number of requests through at a time; first come, first served.

    When the endpoint says it is overloaded the number is halved, at most once per round of requests that were already
    on their way; then it creeps back, one more after as many successes as the current number, up to the start value
    (additive increase, multiplicative decrease, as in TCP congestion control, RFC 5681).

    Attributes:
        limit: Requests at a time, at least 1.
        in_flight: Requests on their way.
        throttled: How many requests the endpoint turned away.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        self.limit = limit
        self.in_flight = 0
        self.throttled = 0
        self._start = limit
        self._successes = 0
        self._round = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> int:
        """Wait for a slot and give the round the request belongs to, for `throttle`. One `release` must follow."""
        if self.in_flight < self.limit and not self._waiters:
            self.in_flight += 1
            return self._round
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # Still in the queue, or skipped by a later hand-over: a cancelled waiter holds no slot.
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            else:
                # It was given a slot in the same moment: pass it on.
                self.release()
            raise
        return self._round

    def release(self) -> None:
        self.in_flight -= 1
        self._hand_over()

    def succeed(self) -> None:
        if self.limit == self._start:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1
            self._hand_over()

    def throttle(self, started: int) -> None:
        """A request for which `acquire` returned `started` was turned away."""
        self.throttled += 1
        if started != self._round:
            return
        self._round += 1
        self._successes = 0
        self.limit = max(1, self.limit // 2)

    def _hand_over(self) -> None:
        while self._waiters and self.in_flight < self.limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.in_flight += 1
                waiter.set_result(None)


class RetryingModel:
    """A model whose failed requests are tried again with exponential backoff and full jitter.

    Only what may succeed later is tried again (`ModelError.retryable`). A wait the endpoint asked for (`Retry-After`)
    is honoured, as far as `max_seconds` allows. Between attempts no slot of the limiter is held.
    """

    def __init__(
        self,
        inner: ChatModel,
        policy: RetryPolicy,
        limiter: AdaptiveLimiter,
        on_wait: OnWait | None = None,
        retries: Callable[..., Awaitable[Completion]] = with_retries,
    ) -> None:
        self._inner = inner
        self._policy = policy
        self._limiter = limiter
        self._on_wait = on_wait
        self._retries = retries

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """The next assistant message; `attempts` counts every request that was made for it.

        Raises:
            ModelError: The last attempt's error; its message says how many there were.
        """
        attempt = partial(self._attempt, messages, tools, params)
        return await self._retries(attempt, ModelError, self._policy, on_wait=self._on_wait)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _attempt(
        self, messages: list[Message], tools: list[Tool], params: JsonObject, attempt: int
    ) -> Completion:
        started = await self._limiter.acquire()
        try:
            completion = await self._inner.complete(messages, tools, params)
        except ModelError as error:
            if error.status in THROTTLING:
                self._limiter.throttle(started)
            raise
        else:
            self._limiter.succeed()
        finally:
            self._limiter.release()
        if attempt == 1:
            return completion
        # `attempts` of the reply itself is 1 unless a wrapper inside has retried too.
        return msgspec.structs.replace(completion, attempts=attempt - 1 + completion.attempts)
