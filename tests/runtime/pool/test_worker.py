"""The handle on one worker: what its events mean for its jobs, and what is lost when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from osmosis_ai.errors import RepositoryError, StartError
from osmosis_ai.records import Row
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.pool.worker import Loss, WorkerHandle, WorkerLostError, died
from scripted_workers import Life, ScriptedWorker

pytestmark = pytest.mark.anyio

PATIENCE = 30.0


def job(name: str) -> protocol.RolloutJob:
    return protocol.RolloutJob(name, Row(0, "row", "s", "u"), 0, "policy")


def ignore(event: object) -> None:
    pass


@asynccontextmanager
async def handle_of(life: Life) -> AsyncIterator[tuple[WorkerHandle, ScriptedWorker, list[object]]]:
    """Read a worker's events; yield its handle, the worker, and what it reports to have loaded."""
    found: list[object] = []
    worker = ScriptedWorker(life)
    handle = WorkerHandle(worker, found.append)
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(handle.read)
            yield handle, worker, found
            if not handle.ended.is_set():
                handle.kill(died("the test is over"))


async def ready(worker: ScriptedWorker) -> None:
    worker.emit(protocol.Ready())
    await anyio.sleep_forever()


async def test_a_worker_accepts_jobs_from_when_it_is_ready_until_it_retires() -> None:
    async def retires(worker: ScriptedWorker) -> None:
        await retire.wait()
        worker.emit(protocol.Ready(functions=["f"]))
        worker.emit(protocol.Imported({"late.py": "hash"}))
        await worker.next()
        worker.emit(protocol.Retiring("enough"))
        worker.done("a")
        await anyio.sleep_forever()

    retire = anyio.Event()
    async with handle_of(retires) as (handle, _, found):
        assert not handle.accepts
        retire.set()
        await handle.loaded(PATIENCE)
        assert (handle.accepts, handle.load, handle.taken) == (True, 0, 0)
        assert found == [protocol.Ready(functions=["f"]), protocol.Imported({"late.py": "hash"})]
        # A job that it has taken still comes to its end.
        assert isinstance(await handle.run(job("a"), ignore), protocol.RolloutDone)
        assert (handle.accepts, handle.load, handle.taken) == (False, 0, 1)


async def test_what_cannot_be_loaded_is_the_workers_own_error() -> None:
    async def fails(worker: ScriptedWorker) -> None:
        worker.emit(protocol.NotReady("RepositoryError", "mcp/main.py:1: broken"))

    async with handle_of(fails) as (handle, _, _):
        with pytest.raises(RepositoryError, match=r"^mcp/main\.py:1: broken$"):
            await handle.loaded(PATIENCE)


async def test_a_worker_that_ends_while_it_loads_is_a_start_error_with_its_end() -> None:
    async def dies(worker: ScriptedWorker) -> str:
        worker.output = ["it said this last"]
        return "killed by SIGSEGV"

    lost = "(?s)can't be loaded, because its worker was lost: killed by SIGSEGV.*it said this last"
    async with handle_of(dies) as (handle, _, _):
        with pytest.raises(StartError, match=lost):
            await handle.loaded(PATIENCE)
        with pytest.raises(WorkerLostError, match="killed by SIGSEGV"):
            await handle.run(job("a"), ignore)


async def test_a_worker_that_never_loads_is_killed() -> None:
    async def hangs(worker: ScriptedWorker) -> None:
        await anyio.sleep_forever()

    async with handle_of(hangs) as (handle, _, _):
        with pytest.raises(StartError, match=r"it did not finish within 0\.01 s"):
            await handle.loaded(0.01)
        assert handle.ended.is_set()


async def test_a_job_hears_its_own_progress_only() -> None:
    async def acts(worker: ScriptedWorker) -> None:
        worker.emit(protocol.Ready())
        for name in ("a", "b", "gone"):
            worker.emit(protocol.Acting(name))
            worker.done(name)
        await anyio.sleep_forever()

    heard: dict[str, list[protocol.Progress]] = {"a": [], "b": []}
    started = anyio.Event()

    async def starts(worker: ScriptedWorker) -> None:
        await started.wait()
        await acts(worker)

    async with handle_of(starts) as (handle, _, _), anyio.create_task_group() as group:
        for name, events in heard.items():
            group.start_soon(handle.run, job(name), events.append)
        await anyio.wait_all_tasks_blocked()
        started.set()
    assert heard == {name: [protocol.Acting(name)] for name in ("a", "b")}


