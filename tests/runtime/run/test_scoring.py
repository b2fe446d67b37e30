"""Scoring with real workers: live and stored rollouts, conversations of no run, and faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from osmosis_ai.config import LimitsConfig
from osmosis_ai.errors import StoreError
from osmosis_ai.masking import MASK, Masker
from osmosis_ai.records import Failure, FunctionRef, Rollout, Row, Score, StoredInput
from osmosis_ai.runtime.pool.backends import open_pool
from osmosis_ai.runtime.pool.base import Pool, PoolOptions
from osmosis_ai.runtime.protocol import ScoreJob
from osmosis_ai.runtime.run import scoring as scoring_module
from osmosis_ai.runtime.run.prepare import scorer_spec
from osmosis_ai.runtime.run.scoring import Scored, Scoring, rescore, score_conversations
from osmosis_ai.store.reading import ScoringReader
from osmosis_ai.store.run_store import RunStore

LENGTH = """
def length(solution_str, ground_truth, extra_info):
    return len(solution_str)
"""
FATAL = """
import os

def fatal(solution_str, ground_truth, extra_info):
    if extra_info["row_index"] == 2:
        os._exit(3)
    return 1.0
"""
LATE = Failure("timeout", "the rollout took too long", "rollout")
BROKEN = Failure("tool", "it broke", "exception")


class Listener:
    """Keeps the values of each row, in the order of the functions."""

    def __init__(self) -> None:
        self.values: dict[int, list[float | None]] = {}

    def scores_done(self, scored: list[Scored]) -> None:
        for rollout, scores in scored:
            self.values[rollout.row_index] = [score.value for score in scores]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "lengths.py").write_text(LENGTH, encoding="utf-8")
    (tmp_path / "fatals.py").write_text(FATAL, encoding="utf-8")
    return tmp_path


def refs(repo: Path, *names: str) -> list[FunctionRef]:
    return [FunctionRef(name, f"{name}s", name, str(repo), file=f"{name}s.py") for name in names]


@asynccontextmanager
async def workers(repo: Path, *functions: str) -> AsyncIterator[Pool]:
    spec = scorer_spec(repo, refs(repo, *functions), LimitsConfig())
    async with open_pool(spec, PoolOptions(workers=1)) as pool:
        yield pool


async def save(
    store: RunStore, run: str, index: int, failure: Failure | None = None, text: str | None = None
) -> tuple[int, Rollout]:
    said = "x" * index if text is None else text
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    rollout = Rollout(f"r{index}", index, f"row{index}", 0, "policy", messages, "stop", 1.0, failure)
    return await store.save_rollout(run, rollout, Row(index, f"row{index}", "", "?", "42")), rollout


def stored(store: RunStore, *keys: int) -> list[StoredInput]:
    with closing(ScoringReader(store.path)) as reader:
        return reader.read(keys)


def test_stored_rollouts_and_added_ones_are_scored_once(repo: Path) -> None:
    async def test() -> None:
        with RunStore.open(repo) as store:
            run = await store.create_run("eval", identity={}, config={})
            before = [(await save(store, run, index))[0] for index in range(40)]
            async with workers(repo, "length") as pool:
                listener = Listener()
                functions = refs(repo, "length")
                scoring = Scoring(run, pool, store, listener, functions, repo, pytest.fail, partial=True, room=256)
                stored = list(scoring.stored())
                assert [unscored.key for unscored in stored] == before
                async with anyio.create_task_group() as group:
                    group.start_soon(scoring.run, iter(stored), 3)
                    for index in range(40, 80):
                        failure = {50: BROKEN, 60: LATE}.get(index)
                        await scoring.add(*await save(store, run, index, failure))
                    scoring.complete()
                assert listener.values == {index: [] if index == 50 else [float(index)] for index in range(80)}
                recorded = {o.row_index: [s.value for s in o.scores.values()] for o in store.outcomes(run)}
                assert recorded == listener.values
                again = Listener()
                await rescore(run, pool, store, again, refs(repo, "length"), repo)
                assert again.values == {}

    asyncio.run(test())


class Far:
    """A pool that answers late, as the node of a cluster does."""

    def __init__(self, pool: Pool) -> None:
        self.loaded = pool.loaded
        self.sizes: list[int] = []
        self._pool = pool

    async def score(self, job: ScoreJob) -> list[list[Score]]:
        self.sizes.append(len(job.inputs))
        await anyio.sleep(0.1)
        return await self._pool.score(job)


def test_fast_functions_get_large_batches_though_the_pool_answers_late(repo: Path) -> None:
    async def test() -> None:
        with RunStore.open(repo) as store:
            run = await store.create_run("eval", identity={}, config={})
            for index in range(100):
                await save(store, run, index)
            async with workers(repo, "length") as pool:
                far, listener = Far(pool), Listener()
                await rescore(run, far, store, listener, refs(repo, "length"), repo)  # type: ignore[arg-type]
        assert listener.values == {index: [float(index)] for index in range(100)}
        # One of each slot before the first answer, and then all others.
        assert far.sizes[:4] == [1, 1, 1, 1]
        assert len(far.sizes) < 10

    asyncio.run(test())


def test_a_function_that_ends_its_worker_costs_its_own_score_of_that_rollout(repo: Path) -> None:
    async def test() -> None:
        with RunStore.open(repo) as store:
            run = await store.create_run("eval", identity={}, config={})
            keys = [(await save(store, run, index))[0] for index in range(4)]
            async with workers(repo, "fatal", "length") as pool:
                scores = await pool.score(ScoreJob("job", stored(store, *keys), ["fatal", "length"]))
        assert [[score.value for score in its] for its in scores] == [[1, 0], [1, 1], [None, 2], [1, 3]]
        failure = scores[2][0].failure
        assert failure is not None
        assert (failure.origin, failure.kind, failure.file) == ("reward", "died", "fatals.py")

    asyncio.run(test())


def test_a_damaged_record_is_an_error_and_costs_no_worker(repo: Path) -> None:
    async def test() -> None:
        with RunStore.open(repo) as store:
            run = await store.create_run("eval", identity={}, config={})
            (given,) = stored(store, (await save(store, run, 5))[0])
            async with workers(repo, "length") as pool:
                for damaged in (replace(given, row=b"x"), replace(given, trajectory=b'{"messages": 1}')):
                    for inputs in ([damaged], [given, damaged]):
                        with pytest.raises(StoreError, match="the record of row 5 is damaged"):
                            await pool.score(ScoreJob("damaged", inputs, ["length"]))
                ((score,),) = await pool.score(ScoreJob("there", [given], ["length"]))
                assert score.value == 5

    asyncio.run(test())


def test_a_conversation_that_is_too_large_fails_alone_and_jobs_stay_small(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_module, "MAX_INPUT", 4000)
    monkeypatch.setattr(scoring_module, "JOB_BYTES", 1000)
    sent: list[int] = []

    async def test() -> dict[int, list[float | None]]:
        with RunStore.open(repo) as store:
            run = await store.create_run("eval", identity={}, config={})
            for index in range(8):
                # Random text isn't compressed away.
                await save(store, run, index, text=random.Random(index).randbytes(4000 if index == 3 else 300).hex())
            async with workers(repo, "length") as pool:
                score = pool.score

                async def counted(job: ScoreJob) -> list[list[Score]]:
                    sent.append(len(job.inputs))
                    return await score(job)

                monkeypatch.setattr(pool, "score", counted)
                listener = Listener()
                await rescore(run, pool, store, listener, refs(repo, "length"), repo)
                (failed,) = [outcome for outcome in store.outcomes(run) if outcome.row_index == 3]
                assert failed.scores["length"].failure is not None
                assert "too large to be scored: " in failed.scores["length"].failure.message
            return listener.values

    assert asyncio.run(test()) == {index: [None if index == 3 else 600.0] for index in range(8)}
    assert sum(sent) == 7
    assert max(sent) < 4


def test_conversations_of_no_run_are_scored_with_known_keys_masked(repo: Path) -> None:
    async def test() -> None:
        async with workers(repo, "length") as pool:
            row = Row(0, "row", "", "?", "42")
            said = [(row, [{"role": "assistant", "content": text}]) for text in ("", "abc", "sk-secret")]
            scores = await score_conversations(pool, Masker(["sk-secret"]), said, ["length"])
            assert [[score.value for score in its] for its in scores] == [[0], [3], [len(MASK)]]

    asyncio.run(test())
