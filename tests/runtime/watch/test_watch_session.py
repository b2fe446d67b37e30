"""Each iteration brings the run up to date with the files, and redoes only what they make stale."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from osmosis_ai.config import RunConfig
from osmosis_ai.discovery.repository import find_repository
from osmosis_ai.errors import DatasetError, FunctionError, RepositoryError
from osmosis_ai.records import Rollout
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.protocol import RolloutJob
from osmosis_ai.runtime.run.plan import RunPlan
from osmosis_ai.runtime.run.results import ToolChanges
from osmosis_ai.runtime.run.scoring import Scored
from osmosis_ai.runtime.watch.changes import Stale, classify
from osmosis_ai.runtime.watch.session import Iteration, Rerun, WatchSession
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text
from repos import ADDING, EXACT, write_repo

pytestmark = pytest.mark.anyio

TOOLS, REWARDS, ROWS = "mcp/main.py", "reward_fn/rewards.py", "test_data.jsonl"


def rows(*sums: tuple[int, int], solved: bool = True) -> list[dict[str, Any]]:
    """Return rows whose solutions add with the tool, or that have only the answer."""
    made = []
    for a, b in sums:
        row = {"system_prompt": "s", "user_prompt": f"{a} + {b}?", "ground_truth": str(a + b)}
        solution = [{"tool": "add", "arguments": {"a": a, "b": b}}, "{{result[0]}}"]
        made.append({**row, "solution": solution} if solved else row)
    return made


class Listener:
    """Hears of nothing that matters here."""

    def rollout_started(self, job: RolloutJob) -> None:
        return None

    def rollout_done(self, rollout: Rollout) -> None:
        return None

    def scores_done(self, scored: list[Scored]) -> None:
        return None


class Watched:
    """A session, and saves in its repository."""

    def __init__(self, session: WatchSession, root: Path) -> None:
        self.session = session
        self.root = root

    async def save(self, **files: str) -> Iteration | None:
        """Save files by name (`tools`, `rewards`, `rows`), and iterate."""
        names = {"tools": TOOLS, "rewards": REWARDS, "rows": ROWS}
        for name, content in files.items():
            (self.root / names[name]).write_text(content, encoding="utf-8")
            self.session.mark_stale(classify(names[name], self.session.watched()))
        return await self.iterate([names[name] for name in files])

    async def save_rows(self, *sums: tuple[int, int]) -> Iteration | None:
        return await self.save(rows="".join(f"{json.dumps(row)}\n" for row in rows(*sums, solved=False)))

    async def iterate(self, trigger: list[str], again: Rerun = Rerun()) -> Iteration | None:  # noqa: B008 - frozen
        def listener(plan: RunPlan, recorded: int) -> Listener:
            return Listener()

        with anyio.fail_after(60):
            return await self.session.iterate(trigger, listener, again)

    def rewards(self) -> list[tuple[int, float | None]]:
        return [(outcome.row_index, outcome.reward) for outcome in self.session.outcomes()]


def session_of(
    root: Path, store: RunStore, group: TaskGroup, predecessor: WatchSession | None = None, **given: Any
) -> WatchSession:
    config = RunConfig.of(**{"model": "offline/oracle", **given})
    repository = find_repository("mcp", root)
    options = PoolOptions(workers=1, environ=dict(os.environ))
    arguments = (config, repository, root / ROWS, root, os.environ, store, options, group)
    return WatchSession(*arguments, predecessor=predecessor)


@asynccontextmanager
async def watching(folder: Path, *, solved: bool = True, **given: Any) -> AsyncIterator[Watched]:
    """Open a session on two rows, which its tool gets right; `given` are options of the run."""
    root = write_repo(folder / "repo", rows=rows((1, 2), (3, 4), solved=solved))
    with RunStore.open(root) as store:
        async with anyio.create_task_group() as group:
            watched = Watched(session_of(root, store, group, **given), root)
            yield watched
            watched.session.close()


def redone(iteration: Iteration | None) -> tuple[int, int]:
    assert iteration is not None
    return iteration.done.redone.rollouts, iteration.done.redone.scores


def flipped(iteration: Iteration | None) -> tuple[list[int], list[int]]:
    """Return the rows that pass now, and those that fail now."""
    assert iteration is not None
    changes = iteration.done.flipped
    return [flip.row_index for flip in changes.passed], [flip.row_index for flip in changes.failed]


async def test_new_scores_cost_no_rollout_and_new_tools_cost_all(tmp_path: Path) -> None:
    async with watching(tmp_path) as watched:
        first = await watched.iterate(["start"])
        assert first is not None
        assert (first.done.number, first.before, redone(first), flipped(first)) == (1, None, (2, 2), ([], []))

        strict = EXACT.replace("else 0.0", "else 0.0 if ground_truth else 0.5").replace("== ground_truth", '== "3"')
        second = await watched.save(rewards=strict)
        assert second is not None
        assert (redone(second), flipped(second), second.run_id) == ((0, 2), ([], [1]), first.run_id)
        assert second.before == first.report
        assert second.done.trigger == [REWARDS]

        third = await watched.save(tools=ADDING.replace("return a + b", "return 3"))
        assert third is not None
        # Another run: its rollouts are made by other code.
        assert (redone(third), flipped(third)) == ((2, 2), ([1], []))
        assert third.run_id != first.run_id
        assert watched.session.store.find_run(first.run_id).status == "finished"
        assert watched.rewards() == [(0, 1.0), (1, 1.0)]
        await watched.session.finish(interrupted=True)
        assert watched.session.store.find_run(third.run_id).status == "interrupted"


async def test_a_reload_that_changes_nothing_is_no_iteration(tmp_path: Path) -> None:
    async with watching(tmp_path) as watched:
        await watched.iterate(["start"])
        watched.session.mark_stale(Stale(tools=True, functions=True, dataset=True))
        assert await watched.iterate([TOOLS]) is None
        # The number counts what was shown.
        again = await watched.iterate(["r"], Rerun(everything=True))
        assert again is not None
        assert (again.done.number, redone(again), flipped(again)) == (2, (2, 2), ([], []))


async def test_rows_are_told_by_their_content_wherever_they_stand(tmp_path: Path) -> None:
    async with watching(tmp_path, solved=False) as watched:
        first = await watched.iterate(["start"])
        assert first is not None
        grown = await watched.save_rows((3, 4), (5, 6), (1, 2))
        assert grown is not None
        assert (redone(grown), grown.run_id, grown.report.policy.missing) == ((1, 1), first.run_id, 0)
        assert watched.rewards() == [(0, 1.0), (1, 1.0), (2, 1.0)]
        # Rows that are gone are not scored either.
        assert redone(await watched.save_rows((5, 6))) == (0, 0)
        assert redone(await watched.save(rewards=EXACT.replace("1.0", "0.5"))) == (0, 1)
        # They come back for a score, and the same row twice is two rows.
        assert redone(await watched.save_rows((1, 2), (5, 6))) == (0, 1)
        assert redone(await watched.save_rows((5, 6), (5, 6))) == (1, 1)
        assert watched.rewards() == [(0, 0.5), (1, 0.5)]


async def test_a_changed_solution_is_played_again_in_another_run(tmp_path: Path) -> None:
    async with watching(tmp_path) as watched:
        first = await watched.iterate(["start"])
        assert first is not None
        second = await watched.save_rows((1, 2), (3, 4))
        assert second is not None
        assert redone(second) == (2, 2)
        assert second.run_id != first.run_id


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"tools": "raise ValueError('not today')"}, RepositoryError),
        ({"tools": "from fastmcp import FastMCP\nmcp = FastMCP('empty')"}, RepositoryError),
        ({"rewards": "def broken(:"}, FunctionError),
        ({"rows": "nonsense\n"}, DatasetError),
    ],
)
async def test_what_is_broken_leaves_the_last_results_and_is_brought_up_to_date_once_mended(
    tmp_path: Path, broken: dict[str, str], error: type[Exception]
) -> None:
    async with watching(tmp_path) as watched:
        await watched.iterate(["start"])
        pool, results = watched.session.pool(), watched.rewards()
        (name,) = broken
        whole = {"tools": TOOLS, "rewards": REWARDS, "rows": ROWS}[name]
        mended = (watched.root / whole).read_text(encoding="utf-8")
        with pytest.raises(error):
            await watched.save(**broken)
        assert watched.session.pool() is pool
        assert watched.rewards() == results
        # Nothing needs to be run again, but the error that was shown is over.
        assert redone(await watched.save(**{name: mended})) == (0, 0)


async def test_failed_rollouts_alone_are_run_again_when_asked(tmp_path: Path) -> None:
    async with watching(tmp_path) as watched:
        await watched.save(tools=ADDING.replace("a + b", "3"))
        assert watched.rewards() == [(0, 1.0), (1, 0.0)]
        # A rollout that ended without error but with a low score counts as failed.
        assert redone(await watched.iterate(["f"], Rerun(failed=True))) == (1, 1)


PROCESS = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str.strip() == ground_truth else 0.0


@osmosis_reward
def effort(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 0.5
"""


