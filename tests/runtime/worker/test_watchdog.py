"""The watchdog sees which job blocks an event loop, and for how long."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

from osmosis_ai.runtime.worker.deadlines import Deadlines
from osmosis_ai.runtime.worker.watchdog import JobTasks, Watchdog

PATIENCE = 30.0

job: ContextVar[str | None] = ContextVar("job", default=None)


class Watched:
    """A loop with a watchdog whose reports are kept."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self.tasks = JobTasks(job.get)
        self.beats = threading.Semaphore(0)
        self.stuck = threading.Event()
        self.reports: list[tuple[str | None, float]] = []

    def run(self, main: Any) -> None:
        """Run an async function that gets this object, on a loop that is watched."""

        async def watched() -> None:
            loop = asyncio.get_running_loop()
            loop.set_task_factory(self.tasks)
            dog = Watchdog(
                loop, self.deadlines, self.tasks, beat=self.beats.release, stuck=self._report, orphaned=lambda: None
            )
            dog.start()
            try:
                await main(self)
            finally:
                dog.stop()

        asyncio.run(watched())

    def _report(self, culprit: str | None, seconds: float) -> None:
        self.reports.append((culprit, seconds))
        self.stuck.set()


def as_job(name: str, coroutine: Any) -> asyncio.Task[Any]:
    """A task that runs for a job."""
    token = job.set(name)
    try:
        return asyncio.get_running_loop().create_task(coroutine)
    finally:
        job.reset(token)


def test_the_job_that_holds_the_loop_past_its_limit_is_reported() -> None:
    async def main(watched: Watched) -> None:
        async def hold() -> None:
            with watched.deadlines.limit(0.3, "culprit"):
                # A blocking call, as far as the loop is concerned.
                assert watched.stuck.wait(PATIENCE)

        async def wait() -> None:
            with watched.deadlines.limit(0.3, "innocent") as clock:
                await asyncio.sleep(0)
            assert not clock.cancelled_caught

        await asyncio.gather(as_job("innocent", wait()), as_job("culprit", hold()))

    watched = Watched()
    watched.run(main)
    assert {culprit for culprit, _ in watched.reports} == {"culprit"}
    assert watched.reports[0][1] >= 0.3


def test_whoever_waits_beside_a_blocked_loop_loses_no_time() -> None:
    """Blocking the loop for longer than a neighbour's limit, but within the blocker's own, cancels no job."""

    async def main(watched: Watched) -> None:
        held = asyncio.Event()

        async def hold() -> None:
            with watched.deadlines.limit(PATIENCE, "blocker"):
                held.set()
                # Two beats of the watchdog are more than a second.
                for _ in range(3):
                    assert watched.beats.acquire(timeout=PATIENCE)

        async def wait() -> None:
            with watched.deadlines.limit(1.5, "neighbour") as clock:
                await held.wait()
                # The turn of the loop in which expired timers would fire.
                for _ in range(5):
                    await asyncio.sleep(0)
            assert not clock.cancelled_caught

        await asyncio.gather(as_job("neighbour", wait()), as_job("blocker", hold()))

    watched = Watched()
    watched.run(main)
    assert watched.reports == []


def test_tasks_and_what_they_start_belong_to_the_job() -> None:
    async def main(watched: Watched) -> None:
        loop = asyncio.get_running_loop()
        found = []

        async def inner() -> None:
            found.append(watched.tasks.running(loop))

        async def outer() -> None:
            found.append(watched.tasks.running(loop))
            await loop.create_task(inner())

        await as_job("a", outer())
        await loop.create_task(inner())
        assert found == ["a", "a", None]

    Watched().run(main)
