"""A pool over real workers, and pools that are kept until nobody uses them any more."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from commands import worker_processes
from osmosis_ai.config import LimitsConfig, RunConfig
from osmosis_ai.data.dataset import Dataset
from osmosis_ai.errors import FunctionError, ModelStartError
from osmosis_ai.records import AgentReport, FunctionRef, Row, Score, SolutionCall, SolutionStep
from osmosis_ai.runtime.pool.backends import open_pool
from osmosis_ai.runtime.pool.base import InFlight, PoolOptions
from osmosis_ai.runtime.pool.kept import KeptPool
from osmosis_ai.runtime.pool.pool import WorkerPool
from osmosis_ai.runtime.protocol import (
    Asked,
    Event,
    Progress,
    Resume,
    Reworded,
    RolloutDone,
    RolloutJob,
    ScoresDone,
    WorkerSpec,
    encode,
)
from osmosis_ai.runtime.run.prepare import prepare, scorer_spec
from repos import ADDING, write_repo
from waiting import eventually

pytestmark = pytest.mark.anyio

MAIN = f"""{ADDING}
import os


@mcp.tool
def crash() -> str:
    \"\"\"Take the process down.\"\"\"
    os.{{end}}
"""


def row(*calls: dict[str, Any], answer: str = "done") -> dict[str, Any]:
    steps = [*calls, answer]
    return {"system_prompt": "s", "user_prompt": "u", "ground_truth": "3", "solution": steps}


ROWS = [row({"tool": "add", "arguments": {"a": 1, "b": 2}}), row({"tool": "crash", "arguments": {}})]


@asynccontextmanager
async def pool_of(root: Path, *, end: str = "_exit(7)", **options: Any) -> AsyncIterator[WorkerPool]:
    repo = write_repo(root / "repo", main=MAIN.format(end=end), rows=ROWS)
    spec = prepare(RunConfig.of(**{"model": "offline/oracle", **options}), repo, {}).worker
    with anyio.fail_after(60):
        async with open_pool(spec, PoolOptions(workers=1)) as pool:
            yield pool


def job(root: Path, index: int) -> RolloutJob:
    found = next(Dataset(root / "repo" / "test_data.jsonl").rows(offset=index, limit=1))
    return RolloutJob(f"job{index}", found, 0, "policy")


async def test_a_pool_has_what_its_two_kinds_of_workers_loaded(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        assert [tool["function"]["name"] for tool in pool.loaded.tools] == ["add", "crash"]
        assert pool.loaded.functions == ["reward_fn.rewards:exact"]
        assert (list(pool.loaded.tool_sources), list(pool.loaded.function_sources)) == (
            ["mcp/main.py"],
            ["reward_fn/rewards.py"],
        )
        assert (pool.mixed, pool.spent_usd, pool.oldest()) == (False, 0.0, None)


async def test_a_rollout_is_heard_while_it_runs_and_gone_afterwards(tmp_path: Path) -> None:
    waits: list[str] = []

    def listen(event: Progress) -> None:
        oldest = pool.oldest()
        assert isinstance(oldest, InFlight)
        assert (oldest.row_index, oldest.run_index) == (0, 0)
        waits.append(oldest.waiting_on)

    async with pool_of(tmp_path) as pool:
        rollout = await pool.rollout(job(tmp_path, 0), listen)
        assert rollout.failure is None
        assert waits == ["tool add", "the model (turn 2)", "the model (turn 3)"]
        assert pool.oldest() is None
        pool.resume(Resume("job0"))


@pytest.mark.parametrize(
    ("end", "how"),
    [("_exit(7)", "exited with code 7"), ("kill(os.getpid(), 9)", "killed by SIGKILL")],
)
async def test_a_rollout_that_takes_its_worker_down_says_how_and_in_which_tool(
    tmp_path: Path, end: str, how: str
) -> None:
    async with pool_of(tmp_path, end=end) as pool:
        rollout = await pool.rollout(job(tmp_path, 1))
        assert rollout.failure is not None
        assert (rollout.failure.origin, rollout.failure.message) == ("worker", f"{how} (while running crash)")
        # What it had done is kept, and another worker takes the next one.
        assert [message["role"] for message in rollout.messages] == ["system", "user", "assistant"]
        assert (await pool.rollout(job(tmp_path, 0))).failure is None


FORGING = f"""{ADDING}
import gc
import json

from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.worker.main import Outbox


@mcp.tool
def forge(text: str) -> str:
    \"\"\"Send an event of the caller's choice to the run.\"\"\"
    gc.unfreeze()
    (outbox,) = [found for found in gc.get_objects() if type(found) is Outbox]
    outbox.send(protocol.decode_event(text.encode()))
    return "sent"


@mcp.tool
def known() -> str:
    \"\"\"Say what this process holds of a row.\"\"\"
    from osmosis_ai.records import Row

    gc.unfreeze()
    return json.dumps([[row.ground_truth, row.solution is not None] for row in gc.get_objects() if type(row) is Row])
