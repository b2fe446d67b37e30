"""How a group shares jobs out, and whom it blames: with workers that are scripted, behind channels in memory.

What real worker processes do is tested through the command, in tests/e2e.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from osmosis_ai.code_hashes import file_hash
from osmosis_ai.errors import RepositoryError, ShortageError, StartError
from osmosis_ai.records import Row
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.code import LoadedCode
from osmosis_ai.runtime.pool.group import MAX_FAILED_STARTS, MIN_ALONE, CodeChangedError, JobFailedError, WorkerGroup
from scripted_workers import Life, ScriptedWorker

pytestmark = pytest.mark.anyio

PATIENCE = 30.0


class ScriptedSpawner:
    """Starts scripted workers; a life that is an exception fails the start."""

    def __init__(self, *lives: Life | Exception, then: Life | Exception) -> None:
        self.workers: list[ScriptedWorker] = []
        self._lives = deque(lives)
        self._then = then

    async def spawn(self) -> ScriptedWorker:
        life = self._lives.popleft() if self._lives else self._then
        if isinstance(life, Exception):
            raise life
        self.workers.append(ScriptedWorker(life))
        return self.workers[-1]

    def wake(self) -> None:
        pass

    def stop(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def well(worker: ScriptedWorker) -> None:
    await worker.serve()


async def cannot_load(worker: ScriptedWorker) -> None:
    worker.emit(protocol.NotReady("RepositoryError", "mcp/main.py:1: it is broken"))


@asynccontextmanager
async def group_of(
    spawner: ScriptedSpawner,
    size: int = 1,
    *,
    share: int = 8,
    alone: int = 0,
    root: Path = Path("nowhere"),
    spares: bool = False,
    shortage_limit: float = PATIENCE,
) -> AsyncIterator[WorkerGroup]:
    limits = {"spares": spares, "shortage_limit": shortage_limit}
    group = WorkerGroup(spawner, LoadedCode(root), size, 1 << 40, PATIENCE, share, alone=alone, **limits)
    with anyio.fail_after(PATIENCE):
        async with group.working():
            yield group


class Heard:
    """The names of the restarted jobs."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.restarts: list[str] = []
        self._workers = workers

    async def run(self, job: str) -> protocol.RolloutDone:
        rollout = protocol.RolloutJob(job, Row(0, "row", "s", "u"), 0, "policy")
        return await self._workers.run(rollout, protocol.RolloutDone, _ignore, lambda: self.restarts.append(job))


def _ignore(event: Any) -> None:
    pass