async def test_a_flip_counts_for_its_function_although_another_never_reaches_the_threshold(tmp_path: Path) -> None:
    async with watching(tmp_path) as watched:
        first = await watched.save(rewards=PROCESS)
        assert first is not None
        assert (first.report.rows_below, first.prompts) == (0, {})
        second = await watched.save(tools=ADDING.replace("a + b", "3"))
        assert flipped(second) == ([], [])
        assert second is not None
        (name,) = second.done.flipped.functions
        (flip,) = second.done.flipped.functions[name].failed
        assert (name, flip.row_index, flip.before, flip.after) == ("reward_fn.rewards:exact", 1, 1.0, 0.0)
        assert [row.outcome.row_index for row in second.report.below] == [1]
        assert list(second.prompts.values()) == ["3 + 4?"]
        assert redone(await watched.iterate(["f"], Rerun(failed=True))) == (1, 2)


async def test_rows_that_fall_short_are_sampled_anew_and_keep_the_new_sample(tmp_path: Path) -> None:
    def script(request: Request) -> Reply:
        return text("3" if len(endpoint.chats) <= 2 else "7")

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        given = {"model": "scripted", "base_url": endpoint.url, "cache": True, "batch_size": 1}
        async with watching(tmp_path, **given) as watched:
            await watched.iterate(["start"])
            assert watched.rewards() == [(0, 1.0), (1, 0.0)]
            assert redone(await watched.iterate(["f"], Rerun(failed=True))) == (1, 1)
            assert watched.rewards() == [(0, 1.0), (1, 1.0)]
            asked = len(endpoint.chats)
            again = await watched.save(tools=f"{ADDING}# the same schemas\n")
            assert again is not None
            assert (redone(again), again.done.redone.cached_turns) == ((2, 2), 2)
            assert watched.rewards() == [(0, 1.0), (1, 1.0)]
            assert len(endpoint.chats) == asked