"""


@asynccontextmanager
async def forging_pool(root: Path, **options: Any) -> AsyncIterator[tuple[WorkerPool, WorkerSpec]]:
    repo = write_repo(root / "repo", main=FORGING, rows=ROWS)
    spec = prepare(RunConfig.of(**{"model": "offline/oracle", **options}), repo, {}).worker
    with anyio.fail_after(60):
        async with open_pool(spec, PoolOptions(workers=1)) as pool:
            yield pool, spec


def calling(tool: str, **arguments: Any) -> RolloutJob:
    steps: list[SolutionStep] = [[SolutionCall(tool, arguments)], "done"]
    return RolloutJob("job", Row(0, "row", "s", "u", "the truth", {}, steps), 0, "policy")


SCORE = Score("forged", 1e9)


@pytest.mark.parametrize(
    "event",
    [
        RolloutDone("job", "stop", 1.0, messages=[{"role": "assistant", "content": "42"}]),
        RolloutDone("job", "stop", 1.0, agent=AgentReport("forged", score=SCORE)),
        RolloutDone("job", "removed", 1.0),
        Asked("job", 0, [{"role": "user", "content": "another question"}]),
        Reworded("job", [{"role": "user", "content": "another question"}]),
        ScoresDone("job", [[SCORE]]),
    ],
    ids=lambda event: type(event).__name__,
)
async def test_what_a_tool_sends_in_the_name_of_another_kind_of_rollout_fails_its_own(
    event: Event, tmp_path: Path
) -> None:
    async with forging_pool(tmp_path) as (pool, _):
        rollout = await pool.rollout(calling("forge", text=encode(event).decode()))
        assert rollout.failure is not None
        assert rollout.failure.origin == "worker"
        assert "another kind of rollout" in rollout.failure.message or "ScoresDone" in rollout.failure.message
        assert [message["role"] for message in rollout.messages] == ["system", "user", "assistant"]
        assert rollout.agent is None


async def test_a_reply_to_a_job_of_another_worker_is_ignored(tmp_path: Path) -> None:
    async with forging_pool(tmp_path) as (pool, _):
        for event in (RolloutDone("another", "stop", 1.0), ScoresDone("another", [[SCORE]])):
            rollout = await pool.rollout(calling("forge", text=encode(event).decode()))
            assert (rollout.failure, rollout.messages[-1]["content"]) == (None, "done")


@pytest.mark.parametrize(("model", "known"), [("offline/oracle", "the truth"), ("offline/smoke", None)])
async def test_only_the_model_that_plays_references_has_them_beside_the_tools(
    model: str, known: str | None, tmp_path: Path
) -> None:
    async with forging_pool(tmp_path, model=model) as (pool, _):
        rollout = await pool.rollout(calling("known"))
    (said,) = [
        json.loads(message["content"])
        for message in rollout.messages
        if message["role"] == "tool" and message["content"].startswith("[[")
    ]
    assert [truth for truth, _ in said] == [known]
    assert [solution for _, solution in said] == [known is not None]


async def test_a_model_that_cannot_be_used_is_a_start_error(tmp_path: Path) -> None:
    async with pool_of(tmp_path, model="served", base_url="http://127.0.0.1:9/v1") as pool:
        with pytest.raises(ModelStartError, match="no price is known for served"):
            await pool.probe("policy", price=True)


def scorers(root: Path, source: str = "") -> WorkerSpec:
    (root / "scores.py").write_text(f"def zero(solution_str): return 0.0\n{source}", encoding="utf-8")
    ref = FunctionRef("zero", "scores", "zero", str(root), file="scores.py")
    return scorer_spec(root, [ref], LimitsConfig())


async def gone() -> None:
    await anyio.to_thread.run_sync(eventually, lambda: not worker_processes())


async def test_a_kept_pool_lives_until_its_owner_and_all_users_have_left(tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        kept = KeptPool(group, scorers(tmp_path), PoolOptions())
        await kept.opened()
        with kept as pool:
            with kept as again:
                assert again is pool
            kept.release()
            assert pool.loaded.functions == ["zero"]
            assert worker_processes()
        await gone()


async def test_what_a_kept_pool_cannot_load_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        kept = KeptPool(group, scorers(tmp_path, "raise ValueError('not today')"), PoolOptions())
        for _ in range(2):
            with pytest.raises(FunctionError, match=r"scores\.py:2: .*not today"):
                await kept.opened()


async def test_a_pool_that_is_not_needed_any_more_stops_loading(tmp_path: Path) -> None:
    started = tmp_path / "started"
    hangs = f"import time\nopen({str(started)!r}, 'x').close()\nwhile True: time.sleep(60)\n"
    async with anyio.create_task_group() as group:
        kept = KeptPool(group, scorers(tmp_path, hangs), PoolOptions())
        await anyio.to_thread.run_sync(eventually, started.exists)
        kept.abandon()
    await gone()