async def test_a_worker_that_ends_right_after_it_was_ready_loses_no_job() -> None:
    async def brief(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        return "exited with code 3"

    async with group_of(ScriptedSpawner(brief, brief, then=well), alone=1) as workers:
        assert (await Heard(workers).run("a")).job == "a"


async def test_whoever_was_not_in_user_code_simply_runs_again() -> None:
    async def dies_with_two(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        for _ in range(2):
            await worker.next()
        worker.call_tool("suspect")
        return "exited with code 9"

    spawner = ScriptedSpawner(dies_with_two, then=well)
    async with group_of(spawner) as workers:
        heard = Heard(workers)
        async with anyio.create_task_group() as group:
            group.start_soon(heard.run, "suspect")
            group.start_soon(heard.run, "bystander")
    assert sorted(heard.restarts) == ["bystander", "suspect"]
    # The suspect ran alone; so nobody was blamed, because it did nothing there.
    (alone,) = [worker for worker in spawner.workers[1:] if "suspect" in worker.jobs]
    assert alone.jobs == ["suspect"]


async def test_once_a_suspect_is_blamed_the_others_run_with_everybody_again() -> None:
    jobs = [f"job {number}" for number in range(12)]
    culprit = "job 9"

    async def life(worker: ScriptedWorker) -> str | None:
        worker.emit(protocol.Ready())
        if len(spawner.workers) > 1:
            while isinstance(order := await worker.next(), protocol.RolloutJob):
                worker.emit(protocol.Acting(order.id))
                if order.id == culprit:
                    return "exited with code 3"
                # The innocent take their time, so that the culprit is found before they make room for others.
                await found.wait()
                worker.done(order.id)
            return None
        for job in jobs:
            await worker.next()
            worker.emit(protocol.Acting(job))
        worker.emit(protocol.Acting(culprit, taken=True))
        return "exited with code 3"

    found, blame = anyio.Event(), anyio.Event()
    failed: list[str] = []
    spawner = ScriptedSpawner(then=life)
    async with group_of(spawner, share=len(jobs)) as workers:
        heard = Heard(workers)

        async def run(job: str) -> None:
            try:
                await heard.run(job)
            except JobFailedError:
                failed.append(job)
                blame.set()

        async with anyio.create_task_group() as group:
            for job in jobs:
                group.start_soon(run, job)
            await blame.wait()
            found.set()
    assert failed == [culprit]
    (together,) = [worker.jobs for worker in spawner.workers[1:] if len(worker.jobs) > 1]
    # The likeliest was among the first to run alone, of which there are few at a time.
    assert len(together) == len(jobs) - MIN_ALONE
    assert culprit not in together


async def test_after_a_loss_another_worker_is_kept_ready_for_the_next() -> None:
    async def dies_with_its_first(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        await worker.next()
        return "exited with code 9"

    async def dies_with_its_second(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        await worker.next()
        worker.done("a")
        await worker.next()
        return "exited with code 9"

    async def kept(worker: ScriptedWorker) -> None:
        ahead.set()
        await worker.serve()

    ahead = anyio.Event()
    spawner = ScriptedSpawner(dies_with_its_first, dies_with_its_second, then=kept)
    async with group_of(spawner, spares=True) as workers:
        heard = Heard(workers)
        await heard.run("a")
        await ahead.wait()
        await heard.run("b")
    assert heard.restarts == ["a", "b"]
    assert spawner.workers[2].jobs == ["b"]


async def test_a_lone_suspect_is_blamed_at_once_in_a_worker_nobody_else_was_in() -> None:
    async def dies(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        order = await worker.next()
        assert isinstance(order, protocol.RolloutJob)
        worker.call_tool(order.id)
        return "exited with code 7"

    async with group_of(ScriptedSpawner(dies, then=well)) as workers:
        heard = Heard(workers)
        with pytest.raises(JobFailedError, match="exited with code 7"):
            await heard.run("a")
    assert heard.restarts == []


async def test_a_lone_suspect_is_not_blamed_where_another_job_was_before() -> None:
    """A thread left behind by the first job may be what crashes the worker."""

    async def dies_in_the_second(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        await worker.next()
        worker.done("a")
        await worker.next()
        worker.call_tool("b")
        return "exited with code 7"

    async with group_of(ScriptedSpawner(dies_in_the_second, then=well)) as workers:
        heard = Heard(workers)
        await heard.run("a")
        assert (await heard.run("b")).job == "b"
    assert heard.restarts == ["b"]


async def test_a_job_that_meets_one_dying_worker_after_another_gets_one_of_its_own() -> None:
    async def dies(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        await worker.next()
        return "killed by signal 35"

    spawner = ScriptedSpawner(dies, dies, then=well)
    async with group_of(spawner) as workers:
        heard = Heard(workers)
        assert (await heard.run("a")).job == "a"
    assert heard.restarts == ["a", "a"]


async def test_a_job_whose_workers_always_die_fails_in_the_end() -> None:
    async def dies(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        await worker.next()
        return "killed by signal 40"

    async with group_of(ScriptedSpawner(then=dies), alone=1) as workers:
        with pytest.raises(JobFailedError, match="killed by signal"):
            await Heard(workers).run("a")


async def test_jobs_are_shared_out_and_wait_for_a_worker_that_is_being_started() -> None:
    both_here = anyio.Event()

    async def first(worker: ScriptedWorker) -> None:
        worker.emit(protocol.Ready())
        for _ in range(2):
            await worker.next()
        both_here.set()
        await worker.serve()

    async def second(worker: ScriptedWorker) -> None:
        await both_here.wait()
        worker.emit(protocol.Ready())
        for _ in range(2):
            await worker.next()
        # The first worker's jobs are still there, so that these could go nowhere else.
        for ended in (spawner.workers[0], worker):
            for job in ended.jobs:
                ended.done(job)
        await worker.serve()

    spawner = ScriptedSpawner(first, then=second)
    async with group_of(spawner, 2, share=2) as workers:
        heard = Heard(workers)
        async with anyio.create_task_group() as group:
            for name in "abcd":
                group.start_soon(heard.run, name)
    assert [worker.jobs for worker in spawner.workers] == [["a", "b"], ["c", "d"]]


async def test_what_no_worker_can_load_is_an_error_of_its_own_kind() -> None:
    async with group_of(ScriptedSpawner(then=cannot_load), 2) as workers:
        with pytest.raises(RepositoryError, match="it is broken"):
            await workers.ready()


async def test_one_worker_that_cannot_load_is_replaced_once_another_could() -> None:
    came = anyio.Event()

    async def replacement(worker: ScriptedWorker) -> None:
        came.set()
        await worker.serve()

    async with group_of(ScriptedSpawner(cannot_load, well, then=replacement), 2) as workers:
        await workers.ready()
        await came.wait()


async def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    spawner = ScriptedSpawner(OSError("no more processes"), then=well)
    async with group_of(spawner, alone=1) as workers:
        with pytest.raises(StartError, match="a worker process can't be started: no more processes"):
            await workers.ready()
        # What the group's own worker met need not be met by a job's own.
        assert (await Heard(workers).run("a")).job == "a"


async def test_with_a_worker_for_each_job_the_next_one_is_started_ahead() -> None:
    next_came = anyio.Event()

    async def first(worker: ScriptedWorker) -> None:
        worker.emit(protocol.Ready())
        await worker.next()
        # Its job isn't done before another worker is there, for which there is no job yet.
        await next_came.wait()
        worker.done("a")
        await worker.serve()

    async def second(worker: ScriptedWorker) -> None:
        next_came.set()
        await worker.serve()

    spawner = ScriptedSpawner(first, second, then=well)
    async with group_of(spawner, alone=1) as workers:
        heard = Heard(workers)
        for name in "abc":
            await heard.run(name)
    assert sorted(worker.jobs for worker in spawner.workers if worker.jobs) == [["a"], ["b"], ["c"]]


async def test_a_worker_started_ahead_that_cannot_load_costs_no_job() -> None:
    spawner = ScriptedSpawner(well, cannot_load, then=well)
    async with group_of(spawner, alone=1) as workers:
        heard = Heard(workers)
        for name in "ab":
            assert (await heard.run(name)).job == name


async def test_jobs_with_a_worker_each_do_not_wait_for_one_that_is_kept_ahead() -> None:
    all_here = anyio.Event()

    async def waits(worker: ScriptedWorker) -> None:
        worker.emit(protocol.Ready())
        order = await worker.next()
        if not isinstance(order, protocol.RolloutJob):
            return
        if sum(bool(other.jobs) for other in spawner.workers) == 3:
            all_here.set()
        await all_here.wait()
        worker.done(order.id)
        await worker.serve()

    spawner = ScriptedSpawner(then=waits)
    async with group_of(spawner, alone=3) as workers:
        heard = Heard(workers)
        await workers.ready()
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(heard.run, name)


async def test_jobs_fail_when_workers_can_no_longer_be_started() -> None:
    async def dies(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready())
        await worker.next()
        return "exited with code 1"

    spawner = ScriptedSpawner(dies, then=cannot_load)
    async with group_of(spawner) as workers:
        with pytest.raises(JobFailedError, match="it is broken") as failed:
            await Heard(workers).run("a")
        assert (failed.value.failure.origin, failed.value.failure.kind) == ("worker", "start")
    assert len(spawner.workers) == 1 + MAX_FAILED_STARTS


async def test_a_worker_that_has_loaded_other_code_gets_no_job(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text("VERSION = 1", encoding="utf-8")
    loaded = {"tools.py": file_hash(file)}

    async def dies(worker: ScriptedWorker) -> str:
        worker.emit(protocol.Ready(tool_sources=loaded))
        await worker.next()
        file.write_text("VERSION = 2", encoding="utf-8")
        return "exited with code 1"

    async def loads_the_new_code(worker: ScriptedWorker) -> None:
        worker.emit(protocol.Ready(tool_sources={"tools.py": file_hash(file)}))
        await worker.next()

    spawner = ScriptedSpawner(dies, then=loads_the_new_code)
    async with group_of(spawner, root=tmp_path) as workers:
        with pytest.raises(CodeChangedError, match=r"tools\.py changed after the start"):
            await Heard(workers).run("a")
        assert workers.changed == ["tools.py"]
    assert [worker.jobs for worker in spawner.workers] == [["a"], *[[]] * MAX_FAILED_STARTS]


def lacking(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
async def test_jobs_wait_while_the_system_has_no_room_for_their_worker(number: int) -> None:
    spawner = ScriptedSpawner(well, *[lacking(number)] * (2 * MAX_FAILED_STARTS), then=well)
    async with group_of(spawner, alone=2) as workers:
        await workers.ready()
        assert workers.shortage is None
        heard = Heard(workers)
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(heard.run, name)
        assert workers.shortage is not None


async def test_without_room_for_any_worker_the_limit_is_named_in_the_end() -> None:
    spawner = ScriptedSpawner(then=lacking(errno.EMFILE))
    async with group_of(spawner, alone=2, shortage_limit=0.0) as workers:
        with pytest.raises(ShortageError, match=r"open no more files; raise the limit \(`ulimit -n` is"):
            await workers.ready()
        with pytest.raises(JobFailedError, match=r"ulimit -n") as failed:
            await Heard(workers).run("a")
    assert failed.value.failure.kind == "start"


async def test_a_job_whose_worker_lacks_threads_is_not_to_blame() -> None:
    async def lacks_threads(worker: ScriptedWorker) -> None:
        worker.emit(protocol.Ready())
        order = await worker.next()
        assert isinstance(order, protocol.RolloutJob)
        worker.call_tool(order.id)
        worker.emit(protocol.NotReady("ShortageError", "there are no threads left"))

    async with group_of(ScriptedSpawner(lacks_threads, then=well)) as workers:
        assert (await Heard(workers).run("a")).job == "a"
        assert workers.shortage == "there are no threads left"
