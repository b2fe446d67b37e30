"""How a crew shares jobs out, and whom it blames: with workers that are scripted, behind the real sockets.

What real worker processes do is tested through the command, in tests/e2e.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import anyio
import pytest

from osmosis_ai.errors import RepositoryError, StartError
from osmosis_ai.records import Row, Turn, Usage
from osmosis_ai.runtime import frames
from osmosis_ai.runtime.crew import MAX_FAILED_STARTS, Crew, JobFailedError
from osmosis_ai.runtime.process import pack, read_frame
from osmosis_ai.runtime.spawning import Spawned

pytestmark = pytest.mark.anyio

PATIENCE = 30.0
NO_SUCH_PROCESS = 1 << 22
"""Above every process id: what a crew kills by it isn't there."""


class ScriptedWorker:
    """One worker's side of the sockets."""

    def __init__(self, number: int, process: Spawned) -> None:
        self.number = number
        self.jobs: list[str] = []
        self._process = process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self, jobs: socket.socket, events: socket.socket) -> None:
        self._reader, self._jobs_writer = await asyncio.open_unix_connection(sock=jobs)
        _, self._writer = await asyncio.open_unix_connection(sock=events)

    async def next(self) -> frames.Order:
        order = frames.decode_order(await read_frame(self._reader))
        if isinstance(order, frames.RolloutJob):
            self.jobs.append(order.id)
        return order

    def send(self, event: frames.Event) -> None:
        self._writer.write(pack(event))

    def call_tool(self, job: str) -> None:
        """From now on the job is inside user code."""
        call = {"id": "c", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
        turn = Turn(0, "tool_calls", Usage(), 1.0)
        self.send(frames.TurnDone(job, turn, {"role": "assistant", "content": None, "tool_calls": [call]}))

    def done(self, job: str) -> None:
        self.send(frames.RolloutDone(job, "stop", 1.0))

    async def serve(self) -> None:
        """Be ready and finish every job at once, until told to stop."""
        self.send(frames.Ready())
        while not isinstance(order := await self.next(), frames.Stop):
            if isinstance(order, frames.RolloutJob):
                self.done(order.id)

    def end(self, code: int) -> None:
        self._writer.close()
        self._jobs_writer.close()
        self._process.end(code)


Life = Callable[[ScriptedWorker], Awaitable[int | None]]
"""What a worker does; it gives its exit code."""


class ScriptedSpawner:
    """Starts scripted workers; a life that is an exception is a start that fails."""

    def __init__(self, *lives: Life | Exception, then: Life | Exception) -> None:
        self.workers: list[ScriptedWorker] = []
        self._lives = [*lives]
        self._then = then
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = count()

    async def spawn(self, jobs: socket.socket, events: socket.socket) -> Spawned:
        life = self._lives.pop(0) if self._lives else self._then
        if isinstance(life, Exception):
            raise life
        number = next(self._numbers)
        process = Spawned(NO_SUCH_PROCESS + number)
        worker = ScriptedWorker(number, process)
        self.workers.append(worker)
        await worker.open(jobs.dup(), events.dup())

        async def live() -> None:
            code = None
            with suppress(asyncio.IncompleteReadError):
                code = await life(worker)
            worker.end(code or 0)

        self._tasks.append(asyncio.create_task(live()))
        return process

    def stop(self) -> None:
        """Nothing is started that could hang."""

    async def aclose(self) -> None:
        await asyncio.gather(*self._tasks)


async def well(worker: ScriptedWorker) -> None:
    await worker.serve()


async def cannot_load(worker: ScriptedWorker) -> None:
    worker.send(frames.NotReady("RepositoryError", "mcp/main.py:1: it is broken"))


@asynccontextmanager
async def crew_of(spawner: ScriptedSpawner, size: int = 1, *, share: int = 8, alone: int = 0) -> AsyncIterator[Crew]:
    crew = Crew(spawner, size, 1 << 40, PATIENCE, share, alone=alone)
    with anyio.fail_after(PATIENCE):
        async with crew.working():
            yield crew


class Heard:
    """Who was restarted."""

    def __init__(self, crew: Crew) -> None:
        self.restarts: list[str] = []
        self._crew = crew

    async def run(self, job: str) -> frames.RolloutDone:
        rollout = frames.RolloutJob(job, Row(0, "row", "s", "u"), 0, "policy")
        return await self._crew.run(rollout, frames.RolloutDone, _ignore, lambda: self.restarts.append(job))


def _ignore(event: Any) -> None:
    pass


async def test_a_worker_that_ends_right_after_it_was_ready_loses_no_job() -> None:
    async def brief(worker: ScriptedWorker) -> int:
        worker.send(frames.Ready())
        return 3

    async with crew_of(ScriptedSpawner(brief, brief, then=well), alone=1) as crew:
        assert (await Heard(crew).run("a")).job == "a"


async def test_whoever_was_not_in_user_code_simply_runs_again() -> None:
    async def dies_with_two(worker: ScriptedWorker) -> int:
        worker.send(frames.Ready())
        for _ in range(2):
            await worker.next()
        worker.call_tool("suspect")
        return 9

    spawner = ScriptedSpawner(dies_with_two, then=well)
    async with crew_of(spawner) as crew:
        heard = Heard(crew)
        async with anyio.create_task_group() as group:
            group.start_soon(heard.run, "suspect")
            group.start_soon(heard.run, "bystander")
    assert sorted(heard.restarts) == ["bystander", "suspect"]
    # The suspect ran alone; so nobody was blamed, because it did nothing there.
    (alone,) = [worker for worker in spawner.workers[1:] if "suspect" in worker.jobs]
    assert alone.jobs == ["suspect"]


async def test_a_lone_suspect_is_blamed_at_once_in_a_worker_nobody_else_was_in() -> None:
    async def dies(worker: ScriptedWorker) -> int:
        worker.send(frames.Ready())
        order = await worker.next()
        assert isinstance(order, frames.RolloutJob)
        worker.call_tool(order.id)
        return 7

    async with crew_of(ScriptedSpawner(dies, then=well)) as crew:
        heard = Heard(crew)
        with pytest.raises(JobFailedError, match="exited with code 7"):
            await heard.run("a")
    assert heard.restarts == []


async def test_a_lone_suspect_is_not_blamed_where_another_job_was_before() -> None:
    """A thread that the first job has left may be what takes the worker down."""

    async def dies_in_the_second(worker: ScriptedWorker) -> int:
        worker.send(frames.Ready())
        await worker.next()
        worker.done("a")
        await worker.next()
        worker.call_tool("b")
        return 7

    async with crew_of(ScriptedSpawner(dies_in_the_second, then=well)) as crew:
        heard = Heard(crew)
        await heard.run("a")
        assert (await heard.run("b")).job == "b"
    assert heard.restarts == ["b"]


async def test_a_job_that_meets_one_dying_worker_after_another_gets_one_of_its_own() -> None:
    async def dies(worker: ScriptedWorker) -> int:
        worker.send(frames.Ready())
        await worker.next()
        return -35

    spawner = ScriptedSpawner(dies, dies, then=well)
    async with crew_of(spawner) as crew:
        heard = Heard(crew)
        assert (await heard.run("a")).job == "a"
    assert heard.restarts == ["a", "a"]


async def test_a_job_whose_workers_always_die_fails_in_the_end() -> None:
    async def dies(worker: ScriptedWorker) -> int:
        worker.send(frames.Ready())
        await worker.next()
        return -35

    async with crew_of(ScriptedSpawner(then=dies), alone=1) as crew:
        with pytest.raises(JobFailedError, match="killed by signal 35|killed by SIG"):
            await Heard(crew).run("a")


async def test_jobs_are_shared_out_and_wait_for_a_worker_that_is_being_started() -> None:
    ready = anyio.Event()

    async def slow(worker: ScriptedWorker) -> None:
        await ready.wait()
        await holds(worker)

    async def holds(worker: ScriptedWorker) -> None:
        worker.send(frames.Ready())
        held = []
        while not isinstance(order := await worker.next(), frames.Stop):
            assert isinstance(order, frames.RolloutJob)
            held.append(order.id)
            if len(held) == 2:
                # Not before both of its share are here.
                for job in held:
                    worker.done(job)
                ready.set() if worker.number == 0 and not ready.is_set() else None

    spawner = ScriptedSpawner(holds, then=slow)
    async with crew_of(spawner, 2, share=2) as crew:
        heard = Heard(crew)
        async with anyio.create_task_group() as group:
            for name in "abcd":
                group.start_soon(heard.run, name)
    assert sorted(spawner.workers[0].jobs + spawner.workers[1].jobs) == list("abcd")
    assert {len(worker.jobs) % 2 for worker in spawner.workers} == {0}


async def test_what_no_worker_can_load_is_an_error_of_its_own_kind() -> None:
    async with crew_of(ScriptedSpawner(then=cannot_load), 2) as crew:
        with pytest.raises(RepositoryError, match="it is broken"):
            await crew.ready()


async def test_one_worker_that_cannot_load_is_replaced_once_another_could() -> None:
    spawner = ScriptedSpawner(cannot_load, then=well)
    async with crew_of(spawner, 2) as crew:
        await crew.ready()
        while len([worker for worker in crew._workers if worker.accepts]) < 2:
            await anyio.sleep(0)


async def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    spawner = ScriptedSpawner(OSError("no more processes"), then=well)
    async with crew_of(spawner, alone=1) as crew:
        heard = Heard(crew)
        # The crew's own worker could not be started, but a job's own can.
        assert (await heard.run("a")).job == "a"
        with pytest.raises(StartError, match="a worker process can't be started: no more processes"):
            await crew.ready()


async def test_jobs_fail_when_workers_can_no_longer_be_started() -> None:
    async def dies(worker: ScriptedWorker) -> int:
        worker.send(frames.Ready())
        await worker.next()
        return 1

    spawner = ScriptedSpawner(dies, then=cannot_load)
    async with crew_of(spawner) as crew:
        with pytest.raises(JobFailedError, match="it is broken") as failed:
            await Heard(crew).run("a")
        assert (failed.value.failure.origin, failed.value.failure.kind) == ("worker", "start")
    assert len(spawner.workers) == 1 + MAX_FAILED_STARTS