async def lost(handle: WorkerHandle, name: str, losses: dict[str, Loss]) -> None:
    with pytest.raises(WorkerLostError) as caught:
        await handle.run(job(name), ignore)
    losses[name] = caught.value.loss


@pytest.mark.parametrize(
    ("last", "message", "kind", "culprit"),
    [
        (None, "exited with code 3", "died", None),
        (protocol.Dying("SystemExit: 3"), "SystemExit: 3", "died", None),
        (protocol.Stuck("a", 7.2), "user code held the event loop for 7 s", "blocked", "a"),
    ],
)
async def test_every_job_of_a_lost_worker_hears_why_and_who_was_inside_user_code(
    last: protocol.Event | None, message: str, kind: str, culprit: str | None
) -> None:
    async def dies(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        for _ in range(2):
            await worker.next()
        worker.call_tool("a")
        if last is not None:
            worker.emit(last)
        return "exited with code 3"

    losses: dict[str, Loss] = {}
    async with handle_of(dies) as (handle, _, _), anyio.create_task_group() as group:
        for name in "ab":
            group.start_soon(lost, handle, name, losses)
    for loss in losses.values():
        assert (loss.failure.message, loss.failure.kind) == (message, kind)
        assert (loss.culprit, loss.suspects) == (culprit, frozenset({"a"}))
    assert len(losses) == 2


@pytest.mark.parametrize(
    ("events", "inside"),
    [
        ([], False),
        ([protocol.Acting("a")], True),
        ([protocol.Acting("a"), protocol.Asked("a")], False),
        ([protocol.ScoringStarted("a", "f")], True),
        ([protocol.Paused("a", "request", 0, [])], True),
    ],
)
async def test_who_counts_as_inside_user_code(events: list[protocol.Event], inside: bool) -> None:
    async def dies(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        await worker.next()
        for event in events:
            worker.emit(event)
        return "exited with code 3"

    losses: dict[str, Loss] = {}
    async with handle_of(dies) as (handle, _, _):
        await lost(handle, "a", losses)
    assert losses["a"].suspects == ({"a"} if inside else set())


async def test_the_first_reason_for_a_kill_is_the_one_that_is_told() -> None:
    losses: dict[str, Loss] = {}
    async with handle_of(ready) as (handle, _, _), anyio.create_task_group() as group:
        await handle.loaded(PATIENCE)
        group.start_soon(lost, handle, "a", losses)
        await anyio.wait_all_tasks_blocked()
        handle.kill(died("it took too much memory"))
        handle.kill(died("stopped"))
    assert losses["a"].failure.message == "it took too much memory"


async def test_a_job_that_is_given_up_is_cancelled_in_the_worker() -> None:
    orders: list[protocol.Order] = []

    async def notes(worker: ScriptedWorker) -> None:
        worker.emit(protocol.Ready())
        while True:
            orders.append(await worker.next())

    async with handle_of(notes) as (handle, _, _):
        await handle.loaded(PATIENCE)
        async with anyio.create_task_group() as group:
            group.start_soon(handle.run, job("a"), ignore)
            await anyio.wait_all_tasks_blocked()
            handle.resume(protocol.Resume("a"))
            # Nobody waits for this one here.
            handle.resume(protocol.Resume("b"))
            group.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert handle.load == 0
    assert orders == [job("a"), protocol.Resume("a"), protocol.Cancel("a")]


async def test_a_worker_without_jobs_closes_by_itself_and_others_are_killed() -> None:
    async with handle_of(ScriptedWorker.serve) as (handle, _, _):
        await handle.loaded(PATIENCE)
        await handle.stop()
        assert (handle.stopping, handle.ended.is_set()) == (True, True)
    losses: dict[str, Loss] = {}
    async with handle_of(ready) as (handle, _, _), anyio.create_task_group() as group:
        await handle.loaded(PATIENCE)
        group.start_soon(lost, handle, "a", losses)
        await anyio.wait_all_tasks_blocked()
        await handle.stop()
    assert losses["a"].failure.message == "stopped"
