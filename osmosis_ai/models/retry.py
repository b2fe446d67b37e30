"""Retry failed model requests, and lower concurrency while an endpoint is overloaded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from osmosis_ai.errors import ModelError
from osmosis_ai.models.base import ChatModel, Listen, streamed
from osmosis_ai.records import Completion, JsonObject, Message, Tool
from osmosis_ai.retry import RetryPolicy, with_retries

__all__ = ["AdaptiveLimiter", "OnWait", "RetryingModel"]

THROTTLING = frozenset({429, 503, 529})
"""Statuses that report overload; 529 is Anthropic's."""

OnWait = Callable[[ModelError, float], None]
"""Called before each retry with the error and the wait in seconds."""


class AdaptiveLimiter:
    """A first-come-first-served limit on concurrent requests.

    When the endpoint reports overload, the limit is halved, at most once for the requests already in flight. It grows
    by one after as many successes as the current limit, up to the start value (additive increase, multiplicative
    decrease, as in TCP congestion control, RFC 5681).

    Attributes:
        limit: Maximum number of concurrent requests, at least 1.
        in_flight: Number of requests in flight.
        throttled: Number of requests that the endpoint rejected as overloaded.
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
        """Wait for a slot and return the request's round, for `throttle`. One `release` must follow."""
        # Not past those that wait already, even if a slot is free at this moment.
        if self.in_flight < self.limit and not self._waiters:
            self.in_flight += 1
            return self._round
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # A cancelled waiter holds no slot: it is still queued, or `_hand_over` will skip it.
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            else:
                # It was granted a slot at the same moment: pass it on.
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
        """Note that the endpoint rejected a request for which `acquire` returned `started`."""
        self.throttled += 1
        # Sent before the last halving, so it says nothing about the new limit.
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


# Not a ModelError, so that the retries let it through.
class _BrokenOffError(Exception):
    """A reply broke off with `error` after a part of it had been passed on."""

    def __init__(self, error: ModelError) -> None:
        super().__init__(str(error))
        self.error = error


class RetryingModel:
    """A model that retries failed requests with exponential backoff and full jitter.

    Only requests that may succeed later are retried (`ModelError.retryable`). The endpoint's `Retry-After` is honored
    as far as `max_seconds` allows. No limiter slot is held between attempts.
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
        """Request the next assistant message; its `attempts` counts every request made for it.

        Raises:
            ModelError: The last attempt's error; its message gives the number of attempts.
        """
        attempt = partial(self._attempt, partial(self._inner.complete, messages, tools, params))
        return await self._retries(attempt, ModelError, self._policy, on_wait=self._on_wait)

    async def stream(
        self, messages: list[Message], tools: list[Tool], params: JsonObject, listen: Listen
    ) -> Completion:
        """Request the next assistant message and pass on its parts; a reply that breaks off isn't requested again."""
        heard = False

        async def hear(choice: JsonObject) -> None:
            nonlocal heard
            heard = True
            await listen(choice)

        async def once() -> Completion:
            try:
                return await streamed(self._inner, messages, tools, params, hear)
            except ModelError as error:
                if heard:
                    raise _BrokenOffError(error) from error
                raise

        attempt = partial(self._attempt, once)
        try:
            return await self._retries(attempt, ModelError, self._policy, on_wait=self._on_wait)
        except _BrokenOffError as broken:
            raise broken.error from broken.error.__cause__

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _attempt(self, request: Callable[[], Awaitable[Completion]], attempt: int) -> Completion:
        started = await self._limiter.acquire()
        try:
            completion = await request()
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
