"""The retry loop for requests to models, judges and trainers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from osmosis_ai.errors import ModelError, OsmosisRolloutError
from osmosis_ai.records import Record

__all__ = ["RetryPolicy", "with_retries"]

ResultT = TypeVar("ResultT")
ErrorT = TypeVar("ErrorT", ModelError, OsmosisRolloutError)


class RetryPolicy(Record, frozen=True):
    """Bounds of the retries after a failed request.

    Attributes:
        max_attempts: Total number of requests, including the first.
        max_seconds: Seconds after the first failure, beyond which no request starts.
        base_delay: Upper bound of the first wait, in seconds; it doubles with each retry.
        max_delay: Upper bound, in seconds, of any wait the endpoint didn't ask for.
    """

    max_attempts: int = 6
    max_seconds: float = 120.0
    base_delay: float = 0.5
    max_delay: float = 30.0

    def delay(self, attempts: int, asked: float | None, uniform: Callable[[float, float], float]) -> float:
        """Return the seconds to wait after so many failed attempts; `asked` is the endpoint's `Retry-After`.

        Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
        """
        jitter = uniform(0, min(self.max_delay, self.base_delay * 2.0 ** min(attempts - 1, 30)))
        # The endpoint may have told many rollouts to come back at the same moment; the jitter spreads them out.
        return jitter if asked is None else asked + min(jitter, self.base_delay)


async def with_retries(
    attempt: Callable[[int], Awaitable[ResultT]],
    failed: type[ErrorT],
    policy: RetryPolicy,
    *,
    on_wait: Callable[[ErrorT, float], None] | None = None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
    uniform: Callable[[float, float], float] = random.uniform,
) -> ResultT:
    """Repeat a request until it succeeds, fails with an error that isn't `retryable`, or reaches the policy's bounds.

    Args:
        attempt: Makes the request; gets the attempt's number, from 1.
        failed: The error type of a failed request. The last error is raised; its message gives the number of attempts.
        policy: The bounds.
        on_wait: Called before each wait with the error and the seconds.
        sleep, clock, uniform: Time, in seconds, and the jitter. Every forked process reseeds `random`.
    """
    deadline: float | None = None
    attempts = 0
    while True:
        attempts += 1
        try:
            return await attempt(attempts)
        except failed as error:
            failure = error
        now = clock()
        deadline = now + policy.max_seconds if deadline is None else deadline
        remaining = deadline - now
        if not failure.retryable or attempts >= policy.max_attempts or remaining <= 0:
            if attempts > 1:
                failure.args = (f"{failure} (after {attempts} attempts)",)
            raise failure
        delay = min(policy.delay(attempts, failure.retry_after, uniform), remaining)
        if on_wait is not None:
            on_wait(failure, delay)
        await sleep(delay)
