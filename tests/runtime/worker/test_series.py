"""Sync functions run one after the other in a thread that can be left behind."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import anyio
import pytest

from osmosis_ai.runtime.worker.series import Overdue, run_series

pytestmark = pytest.mark.anyio

LONG = 60.0
SHORT = 0.05


async def test_calls_run_in_order_in_one_other_thread() -> None:
    results = await run_series(lambda position: (position, threading.get_ident()), [3, 1, 2], LONG)
    made = [result for result in results if not isinstance(result, Overdue)]
    assert [position for position, _ in made] == [3, 1, 2]
    (thread,) = {thread for _, thread in made}
    assert thread != threading.get_ident()


async def test_no_calls_have_no_results() -> None:
    assert await run_series(lambda position: position, [], LONG) == []


async def test_each_call_has_a_context_of_its_own_that_starts_as_the_callers() -> None:
    seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")
    seen.set("the caller's")

    def call(position: int) -> str:
        before = seen.get()
        seen.set(f"that of {position}")
        return before

    assert await run_series(call, [1, 2], LONG) == ["the caller's", "the caller's"]
    assert seen.get() == "the caller's"


async def test_a_call_that_takes_too_long_ends_the_series_and_is_left_behind() -> None:
    release, left = threading.Event(), threading.Event()
    called = []

    def call(position: int) -> int:
        called.append(position)
        if position == 1:
            release.wait(LONG)
            left.set()
        return position

    with anyio.fail_after(LONG):
        results = await run_series(call, [0, 1, 2], SHORT)
    assert results[0] == 0
    assert isinstance(results[1], Overdue)
    assert len(results) == 2
    # Once it ends, its thread makes no later call of the series.
    release.set()
    assert left.wait(LONG)
    assert await run_series(lambda position: position, [9], LONG) == [9]
    assert called == [0, 1]


async def test_series_at_once_do_not_wait_for_each_other() -> None:
    everyone = threading.Barrier(3)

    async def one() -> None:
        await run_series(lambda position: everyone.wait(LONG), [0], LONG)

    with anyio.fail_after(LONG):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(one)


async def test_a_caller_that_is_cancelled_leaves_the_thread_behind() -> None:
    started, release = threading.Event(), threading.Event()
    called = []

    def call(position: int) -> None:
        called.append(position)
        started.set()
        release.wait(LONG)

    task = asyncio.create_task(run_series(call, [0, 1], LONG))
    await asyncio.to_thread(started.wait, LONG)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await run_series(lambda position: position, [9], LONG) == [9]
    assert called == [0]
