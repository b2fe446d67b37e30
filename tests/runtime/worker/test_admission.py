"""Rollouts that want the event loop at the same moment get it one after the other."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from osmosis_ai.runtime.worker import admission as module
from osmosis_ai.runtime.worker.admission import AT_ONCE, Admission

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def settle() -> None:
    """Let every runnable task run."""
    for _ in range(10):
        await asyncio.sleep(0)


class Visitors:
    """Tasks that enter, note it, and stay until released."""

    def __init__(self, admission: Admission) -> None:
        self.inside: list[str] = []
        self.arrivals: asyncio.Queue[str] = asyncio.Queue()
        self._admission = admission
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    def come(self, *names: str) -> None:
        for name in names:
            self._leave[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._visit(name))

    async def _visit(self, name: str) -> None:
        try:
            await self._admission.enter(name)
            self.inside.append(name)
            self.arrivals.put_nowait(name)
            await self._leave[name].wait()
        finally:
            self._admission.leave(name)

    async def go(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await settle()

    async def give_up(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        await asyncio.gather(*(self._tasks[name] for name in names), return_exceptions=True)
        await settle()

    async def close(self) -> None:
        await self.give_up(*self._tasks)


@pytest.fixture
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 3600.0)


@pytest.mark.usefixtures("endless_patience")
async def test_the_next_one_gets_in_when_one_leaves() -> None:
    visitors = Visitors(Admission())
    names = [str(number) for number in range(AT_ONCE + 3)]
    visitors.come(*names)
    await settle()
    assert visitors.inside == names[:AT_ONCE]
    await visitors.go("1")
    assert visitors.inside == names[: AT_ONCE + 1]
    await visitors.go("0")
    assert visitors.inside == names[: AT_ONCE + 2]
    await visitors.close()


@pytest.mark.usefixtures("endless_patience")
async def test_whoever_is_cancelled_holds_up_nobody() -> None:
    visitors = Visitors(Admission())
    names = [str(number) for number in range(AT_ONCE + 3)]
    visitors.come(*names)
    await settle()
    # One that waits, one that is inside, and then one that was let in and cancelled at the same moment.
    await visitors.give_up(names[AT_ONCE])
    await visitors.give_up("0")
    assert visitors.inside == [*names[:AT_ONCE], names[AT_ONCE + 1]]
    visitors._admission.leave("1")
    await visitors.give_up(names[AT_ONCE + 2])
    visitors.come("late")
    await settle()
    assert visitors.inside[-1] == "late"
    await visitors.close()


async def test_one_that_stays_does_not_hold_up_the_others_for_long() -> None:
    visitors = Visitors(Admission())
    names = [str(number) for number in range(5 * AT_ONCE)]
    visitors.come(*names)
    with anyio.fail_after(30):
        assert [await visitors.arrivals.get() for _ in names] == names
    await visitors.close()


async def test_one_that_is_let_in_and_cancelled_at_once_leaves_its_place() -> None:
    admission = Admission()
    names = [str(number) for number in range(AT_ONCE)]
    for name in names:
        await admission.enter(name)
    unlucky = asyncio.create_task(admission.enter("unlucky"))
    await settle()
    admission.leave(names[0])
    unlucky.cancel()
    await asyncio.gather(unlucky, return_exceptions=True)
    assert unlucky.cancelled()
    with anyio.fail_after(30):
        await admission.enter("next")


async def test_many_that_stay_hold_up_the_others_hardly_longer_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    lost = 0

    class Counting(Admission):
        def _lose_patience(self) -> None:
            nonlocal lost
            lost += 1
            super()._lose_patience()

    visitors = Visitors(Counting())
    names = [str(number) for number in range(1000)]
    visitors.come(*names)
    with anyio.fail_after(30):
        assert [await visitors.arrivals.get() for _ in names] == names
    assert lost < 20
    await visitors.close()