async def test_changed_tools_are_named(tmp_path: Path) -> None:
    async with watching(tmp_path) as watched:
        first = await watched.iterate(["start"])
        assert first is not None
        assert first.done.tools == ToolChanges([], [], [])
        more = ADDING.replace("def add(a: int", 'def other() -> str:\n    return ""\n\n\n@mcp.tool\ndef add(a: float')
        second = await watched.save(tools=more)
        assert second is not None
        assert (second.done.tools.added, second.done.tools.changed, second.done.tools.removed) == (
            ["other"],
            ["add"],
            [],
        )
        third = await watched.save(tools=ADDING)
        assert third is not None
        assert third.done.tools == ToolChanges(added=[], removed=["other"], changed=["add"])


async def test_a_session_with_other_settings_goes_on_from_its_predecessors_results(tmp_path: Path) -> None:
    async with watching(tmp_path) as watched, anyio.create_task_group() as group:
        await watched.save(tools=ADDING.replace("a + b", "3"))
        (watched.root / TOOLS).write_text(ADDING, encoding="utf-8")
        successor = Watched(session_of(watched.root, watched.session.store, group, watched.session), watched.root)
        iteration = await successor.iterate(["pyproject.toml"])
        assert iteration is not None
        assert (iteration.done.number, redone(iteration), flipped(iteration)) == (2, (2, 2), ([1], []))
        successor.session.close()
