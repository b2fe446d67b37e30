"""A worker runs jobs on a loaded repository and reports each to its last event, without a process around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from fastmcp import Context, FastMCP

from osmosis_ai.config import LimitsConfig
from osmosis_ai.models.choice import choose_model
from osmosis_ai.records import Row, SolutionCall, SolutionStep, StoredInput
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.protocol import RolloutJob, ScoreJob, WorkerSpec
from osmosis_ai.runtime.worker.worker import LoadedRepository, Worker, follow_orders, label_of, labels_of

pytestmark = pytest.mark.anyio

PATIENCE = 30.0


def server() -> FastMCP:
    mcp: FastMCP = FastMCP("tools")

    @mcp.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @mcp.tool
    async def hang() -> str:
        """Never answer."""
        await anyio.sleep_forever()
        raise AssertionError

    @mcp.tool
    def told(ctx: Context) -> str:
        """Say what a tool may know of its rollout."""
        assert ctx.request_context is not None
        meta = ctx.request_context.meta
        return repr({} if meta is None else dict(meta.model_dump() if hasattr(meta, "model_dump") else meta))

    return mcp


def model(name: str = "offline/oracle", base_url: str | None = None) -> Any:
    return choose_model(model=name, base_url=base_url, api_key=None, params={}, request_timeout=1.0, environ={})


@asynccontextmanager
async def working(
    root: Path, *, policy: Any = None, tools: FastMCP | None = None, **limits: Any
) -> AsyncIterator[tuple[Worker, list[protocol.Event]]]:
    policies = {"policy": policy or model()}
    spec = WorkerSpec(str(root), LimitsConfig(**limits), policies=policies)
    loaded = LoadedRepository(spec, tools, [], None, {}, [], {}, {}, {})
    events: list[protocol.Event] = []
    with anyio.fail_after(PATIENCE):
        async with Worker.open(loaded, events.append) as worker:
            yield worker, events


def job(*calls: tuple[str, dict[str, Any]]) -> RolloutJob:
    """Return a rollout whose model makes these calls in a turn each, then answers."""
    steps: list[SolutionStep] = [[SolutionCall(tool, arguments)] for tool, arguments in calls]
    row = Row(7, "row", "s", "u", "the truth", {"level": 1}, [*steps, "done"])
    return RolloutJob("job", row, 2, "policy")


def given(row_index: int) -> StoredInput:
    return StoredInput(row_index, b"", b"")


def results(events: list[protocol.Event]) -> list[str]:
    return [event.message["content"] for event in events if isinstance(event, protocol.CallDone)]


async def test_a_worker_is_ready_with_its_tools(tmp_path: Path) -> None:
    async with working(tmp_path, tools=server()) as (_, events):
        (ready,) = events
    assert isinstance(ready, protocol.Ready)
    assert [tool["function"]["name"] for tool in ready.tools] == ["add", "hang", "told"]
    assert (ready.functions, ready.problems, ready.agent) == ([], [], None)


async def test_a_rollout_reports_each_turn_and_call_and_its_end(tmp_path: Path) -> None:
    async with working(tmp_path, tools=server()) as (worker, events):
        await worker.run(job(("add", {"a": 1, "b": 2}), ("gone", {})))
    kinds = [type(event).__name__ for event in events[1:]]
    assert kinds == ["TurnDone", "CallDone", "TurnDone", "CallDone", "TurnDone", "RolloutDone"]
    assert results(events)[0] == "3"
    calls = [event.call for event in events if isinstance(event, protocol.CallDone)]
    assert [(call.turn, call.name, call.error) for call in calls] == [(0, "add", None), (1, "gone", "unknown_tool")]
    done = events[-1]
    assert isinstance(done, protocol.RolloutDone)
    assert (done.job, done.finish_reason, done.failure) == ("job", "stop", None)


async def test_a_tool_knows_its_rollout_and_not_the_ground_truth(tmp_path: Path) -> None:
    async with working(tmp_path, tools=server()) as (worker, events):
        await worker.run(job(("told", {})))
    (told,) = results(events)
    for known in ("'rollout_id': 'job'", "'row_index': 7", "'level': 1"):
        assert known in told
    assert "the truth" not in told


async def test_a_long_result_is_cut_and_its_length_recorded(tmp_path: Path) -> None:
    async with working(tmp_path, tools=server(), max_tool_output=20) as (worker, events):
        await worker.run(job(("told", {})))
    (call,) = [event.call for event in events if isinstance(event, protocol.CallDone)]
    assert call.truncated_from is not None
    assert call.truncated_from > 20


@pytest.mark.parametrize(
    ("limits", "reason", "error"),
    [({"timeout": 0.1}, "timeout", None), ({"tool_timeout": 0.1}, "stop", "timeout")],
)
async def test_time_limits_end_a_rollout_or_only_its_call(
    tmp_path: Path, limits: dict[str, float], reason: str, error: str | None
) -> None:
    async with working(tmp_path, tools=server(), **limits) as (worker, events):
        await worker.run(job(("hang", {})))
    (done,) = [event for event in events if isinstance(event, protocol.RolloutDone)]
    assert done.finish_reason == reason
    assert (done.failure is None) == (reason == "stop")
    assert [event.call.error for event in events if isinstance(event, protocol.CallDone)] == [error] * (
        error is not None
    )


async def test_a_cancelled_job_reports_nothing_more(tmp_path: Path) -> None:
    async with working(tmp_path, tools=server()) as (worker, events):
        orders: asyncio.Queue[protocol.Order] = asyncio.Queue()
        async with anyio.create_task_group() as group:
            group.start_soon(follow_orders, worker, orders.get, worker.run)
            orders.put_nowait(job(("hang", {})))
            while not any(isinstance(event, protocol.TurnDone) for event in events):
                await anyio.lowlevel.checkpoint()
            before = len(events)
            # Orders about jobs that have ended are too late.
            orders.put_nowait(protocol.Cancel("gone"))
            orders.put_nowait(protocol.Resume("gone"))
            orders.put_nowait(protocol.Cancel("job"))
            orders.put_nowait(msgspec.structs.replace(job(), id="next"))
            while not any(isinstance(event, protocol.RolloutDone) for event in events):
                await anyio.lowlevel.checkpoint()
            orders.put_nowait(protocol.Stop())
        assert {getattr(event, "job", None) for event in events[before:]} == {"next"}


async def test_a_stop_gives_up_the_jobs_that_run(tmp_path: Path) -> None:
    async with working(tmp_path, tools=server()) as (worker, events):
        orders: asyncio.Queue[protocol.Order] = asyncio.Queue()
        for order in (job(("hang", {})), protocol.Stop()):
            orders.put_nowait(order)
        await follow_orders(worker, orders.get, worker.run)
    assert not any(isinstance(event, protocol.RolloutDone) for event in events)


async def test_a_probe_says_why_a_model_cannot_be_used(tmp_path: Path) -> None:
    unpriced = model("served", "http://127.0.0.1:9/v1")
    for policy, price in ((model(), False), (unpriced, True)):
        async with working(tmp_path, policy=policy) as (worker, events):
            await worker.run(protocol.ProbeJob("probe", "policy", price))
        (done,) = events[1:]
        assert isinstance(done, protocol.Probed)
        assert (done.error is None) == (policy is not unpriced)
    assert done.error is not None
    assert done.error.startswith("no price is known for served")


async def test_damaged_records_are_an_error_of_the_scores(tmp_path: Path) -> None:
    async with working(tmp_path) as (worker, events):
        await worker.run(ScoreJob("scores", [given(0)], ["f"]))
    (done,) = events[1:]
    assert isinstance(done, protocol.ScoresDone)
    assert done.error is not None
    assert done.scores == []


@pytest.mark.parametrize(
    ("job", "label", "labels"),
    [
        (job(), "row 7 run 2", ["row 7 run 2"]),
        (ScoreJob("s", [given(4)], ["f"]), "row 4 scores", ["row 4 scores"]),
        (ScoreJob("s", [given(4), given(5)], ["f"]), "scores", ["row 4 scores", "row 5 scores"]),
        (protocol.ServeJob("s", {"rollout_id": "r"}), "rollout r", ["rollout r"]),
        (protocol.ToolsJob("t", {"rollout_id": "r"}), "rollout r", ["rollout r"]),
        (protocol.ProbeJob("p", "policy", False), "probe", ["probe"]),
    ],
)
def test_what_a_job_is_called_in_the_log(job: protocol.Job, label: str, labels: list[str]) -> None:
    assert (label_of(job), labels_of(job)) == (label, labels)
