"""Runs from Python: one call, events, concurrent runs, and the remains of an interrupted run."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import osmosis_ai
from osmosis_ai import Report, RunConfig, StartError, open_run
from osmosis_ai.errors import DatasetError, StoreError
from osmosis_ai.runtime.run import events
from osmosis_ai.runtime.run.events import RunEvent
from osmosis_ai.runtime.run.session import RunSession, run_environment
from osmosis_ai.store.queries import Queries
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


def status(repo: Path, run_id: str) -> str:
    with RunStore.open(repo, create=False) as store:
        return store.find_run(run_id).status


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
        events.Waiting,
        events.Notice,
        events.RunLoaded,
        events.Waiting,
        events.RunStarted,
        events.RolloutStarted,
        events.TurnDone,
        events.RolloutDone,
        events.RolloutScored,
    ]
    waits = [event.what for event in told if isinstance(event, events.Waiting)]
    assert waits == ["loading tools from mcp/main.py", "asking offline/oracle for a first reply"]
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
    assert status(repo, run_id) == "interrupted"
    report = osmosis_ai.run(config(resume_run=run_id), directory=repo)
    assert report.run_id == run_id
    assert report.whole


def test_a_run_that_is_never_iterated_is_interrupted(repo: Path) -> None:
    async def open_only() -> str:
        async with open_run(config(), directory=repo) as run:
            return run.id

    run_id = asyncio.run(open_only())
    assert status(repo, run_id) == "interrupted"


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
    assert status(repo, run_id) == "interrupted"


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


def test_a_run_tells_what_it_knew_before_anyone_listened(repo: Path) -> None:
    async def main() -> list[RunEvent]:
        async with open_run(config(limit=1), directory=repo) as run:
            return [event async for event in run]

    kinds = [type(event) for event in asyncio.run(main())]
    assert kinds.index(events.RunLoaded) < kinds.index(events.RunStarted) < kinds.index(events.RolloutScored)


def test_the_rest_runs_for_the_report_and_the_report_stays_the_same(repo: Path) -> None:
    async def main() -> tuple[Report, Report, list[RunEvent]]:
        async with open_run(config(), directory=repo) as run:
            async for event in run:
                if isinstance(event, events.RolloutStarted):
                    break
            return await run.report(), await run.report(), [event async for event in run]

    first, second, rest = asyncio.run(main())
    assert first is second
    assert first.whole
    assert sum(isinstance(event, events.RolloutScored) for event in rest) == 3


@pytest.mark.parametrize(("end", "done"), [("stop", 1), ("cancel", 0)])
def test_a_stopped_run_reports_what_is_done_and_can_be_resumed(repo: Path, end: str, done: int) -> None:
    async def main() -> Report:
        def listen(event: RunEvent) -> None:
            if isinstance(event, events.RolloutStarted):
                getattr(run, end)()

        async with open_run(config(batch_size=1), directory=repo, listener=listen) as run:
            report = await run.report()
            assert run.interrupted
            return report

    report = asyncio.run(main())
    assert (len(list(report.outcomes())), report.policy.missing, report.whole) == (done, 3 - done, False)
    assert status(repo, report.run_id) == "interrupted"

    heard: list[RunEvent] = []
    again = osmosis_ai.run(config(resume=True), directory=repo, listener=heard.append)
    assert (again.run_id, again.whole) == (report.run_id, True)
    (started,) = [event for event in heard if isinstance(event, events.RunStarted)]
    assert (started.total_rollouts, started.recorded) == (3, done)


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_a_run_that_is_stopped_before_it_starts_runs_nothing(repo: Path, end: str) -> None:
    async def main() -> Report:
        async with open_run(config(), directory=repo) as run:
            getattr(run, end)()
            return await run.report()

    report = asyncio.run(main())
    assert (list(report.outcomes()), report.policy.missing) == ([], 3)


def test_failed_rollouts_that_are_retried_do_not_count_as_done(repo: Path) -> None:
    solution = [{"tool": "add", "arguments": {"a": 1, "b": 2}}, "{{result[0].no_such_part}}"]
    wrong = json.dumps({"system_prompt": "Add.", "user_prompt": "1 + 2?", "solution": solution})
    (repo / "test_data.jsonl").write_text(ROW % 0 + wrong, encoding="utf-8")
    first = osmosis_ai.run(config(), directory=repo)
    assert (first.policy.passed, first.policy.failed) == (1, 1)

    async def again() -> int:
        async with open_run(config(retry_failed=True), directory=repo) as run:
            assert run.id == first.run_id
            return run.done_before

    assert asyncio.run(again()) == 1


def test_an_error_amid_the_run_is_raised_where_it_is_waited_for(repo: Path) -> None:
    async def main() -> str:
        async with open_run(config(), directory=repo) as run:
            shutil.rmtree(repo / ".osmosis")
            with pytest.raises(StoreError, match="removed or replaced"):
                async for _ in run:
                    pass
            with pytest.raises(StoreError):
                await run.report()
            return run.id

    # This process goes on, so nothing else would tell that the run doesn't.
    run_id = asyncio.run(main())
    copy = Queries(repo / ".osmosis" / f"recovered-{run_id}" / "runs.db")
    assert copy.find_run(run_id).status == "interrupted"


def test_rows_are_named_before_tools_where_both_are_broken(repo: Path) -> None:
    (repo / "mcp" / "main.py").write_text("raise ValueError('not today')", encoding="utf-8")
    (repo / "test_data.jsonl").write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"test_data\.jsonl, line 1"):
        osmosis_ai.run(config(), directory=repo)


def test_rows_have_their_place_in_the_file(repo: Path) -> None:
    async def main() -> tuple[range, list[int]]:
        async with open_run(config(offset=1, limit=5), directory=repo) as run:
            return run.rows, [outcome.row_index for outcome in (await run.report()).outcomes()]

    assert asyncio.run(main()) == (range(1, 3), [1, 2])


def test_an_interactive_run_without_a_rollout_leaves_no_run(repo: Path) -> None:
    async def main() -> None:
        async with RunSession.open(config(), repo, interactive=True) as run:
            await run.begin()
            with RunStore.open(repo, create=False) as store:
                assert store.find_run(run.id).config["interactive"] is True
            assert (await run.conclude()).interactive
            assert run.id == ""

    asyncio.run(main())
    with RunStore.open(repo, create=False) as store:
        assert store.list_runs(10) == []


def test_variables_come_from_the_caller_then_the_directory_then_the_repository(repo: Path) -> None:
    below = repo / "below"
    below.mkdir()
    (repo / ".env").write_text("A=root\nB=root\nC=root\n", encoding="utf-8")
    (below / ".env").write_text("A=below\nB=below\n", encoding="utf-8")
    judges = {"judge_model": "a-judge", "max_cost": 1.0}
    variables = run_environment(config(mcp="../mcp", **judges), below, {"A": "given"})
    assert [variables[name] for name in "ABC"] == ["given", "below", "root"]
    assert variables["OSMOSIS_JUDGE_MODEL"] == "a-judge"
