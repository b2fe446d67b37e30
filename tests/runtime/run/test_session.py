"""Runs from Python: one call, events, concurrent runs, and the remains of an interrupted run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import osmosis_ai
from osmosis_ai import Report, RunConfig, StartError, open_run
from osmosis_ai.runtime.run import events
from osmosis_ai.runtime.run.events import RunEvent
from osmosis_ai.store.run_store import RunStore

MAIN = '''
from fastmcp import FastMCP

mcp = FastMCP("adding")


@mcp.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''

REWARD = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str.strip() == ground_truth else 0.0
"""

ROW = '{"system_prompt": "Add.", "user_prompt": "1 + 2?", "ground_truth": "3", "number": %d}\n'


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with one tool, one reward function and three rows."""
    for name, text in {"mcp/main.py": MAIN, "reward_fn/rewards.py": REWARD}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "test_data.jsonl").write_text("".join(ROW % number for number in range(3)), encoding="utf-8")
    return tmp_path


def config(**options: object) -> RunConfig:
    return RunConfig.of(**{"model": "offline/oracle", "workers": 1, **options})  # type: ignore[arg-type]


def mean(report: Report) -> float:
    return report.functions["reward_fn.rewards:exact"].mean


def test_one_call(repo: Path) -> None:
    report = osmosis_ai.run(config(), directory=repo)
    assert report.whole
    assert mean(report) == 1.0
    assert [outcome.row_index for outcome in report.outcomes()] == [0, 1, 2]


def test_where_a_loop_already_runs(repo: Path) -> None:
    async def cell() -> Report:
        return osmosis_ai.run(config(), directory=repo)

    assert asyncio.run(cell()).whole


def test_two_at_once_in_threads(repo: Path) -> None:
    reports: dict[int, Report] = {}

    def one(number: int) -> None:
        reports[number] = osmosis_ai.run(config(n=number), directory=repo)

    threads = [threading.Thread(target=one, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(list(reports[number].outcomes())) for number in (1, 2)] == [3, 6]
    assert reports[1].run_id != reports[2].run_id


def test_a_script_without_a_main_guard(repo: Path) -> None:
    script = repo / "script.py"
    script.write_text(
        "import osmosis_ai\n"
        "report = osmosis_ai.run(osmosis_ai.RunConfig.of(model='offline/oracle', limit=1))\n"
        "print('whole', report.whole)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], cwd=repo, capture_output=True, encoding="utf-8", timeout=120)
    assert done.stdout == "whole True\n", done.stderr


def test_events_come_in_order(repo: Path) -> None:
    heard: list[RunEvent] = []

    async def main() -> tuple[list[RunEvent], Report]:
        async with open_run(config(batch_size=1, limit=1), directory=repo, listener=heard.append) as run:
            return [event async for event in run], await run.report()

    told, report = asyncio.run(main())
    assert told == heard
    kinds = [type(event) for event in told if not isinstance(event, events.DatasetProgress)]
    assert kinds == [
        events.Notice,
        events.RunLoaded,
        events.RunStarted,
        events.RolloutStarted,
        events.TurnDone,
        events.RolloutDone,
        events.RolloutScored,
    ]
    started = next(event for event in told if isinstance(event, events.RunStarted))
    assert (started.run_id, started.total_rollouts, started.recorded) == (report.run_id, 1, None)


def test_a_run_that_is_left_early_can_be_resumed(repo: Path) -> None:
    async def leave() -> str:
        async with open_run(config(batch_size=1), directory=repo) as run:
            async for event in run:
                if isinstance(event, events.RolloutDone):
                    break
            return run.id

    run_id = asyncio.run(leave())
    with RunStore.open(repo, create=False) as store:
        assert store.find_run(run_id).status == "interrupted"
    report = osmosis_ai.run(config(resume_run=run_id), directory=repo)
    assert report.run_id == run_id
    assert report.whole


def test_a_run_that_is_never_iterated_is_interrupted(repo: Path) -> None:
    async def open_only() -> str:
        async with open_run(config(), directory=repo) as run:
            return run.id

    run_id = asyncio.run(open_only())
    with RunStore.open(repo, create=False) as store:
        assert store.find_run(run_id).status == "interrupted"


def test_a_cancelled_task_leaves_an_interrupted_run(repo: Path) -> None:
    async def main() -> str:
        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def one() -> None:
            async with open_run(config(batch_size=1), directory=repo) as run:
                async for event in run:
                    if isinstance(event, events.RolloutStarted) and not started.done():
                        started.set_result(run.id)

        task = asyncio.create_task(one())
        run_id = await started
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return run_id

    run_id = asyncio.run(main())
    with RunStore.open(repo, create=False) as store:
        assert store.find_run(run_id).status == "interrupted"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mcp": "nowhere"}, "there is no"),
        ({"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"eval_fn": ["nothing"]}, "nothing"),
        ({"model": "offline/nobody"}, "offline/nobody"),
        ({"resume_run": "nothing"}, "nothing"),
    ],
)
def test_what_cannot_start_says_so(repo: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(StartError, match=message):
        osmosis_ai.run(config(**options), directory=repo)


def test_variables_of_the_run_reach_workers_and_not_this_process(repo: Path) -> None:
    (repo / ".env").write_text("FROM_FILE=file\n", encoding="utf-8")
    rewards = repo / "reward_fn" / "rewards.py"
    check = "os.environ.get('FROM_FILE') == 'file' and os.environ.get('GIVEN') == 'given'"
    rewards.write_text(f"import os\n{REWARD}".replace("solution_str.strip() == ground_truth", check), encoding="utf-8")
    report = osmosis_ai.run(config(), directory=repo, environ={"GIVEN": "given", "PATH": ""})
    assert mean(report) == 1.0
    import os

    assert "FROM_FILE" not in os.environ
