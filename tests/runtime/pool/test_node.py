"""The host of a pool on a node: which of its jobs run, wait, are cancelled, and go back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import msgspec
import pytest

from osmosis_ai.errors import StoreError
from osmosis_ai.records import Row, Score, StoredInput
from osmosis_ai.runtime.pool.node import Ended, NodeHost, Orders, Report
from osmosis_ai.runtime.protocol import Cancel, RolloutJob, ScoreJob
from osmosis_ai.testing import FakePool

pytestmark = pytest.mark.anyio


def job(id: str) -> RolloutJob:
    return RolloutJob(id, Row(0, "0", "s", "u", "g"), 0, "policy")


class Hosted:
    """A host whose rollouts end when the test says so."""

    def __init__(self) -> None:
        self.gates: dict[str, anyio.Event] = {}
        self.active: list[str] = []
        self.pool = FakePool(reply=self._reply)
        self.host: NodeHost

    async def _reply(self, job: RolloutJob) -> str:
        self.gates[job.id] = anyio.Event()
        self.active.append(job.id)
        try:
            await self.gates[job.id].wait()
        finally:
            self.active.remove(job.id)
        return "done"

    async def order(self, share: int, *jobs: str, cancel: Iterable[str] = (), give_back: int = 0) -> list[str]:
        """Hand over jobs, and return those that run once nothing moves any more."""
        given = Orders(share, [*map(job, jobs)], [*map(Cancel, cancel)], give_back)
        self.host.submit(msgspec.json.encode(given))
        return await self.running()

    async def end(self, job: str) -> list[str]:
        self.gates[job].set()
        return await self.running()

    async def running(self) -> list[str]:
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        return [*self.active]

    async def ended(self) -> list[Ended]:
        return msgspec.json.decode(await self.host.collect(), type=Report).ended


@pytest.fixture
async def hosted() -> AsyncIterator[Hosted]:
    made = Hosted()
    async with _host(made.pool) as made.host:
        yield made


@asynccontextmanager
async def _host(pool: FakePool) -> AsyncIterator[NodeHost]:
    async with anyio.create_task_group() as group:
        yield NodeHost(pool, group)
        group.cancel_scope.cancel()


async def test_as_many_run_as_the_share_allows_in_the_order_in_which_they_came(hosted: Hosted) -> None:
    assert await hosted.order(2, "a", "b", "c", "d") == ["a", "b"]
    assert await hosted.end("b") == ["a", "c"]
    # What runs goes on when the share shrinks, and nothing else begins.
    assert await hosted.order(1, "e") == ["a", "c"]
    assert await hosted.end("a") == ["c"]
    assert await hosted.end("c") == ["d"]
    assert await hosted.order(3) == ["d", "e"]
    assert [one.job for one in await hosted.ended()] == ["b", "a", "c"]


async def test_a_waiting_job_that_is_cancelled_never_begins(hosted: Hosted) -> None:
    assert await hosted.order(1, "a", "b", "c") == ["a"]
    assert await hosted.order(1, cancel=["b", "unknown"]) == ["a"]
    assert await hosted.order(1, cancel=["a"]) == ["c"]
    assert await hosted.end("c") == []
    # The head has forgotten those that it cancelled.
    assert [one.job for one in await hosted.ended()] == ["c"]
    assert [one.id for one in hosted.pool.rollouts] == ["a", "c"]


async def test_a_job_that_is_cancelled_before_its_task_has_run_ends_at_once(hosted: Hosted) -> None:
    hosted.host.submit(msgspec.json.encode(Orders(1, [job("a")])))
    assert await hosted.order(1, "b", cancel=["a"]) == ["b"]


async def test_the_last_waiting_jobs_go_back(hosted: Hosted) -> None:
    assert await hosted.order(1, "a", "b", "c", "d", give_back=2) == ["a"]
    assert [(one.job, one.kind) for one in await hosted.ended()] == [("d", "returned"), ("c", "returned")]
    # No more than there are, and none that runs.
    assert await hosted.order(1, give_back=5) == ["a"]
    assert [one.job for one in await hosted.ended()] == ["b"]
    assert await hosted.end("a") == []


async def test_a_job_that_fails_leaves_its_place_to_the_next() -> None:
    class Failing(FakePool):
        async def score(self, job: ScoreJob) -> list[list[Score]]:
            raise StoreError("no space left")

    async with _host(Failing()) as host:
        scoring = ScoreJob("s", [StoredInput(3, b"", b"")], ["reward"])
        host.submit(msgspec.json.encode(Orders(1, [scoring, job("a")])))
        found = msgspec.json.decode(await host.collect(), type=Report).ended
    assert [(one.job, one.kind, one.error) for one in found] == [("s", "store", "no space left"), ("a", "", None)]
