from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osmosis_ai.errors import ModelError
from osmosis_ai.models.endpoint import OpenAICompatibleModel
from osmosis_ai.models.host import HostOptions, create_model
from osmosis_ai.models.retry import AdaptiveLimiter, RetryingModel
from osmosis_ai.records import Completion, Message, ModelSpec, Row, Tool
from osmosis_ai.retry import RetryPolicy, with_retries
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, drop, status, text

pytestmark = pytest.mark.anyio

ROW = Row(index=0, id="r", system_prompt="s", user_prompt="u")
MESSAGES = [{"role": "user", "content": "hello"}]


class Failing:
    """A model that raises these errors in order, then answers."""

    def __init__(self, *errors: ModelError) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def complete(self, messages: list[Message], tools: list[Tool], params: dict[str, Any]) -> Completion:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return Completion({"role": "assistant", "content": "ok"})

    async def aclose(self) -> None: ...


class Clock:
    """A clock that advances only while code sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def error(kind: str = "overloaded", status: int | None = 503, retry_after: float | None = None) -> ModelError:
    return ModelError(f"it was {kind}", kind=kind, status=status, retry_after=retry_after)


def retrying(
    inner: Failing | OpenAICompatibleModel,
    clock: Clock,
    policy: RetryPolicy | None = None,
    limiter: AdaptiveLimiter | None = None,
    **options: Any,
) -> RetryingModel:
    return RetryingModel(
        inner,
        policy or RetryPolicy(),
        limiter or AdaptiveLimiter(4),
        retries=partial(with_retries, sleep=clock.sleep, clock=clock, uniform=random.Random(1).uniform),
        **options,
    )


async def test_a_reply_at_once_is_passed_on_as_it_is() -> None:
    clock = Clock()
    completion = await retrying(Failing(), clock).complete(MESSAGES, [], {})
    assert (completion.attempts, clock.waits) == (1, [])


@pytest.mark.parametrize("kind", ["timeout", "dropped", "rate_limit", "overloaded"])
async def test_what_may_pass_is_tried_again_and_counted(kind: str) -> None:
    clock = Clock()
    completion = await retrying(Failing(error(kind), error(kind)), clock).complete(MESSAGES, [], {})
    assert completion.attempts == 3
    assert len(clock.waits) == 2


@pytest.mark.parametrize("kind", ["refused", "auth", "not_found", "bad_request", "bad_reply", "unknown_model", "quota"])
async def test_what_cannot_pass_is_not_tried_again(kind: str) -> None:
    inner = Failing(error(kind))
    with pytest.raises(ModelError, match=f"it was {kind}$"):
        await retrying(inner, Clock()).complete(MESSAGES, [], {})
    assert inner.calls == 1


async def test_retries_are_bounded_in_number() -> None:
    inner = Failing(*[error(retry_after=0.0)] * 9)
    with pytest.raises(ModelError, match="after 3 attempts") as caught:
        await retrying(inner, Clock(), RetryPolicy(max_attempts=3)).complete(MESSAGES, [], {})
    assert inner.calls == 3
    assert (caught.value.kind, caught.value.status, caught.value.retry_after) == ("overloaded", 503, 0.0)


async def test_retries_are_bounded_in_time() -> None:
    clock = Clock()
    inner = Failing(*[error()] * 1000)
    with pytest.raises(ModelError):
        await retrying(inner, clock, RetryPolicy(max_attempts=1000, max_seconds=10)).complete(MESSAGES, [], {})
    assert sum(clock.waits) == pytest.approx(10)
    assert inner.calls == len(clock.waits) + 1


async def test_a_request_that_took_longer_than_the_bound_is_still_tried_again() -> None:
    clock = Clock()

    class Slow(Failing):
        async def complete(self, messages: list[Message], tools: list[Tool], params: dict[str, Any]) -> Completion:
            clock.now += 300
            return await super().complete(messages, tools, params)

    inner = Slow(error("timeout", None))
    assert (await retrying(inner, clock, RetryPolicy(max_seconds=10)).complete(MESSAGES, [], {})).attempts == 2
    inner = Slow(*[error("timeout", None)] * 9)
    with pytest.raises(ModelError, match="after 2 attempts"):
        await retrying(inner, clock, RetryPolicy(max_seconds=10)).complete(MESSAGES, [], {})


@given(seed=st.integers(), attempts=st.integers(1, 40))
def test_waits_are_full_jitter_under_a_doubling_bound(seed: int, attempts: int) -> None:
    clock = Clock()
    policy = RetryPolicy(max_attempts=attempts, max_seconds=1e9, base_delay=0.5, max_delay=30)
    model = RetryingModel(
        Failing(*[error()] * attempts),
        policy,
        AdaptiveLimiter(1),
        retries=partial(with_retries, sleep=clock.sleep, clock=clock, uniform=random.Random(seed).uniform),
    )
    with pytest.raises(ModelError):
        anyio.run(model.complete, MESSAGES, [], {})
    assert len(clock.waits) == attempts - 1
    assert all(0 <= wait <= min(30, 0.5 * 2**index) for index, wait in enumerate(clock.waits))


async def test_the_wait_an_endpoint_asks_for_is_honoured_within_the_bound() -> None:
    clock = Clock()
    policy = RetryPolicy(max_seconds=120, base_delay=0.5)
    await retrying(Failing(error(retry_after=50.0)), clock, policy).complete(MESSAGES, [], {})
    assert 50 <= clock.waits[0] <= 50.5

    clock = Clock()
    inner = Failing(*[error(retry_after=3600.0)] * 9)
    with pytest.raises(ModelError):
        await retrying(inner, clock, policy).complete(MESSAGES, [], {})
    assert clock.waits == [120]
    assert inner.calls == 2


async def test_waits_are_announced_and_hold_no_slot() -> None:
    clock = Clock()
    limiter = AdaptiveLimiter(4)
    seen: list[tuple[str, float, int]] = []
    model = retrying(
        Failing(error(retry_after=2.0)),
        clock,
        limiter=limiter,
        on_wait=lambda failure, seconds: seen.append((failure.kind, seconds, limiter.in_flight)),
    )
    await model.complete(MESSAGES, [], {})
    assert [(kind, in_flight) for kind, _, in_flight in seen] == [("overloaded", 0)]
    assert seen[0][1] == clock.waits[0]


async def test_against_a_real_endpoint_the_faults_in_between_are_survived() -> None:
    script = [status(429, headers={"Retry-After": "7"}), status(500), drop(), status(503), text("at last")]
    clock = Clock()
    async with ScriptedEndpoint(script) as endpoint:
        inner = OpenAICompatibleModel(ModelSpec("m", "openai_compatible", "m", endpoint.url))
        limiter = AdaptiveLimiter(8)
        completion = await retrying(inner, clock, limiter=limiter).complete(MESSAGES, [], {})
        await inner.aclose()
    assert completion.message["content"] == "at last"
    assert completion.attempts == len(endpoint.requests) == 5
    assert 7 <= clock.waits[0] <= 7.5
    assert (limiter.throttled, limiter.limit) == (2, 2)


async def test_the_host_lowers_the_concurrency_of_all_its_rollouts() -> None:
    gate = Gate()
    refused = 0

    def script(request: Request) -> Reply:
        nonlocal refused
        if refused < 8:
            refused += 1
            return status(429, headers={"Retry-After": "0"}).after(gate)
        return text("ok")

    async with ScriptedEndpoint(script) as endpoint:
        policy = RetryPolicy(base_delay=0.001)
        host = create_model(ModelSpec("m", "openai_compatible", "m", endpoint.url), HostOptions(8, policy))
        assert host.limiter is not None
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(host.for_rollout(ROW, 0).complete, MESSAGES, [], {})
            await asyncio.to_thread(endpoint.wait_for_requests, 8)
            gate.open()
        await host.aclose()
    # All eight were on their way together: one halving, not eight; then eight successes: four for the fifth slot.
    assert host.limiter.throttled == 8
    assert host.limiter.limit == 5


async def test_the_limit_halves_once_per_round_and_creeps_back() -> None:
    limiter = AdaptiveLimiter(8)
    rounds = [await limiter.acquire() for _ in range(4)]
    for started in rounds:
        limiter.throttle(started)
        limiter.release()
    assert (limiter.limit, limiter.throttled) == (4, 4)
    for expected in (2, 1, 1):
        limiter.throttle(await limiter.acquire())
        limiter.release()
        assert limiter.limit == expected
    limits = []
    for _ in range(40):
        await limiter.acquire()
        limiter.succeed()
        limiter.release()
        limits.append(limiter.limit)
    # 1 success for the second slot, 2 for the third, … 7 for the eighth, and never more than at the start.
    assert limits[:6] == [2, 2, 3, 3, 3, 4]
    assert limits.index(8) == sum(range(1, 8)) - 1
    assert limits[-1] == 8


async def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        AdaptiveLimiter(0)


async def test_slots_are_given_in_order_of_arrival() -> None:
    limiter = AdaptiveLimiter(1)
    order: list[int] = []

    async def use(number: int) -> None:
        await limiter.acquire()
        order.append(number)
        await anyio.lowlevel.checkpoint()
        limiter.release()

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(use, number)
    assert order == list(range(20))


async def test_a_waiter_cancelled_as_it_gets_its_slot_passes_it_on() -> None:
    limiter = AdaptiveLimiter(1)
    await limiter.acquire()
    first = asyncio.create_task(limiter.acquire())
    second = asyncio.create_task(limiter.acquire())
    await asyncio.sleep(0)
    limiter.release()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with anyio.fail_after(5):
        await second
    assert limiter.in_flight == 1
    limiter.release()
    assert limiter.in_flight == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(), limit=st.integers(1, 6), users=st.integers(1, 30))
def test_no_slot_is_lost_or_shared_whatever_is_cancelled_or_throttled(seed: int, limit: int, users: int) -> None:
    rng = random.Random(seed)
    limiter = AdaptiveLimiter(limit)
    inside = 0

    async def use() -> None:
        nonlocal inside
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        started = await limiter.acquire()
        try:
            inside += 1
            assert inside <= limiter.in_flight <= limit
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                limiter.throttle(started)
            else:
                limiter.succeed()
        finally:
            inside -= 1
            limiter.release()

    async def run() -> None:
        tasks = [asyncio.create_task(use()) for _ in range(users)]
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
        with anyio.fail_after(20):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        assert limiter.in_flight == 0
        for _ in range(limiter.limit):
            with anyio.fail_after(5):
                await limiter.acquire()
        assert limiter.in_flight == limiter.limit

    anyio.run(run)
