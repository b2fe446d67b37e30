"""Records reported as written survive any end of the process, and queries find them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osmosis_ai.bounds import MAX_COUNT
from osmosis_ai.errors import StoreError
from osmosis_ai.masking import MASK, Masker
from osmosis_ai.records import (
    CallSummary,
    Failure,
    Logprobs,
    Outcome,
    Rollout,
    Row,
    Score,
    ScoringInput,
    SolutionCall,
    TokenIds,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Turn,
    Usage,
)
from osmosis_ai.store.codec import decode_scoring_input
from osmosis_ai.store.queries import PairedRow, RolloutFilter, RolloutKey
from osmosis_ai.store.reading import ScoringReader
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.store.schema import MIGRATIONS, migrate
from osmosis_ai.store.tables import (
    Columns,
    JudgePromptColumns,
    RolloutColumns,
    RowColumns,
    RunColumns,
    ScoreColumns,
    TrajectoryColumns,
    VerdictColumns,
)

RUN_ID = r"\d{8}-\d{6}-[0-9a-f]{4}"


def make_row(index: int = 0, **fields: object) -> Row:
    return Row(**{"index": index, "id": f"row{index}", "system_prompt": "system", "user_prompt": "user", **fields})


def make_rollout(index: int = 0, run_index: int = 0, policy: str = "policy", **fields: object) -> Rollout:
    defaults = {
        "id": f"{policy}.{index}.{run_index}",
        "row_index": index,
        "row_id": f"row{index}",
        "run_index": run_index,
        "policy": policy,
        "messages": [{"role": "user", "content": f"question {index}"}, {"role": "assistant", "content": "answer"}],
        "finish_reason": "stop",
        "duration_ms": 12.5,
    }
    return Rollout(**{**defaults, **fields})


FAILURE = Failure("tool", "it broke", "exception", "tools/a.py", 7, "Traceback …")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(tmp_path) as opened:
        yield opened


def new_run(store: RunStore, command: str = "eval", **identity: object) -> str:
    return asyncio.run(store.create_run(command, identity=identity, config={}))


def save(store: RunStore, run: str, *rollouts: Rollout, replace: bool = False) -> None:
    async def save_all() -> None:
        for rollout in rollouts:
            await store.save_rollout(run, rollout, make_row(rollout.row_index, id=rollout.row_id), replace=replace)

    asyncio.run(save_all())


def key_of(store: RunStore, run: str, rollout_id: str) -> int:
    with closing(sqlite3.connect(store.path)) as db:
        query = "SELECT rollouts.pk FROM rollouts JOIN runs ON run = runs.pk WHERE runs.id = ? AND rollouts.id = ?"
        (key,) = db.execute(query, (run, rollout_id)).fetchone()
    return int(key)


def score(store: RunStore, run: str, rollout_id: str, *scores: Score, code: dict[str, str] | None = None) -> None:
    asyncio.run(store.save_scores({key_of(store, run, rollout_id): scores}, code=code))


def stored(store: RunStore, run: str) -> list[Rollout]:
    return [found.stored.rollout for found in store.scored(run, with_trajectory=True)]


# What goes in comes out.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(), json_values, max_size=4)
counts = st.integers(0, MAX_COUNT)
milliseconds = st.floats(0, 1e12)
costs = st.none() | st.floats(0, 1e6)
usages = st.builds(Usage, counts, counts, counts)
failures = st.builds(
    Failure,
    st.sampled_from(["model", "tool", "reward", "rubric", "timeout", "worker", "dataset"]),
    st.text(),
    st.text(),
    st.none() | st.text(),
    st.none() | st.integers(1, 10**6),
    st.none() | st.text(),
)
alternatives = st.builds(TopLogprob, st.text(), st.floats(max_value=0, allow_infinity=False), st.none())
tokens = st.builds(
    TokenLogprob,
    st.text(),
    st.floats(max_value=0, allow_infinity=False),
    st.none() | st.lists(st.integers(0, 255), max_size=3),
    st.lists(alternatives, max_size=2),
)
token_ids = st.none() | st.lists(st.integers(0, 2**63 - 1), max_size=3)
turns = st.builds(
    Turn,
    index=st.integers(0, 100),
    finish_reason=st.text(),
    usage=usages,
    duration_ms=milliseconds,
    model=st.none() | st.text(),
    params=objects,
    logprobs=st.none() | st.builds(Logprobs, st.none() | st.lists(tokens, max_size=2)),
    token_ids=st.none() | st.builds(TokenIds, token_ids, token_ids),
    attempts=st.integers(1, 9),
    cost_usd=costs,
    cached=st.booleans(),
)
calls = st.builds(
    ToolCall,
    turn=st.integers(0, 100),
    id=st.text(),
    name=st.text(),
    arguments=st.text(),
    duration_ms=milliseconds,
    error=st.none() | st.text(),
    truncated_from=st.none() | counts,
    content=json_values,
)
solution_steps = st.text() | st.lists(st.builds(SolutionCall, st.text(), objects), max_size=2)
rows = st.builds(
    Row,
    index=counts,
    id=st.text(),
    system_prompt=st.text(),
    user_prompt=st.text(max_size=2000),
    ground_truth=st.none() | st.text(),
    extra=objects,
    solution=st.none()
    | st.lists(st.text() | st.lists(st.builds(SolutionCall, st.text(), objects), max_size=2), max_size=2),
)
rollouts = st.builds(
    Rollout,
    id=st.text(),
    row_index=st.just(0),
    row_id=st.just(""),
    run_index=st.integers(0, 1000),
    policy=st.text(),
    messages=st.lists(objects, max_size=4),
    finish_reason=st.sampled_from(["stop", "length", "max_turns", "max_tokens_total", "timeout", "error"]),
    duration_ms=milliseconds,
    failure=st.none() | failures,
    usage=usages,
    turns=st.lists(turns, max_size=2),
    tool_calls=st.lists(calls, max_size=2),
    samples=st.lists(turns, max_size=1),
    cost_usd=costs,
)
scores_of_functions = st.lists(
    st.builds(Score, st.text(), st.floats(allow_nan=False), st.none(), milliseconds, st.none() | st.text())
    | st.builds(Score, st.text(), st.none(), failures, milliseconds, st.none() | st.text()),
    max_size=3,
    unique_by=lambda score: score.function,
)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunStore]:
    with RunStore.open(tmp_path_factory.mktemp("shared")) as opened:
        yield opened


@given(row=rows, rollout=rollouts, scores=scores_of_functions)
@settings(deadline=None, max_examples=60)
def test_records_come_back_equal(shared_store: RunStore, row: Row, rollout: Rollout, scores: list[Score]) -> None:
    rollout = msgspec.structs.replace(rollout, row_index=row.index, row_id=row.id)

    async def write() -> tuple[str, int]:
        run = await shared_store.create_run("eval", identity={}, config={})
        key = await shared_store.save_rollout(run, rollout, row)
        await shared_store.save_scores({key: scores})
        return run, key

    run, its_key = asyncio.run(write())
    ((found, found_row, found_scores, _),) = shared_store.scored(run, with_trajectory=True)
    assert (found.rollout, found_row) == (rollout, row)
    assert list(found_scores.values()) == sorted(scores, key=lambda score: score.function.encode())
    assert (found.turns, found.tool_calls) == (len(rollout.turns), len(rollout.tool_calls))
    assert found.requests == sum(turn.attempts for turn in [*rollout.turns, *rollout.samples])
    assert found.finished_at - found.started_at == pytest.approx(rollout.duration_ms / 1000, abs=1e-3)
    (listed,) = shared_store.scored(run)
    assert listed.stored.rollout == msgspec.structs.replace(rollout, messages=[], turns=[], tool_calls=[], samples=[])
    with closing(ScoringReader(shared_store.path)) as reader:
        (stored,) = reader.read([its_key])
    scoring = ScoringInput(rollout.messages, row.ground_truth, row.index, row.extra, rollout.run_index)
    assert decode_scoring_input(stored) == scoring
    (outcome,) = shared_store.outcomes(run)
    assert outcome == Outcome(
        **{name: getattr(rollout, name) for name in Outcome.__struct_fields__ if name not in ("calls", "scores")},
        calls=[CallSummary(call.name, call.duration_ms, call.error) for call in rollout.tool_calls],
        scores={score.function: score for score in scores},
    )


def test_text_that_utf8_cannot_hold_does_not_cost_the_rollout(store: RunStore) -> None:
    run = new_run(store)
    broken = make_rollout(
        messages=[{"role": "tool", "content": "file \udcff \ud83d\ude00", "parts": [{"\udcfe": 2**80}]}],
        failure=Failure("tool", "no file \udcff"),
    )
    save(store, run, broken)
    (found,) = stored(store, run)
    assert found.messages == [{"role": "tool", "content": "file \ufffd \U0001f600", "parts": [{"\ufffd": 2**80}]}]
    assert found.failure == Failure("tool", "no file \ufffd")


def test_token_data_of_an_earlier_version_is_read_as_far_as_it_has_its_form(store: RunStore) -> None:
    run = new_run(store)
    turn = Turn(0, "stop", Usage(), 1.0)
    save(store, run, make_rollout(turns=[turn, turn]))
    as_stored = msgspec.to_builtins(turn)
    older = {
        "messages": [],
        "turns": [
            {**as_stored, "logprobs": "none", "token_ids": {"prompt_token_ids": [1], "token_ids": [-1]}},
            {**as_stored, "token_ids": [5]},
        ],
        "tool_calls": [],
        "samples": [],
    }
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE trajectories SET data = ?", (json.dumps(older).encode(),))
    (found,) = stored(store, run)
    assert [turn.token_ids for turn in found.turns] == [TokenIds([1]), TokenIds(token_ids=[5])]
    assert found.turns[0].left_out == {
        "logprobs": "Expected `object`, got `str`",
        "token_ids": "Expected `int` >= 0 - at `$[0]`",
    }
    assert found.turns[1].left_out == {}


def test_large_trajectories_are_stored_compressed(store: RunStore) -> None:
    run = new_run(store)
    large = make_rollout(messages=[{"role": "tool", "content": "word " * 400_000}])
    save(store, run, large)
    assert stored(store, run) == [large]
    store.close()
    assert store.path.stat().st_size < 500_000


def test_what_is_no_json_is_an_error_that_says_so(store: RunStore) -> None:
    run = new_run(store)
    with pytest.raises(StoreError, match="isn't JSON"):
        save(store, run, make_rollout(messages=[{"role": "tool", "content": object()}]))


# Runs.


def test_a_run_from_beginning_to_end(store: RunStore) -> None:
    run = asyncio.run(store.create_run("eval", identity={"model": "m"}, config={"n": 2}))
    begun = store.find_run(run)
    assert (begun.command, begun.status, begun.identity, begun.config) == ("eval", "running", {"model": "m"}, {"n": 2})
    assert (begun.finished_at, begun.summary, begun.alive) == (None, None, True)
    save(store, run, make_rollout(0), make_rollout(1, failure=FAILURE))
    asyncio.run(store.mark(run, "finished", {"mean": 0.5}))
    ended = store.find_run(run)
    assert (ended.status, ended.summary, ended.alive) == ("finished", {"mean": 0.5}, False)
    assert (ended.rollouts, ended.failed) == (2, 1)
    assert ended.finished_at is not None
    assert ended.finished_at >= ended.created_at
    asyncio.run(store.mark(run, "interrupted"))
    assert store.find_run(run).summary == {"mean": 0.5}


def test_runs_are_listed_newest_first_and_found_by_the_beginning_of_their_id(store: RunStore) -> None:
    with pytest.raises(StoreError, match="has no runs yet"):
        store.find_run("latest")
    ids = [new_run(store) for _ in range(30)]
    assert [run.id for run in store.list_runs(30)] == ids[::-1]
    assert len(store.list_runs(7)) == 7
    assert len(set(ids)) == 30
    assert [run_id[:15] for run_id in ids] == sorted(run_id[:15] for run_id in ids)
    assert store.find_run("latest").id == ids[-1]
    assert store.find_run(ids[4]).id == ids[4]
    with pytest.raises(StoreError, match=f"several runs begin with '2': {RUN_ID}(, {RUN_ID})+, …; give more"):
        store.find_run("2")
    for name in ("nope", "", "%", "*"):
        with pytest.raises(StoreError, match="there is no run"):
            store.find_run(name)


def test_a_run_is_found_by_a_prefix_of_its_id(store: RunStore) -> None:
    run = new_run(store)
    assert store.find_run(run[:-1]).id == run


def test_unknown_runs_and_rollouts_are_errors(store: RunStore) -> None:
    run = new_run(store)
    for attempt in (
        lambda: save(store, "nope", make_rollout()),
        lambda: asyncio.run(store.mark("nope", "finished")),
        lambda: asyncio.run(store.delete_run("nope")),
        lambda: asyncio.run(store.resume_run("nope")),
        lambda: list(store.scored("nope")),
        lambda: list(store.outcomes("nope")),
        lambda: store.completed_keys("nope"),
        lambda: list(store.paired_scores(run, "nope", "f")),
    ):
        with pytest.raises(StoreError, match="there is no run 'nope'"):
            attempt()
    with pytest.raises(StoreError, match="while saving the scores of 1 rollout"):
        asyncio.run(store.save_scores({7: [Score("f", 1.0)]}))
    with closing(ScoringReader(store.path)) as reader, pytest.raises(StoreError, match="a rollout was removed"):
        reader.read([7])


def test_deleting_a_run_removes_all_of_it_and_nothing_else(store: RunStore) -> None:
    kept, gone = new_run(store), new_run(store)
    noise = random.Random(1)
    for run in (kept, gone):
        for index in range(50):
            content = "".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
            save(store, run, make_rollout(index, messages=[{"role": "tool", "content": content}]))
            score(store, run, make_rollout(index).id, Score("f", 1.0))
    before = stored(store, kept)
    asyncio.run(store.delete_run(gone))
    with pytest.raises(StoreError, match="there is no run"):
        store.find_run(gone)
    assert stored(store, kept) == before
    store.close()
    with closing(sqlite3.connect(store.path)) as db:
        for table in ("rows", "rollouts", "trajectories", "scores"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (50,)
        assert db.execute("PRAGMA freelist_count").fetchone() == (0,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# No rollout twice.


def test_a_rollout_cannot_be_recorded_twice(store: RunStore) -> None:
    run = new_run(store)
    first = make_rollout(3)
    save(store, run, first)
    for same_key in (first, make_rollout(3, id="another")):
        with pytest.raises(StoreError, match="saving rollout"):
            save(store, run, same_key)
    assert stored(store, run) == [first]
    assert store.find_run(run).rollouts == 1
    save(store, run, make_rollout(3, run_index=1), make_rollout(3, policy="baseline"))
    assert len(stored(store, run)) == 3


def test_a_replaced_rollout_takes_its_scores_along(store: RunStore) -> None:
    run = new_run(store)
    failed, again = make_rollout(3, failure=FAILURE), make_rollout(3, id="again")
    save(store, run, failed, make_rollout(4))
    score(store, run, failed.id, Score("f", 0.0))
    assert store.find_run(run).failed == 1
    save(store, run, again, make_rollout(5), replace=True)
    assert stored(store, run) == [again, make_rollout(4), make_rollout(5)]
    assert [(found.stored.attempt, found.scores) for found in store.scored(run)] == [(2, {}), (1, {}), (1, {})]
    assert (store.find_run(run).rollouts, store.find_run(run).failed) == (3, 0)


def test_one_refused_record_does_not_cost_the_others_of_its_batch(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout(7))

    async def write_together() -> list[BaseException | int]:
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            # While another connection holds the lock, everything gathers behind the first write.
            other.execute("BEGIN IMMEDIATE")
            tasks = [
                asyncio.create_task(store.save_rollout(run, make_rollout(index), make_row(index)))
                for index in (0, 1, 7, 2, 3)
            ]
            await asyncio.sleep(0)
            other.execute("COMMIT")
            return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(write_together())
    assert [type(result) for result in results] == [int, int, StoreError, int, int]
    assert [rollout.row_index for rollout in stored(store, run)] == [0, 1, 2, 3, 7]


def test_who_stops_waiting_does_not_undo_the_write(store: RunStore) -> None:
    run = new_run(store)

    async def cancelled() -> None:
        task = asyncio.create_task(store.save_rollout(run, make_rollout(1), make_row(1)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.save_rollout(run, make_rollout(2), make_row(2))

    asyncio.run(cancelled())
    assert len(stored(store, run)) == 2


def test_closing_writes_what_is_waiting(tmp_path: Path) -> None:
    async def close_at_once() -> tuple[str, list[None]]:
        store = RunStore.open(tmp_path)
        run = await store.create_run("eval", identity={}, config={})
        tasks = [
            asyncio.create_task(store.save_rollout(run, make_rollout(index), make_row(index))) for index in range(300)
        ]
        await asyncio.sleep(0)
        store.close()
        store.close()
        with pytest.raises(StoreError, match="after the store was closed"):
            await store.mark(run, "finished")
        return run, await asyncio.gather(*tasks)

    run, results = asyncio.run(close_at_once())
    assert len(set(results)) == 300
    with RunStore.open(tmp_path) as store:
        assert len(store.completed_keys(run).keys) == 300


# Looking back.


def test_rollouts_stream_in_order_page_by_page(store: RunStore) -> None:
    run, other = new_run(store), new_run(store)
    keys = [(index, n, policy) for index in range(300) for n in range(2) for policy in ("baseline", "policy")]
    shuffled = random.Random(0).sample(keys, len(keys))

    async def fill() -> None:
        await asyncio.gather(*(store.save_rollout(run, make_rollout(*key), make_row(key[0])) for key in shuffled))
        await store.save_rollout(other, make_rollout(5), make_row(5))

    asyncio.run(fill())
    for with_trajectory in (False, True):
        found = [f.stored.rollout for f in store.scored(run, with_trajectory=with_trajectory)]
        assert [(r.row_index, r.run_index, r.policy) for r in found] == keys
        assert bool(found[0].messages) is with_trajectory
    assert [(o.row_index, o.run_index, o.policy) for o in store.outcomes(run)] == keys
    one_row = [f.stored.rollout.id for f in store.scored(run, RolloutFilter(row=5))]
    assert one_row == ["baseline.5.0", "policy.5.0", "baseline.5.1", "policy.5.1"]
    assert list(store.scored(run, RolloutFilter(row=300))) == []
    unscored = [(found.row_index, *found.rollout) for found in store.unscored(run, {"f": None})]
    assert unscored == [(index, policy, f"row{index}", n) for index, n, policy in keys]


def test_lists_and_statistics_never_read_trajectories(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout(0), make_rollout(1, failure=FAILURE))
    score(store, run, "policy.0.0", Score("f", 1.0))
    with closing(sqlite3.connect(store.path)) as db:
        db.execute("DROP TABLE trajectories")
    assert len(list(store.scored(run))) == len(list(store.outcomes(run))) == 2
    assert len(store.list_runs()) == len(store.function_totals(run)) == 1
    assert len(store.completed_keys(run).keys) == 2
    assert len(list(store.paired_scores(run, run, "f"))) == 2
    with pytest.raises(StoreError, match="no such table"):
        stored(store, run)


def test_a_slow_reader_holds_up_nobody(store: RunStore) -> None:
    run = new_run(store)

    async def read_while_writing() -> list[int]:
        for index in range(40):
            await store.save_rollout(run, make_rollout(index), make_row(index))
        reader = store.scored(run, with_trajectory=True)
        seen = [next(reader).stored.rollout.row_index]
        # An open read transaction would keep the log from being emptied.
        with closing(sqlite3.connect(store.path)) as db:
            assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        await store.save_rollout(run, make_rollout(40), make_row(40))
        return seen + [found.stored.rollout.row_index for found in reader]

    assert asyncio.run(read_while_writing()) == list(range(41))


def test_completed_keys_tell_what_is_done_and_what_failed(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout(0), make_rollout(1, failure=FAILURE), make_rollout(1, policy="baseline"))
    completed = store.completed_keys(run)
    assert completed.keys == {
        RolloutKey("policy", "row0", 0),
        RolloutKey("policy", "row1", 0),
        RolloutKey("baseline", "row1", 0),
    }
    assert completed.failed == {("policy", "row1", 0)}


def test_scores_are_replaced_and_told_apart_by_function(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout(0), make_rollout(1))
    problem = Score("b", failure=Failure("reward", "not a number", "not_finite", "reward_fn/b.py", 3), duration_ms=1.5)
    score(store, run, "policy.0.0", Score("a", 0.25, explanation="so so"), problem)
    score(store, run, "policy.1.0", Score("a", 1.0), code={"a": "hash"})
    score(store, run, "policy.0.0", Score("a", 0.5), code={"a": "hash", "b": "unused"})
    assert [outcome.scores for outcome in store.outcomes(run)] == [
        {"a": Score("a", 0.5), "b": problem},
        {"a": Score("a", 1.0)},
    ]
    assert [(total.function, total.code) for total in store.function_totals(run)] == [("a", ["hash"]), ("b", [])]
    assert store.functions(run) == ["a", "b"]


@pytest.mark.parametrize("neither_or_both", [Score("f"), Score("f", 1.0, FAILURE), Score("f", float("nan"))])
def test_a_score_has_a_value_or_a_failure(store: RunStore, neither_or_both: Score) -> None:
    run = new_run(store)
    save(store, run, make_rollout())
    with pytest.raises(StoreError, match="saving the scores"):
        score(store, run, "policy.0.0", neither_or_both)


def test_outcomes_carry_all_scores_of_their_rollout(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, *(make_rollout(index) for index in range(1200)))
    for index in (0, 499, 500, 1199):
        score(store, run, f"policy.{index}.0", Score("a", 1.0), Score("b", failure=FAILURE), Score("c", index / 2))
    found = {outcome.row_index: outcome.scores for outcome in store.outcomes(run)}
    assert list(found) == list(range(1200))
    assert {index: scores for index, scores in found.items() if scores} == {
        index: {"a": Score("a", 1.0), "b": Score("b", failure=FAILURE), "c": Score("c", index / 2)}
        for index in (0, 499, 500, 1199)
    }


def test_only_rollouts_that_lack_a_score_are_scored_again(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, *(make_rollout(index) for index in range(4)))
    score(store, run, "policy.0.0", Score("a", 1.0), Score("b", 1.0), code={"a": "new", "b": "new"})
    score(store, run, "policy.1.0", Score("a", 1.0), Score("b", 1.0), code={"a": "old", "b": "new"})
    score(store, run, "policy.2.0", Score("a", 1.0), code={"a": "new"})

    def lacking(without: dict[str, str | None]) -> dict[int, list[str]]:
        return {found.row_index: found.functions for found in store.unscored(run, without)}

    assert lacking({"a": "new", "b": "new"}) == {1: ["a"], 2: ["b"], 3: ["a", "b"]}
    assert lacking({"a": None}) == {3: ["a"]}
    assert lacking({"a": "new"}) == {1: ["a"], 3: ["a"]}
    assert lacking({"c": None}) == {index: ["c"] for index in range(4)}
    assert lacking({}) == {}


def test_rollouts_that_ran_out_of_time_are_scored_when_that_is_asked_for(store: RunStore) -> None:
    run = new_run(store)
    late = make_rollout(1, failure=Failure("timeout", "the rollout took too long", "rollout"))
    save(store, run, make_rollout(0), late, make_rollout(2, failure=FAILURE))
    assert [found.row_index for found in store.unscored(run, {"f": None})] == [0]
    assert [found.row_index for found in store.unscored(run, {"f": None}, partial=True)] == [0, 1]


def test_an_open_reader_sees_what_was_saved_later_and_holds_up_nobody(store: RunStore) -> None:
    run = new_run(store)
    with closing(ScoringReader(store.path)) as reader:
        for index in range(3):
            save(store, run, make_rollout(index))
            key = key_of(store, run, f"policy.{index}.0")
            assert [found.row_index for found in reader.read([key, key])] == [index, index]
            with closing(sqlite3.connect(store.path)) as db:
                assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)


def test_paired_scores_join_runs_on_the_rows_they_share(store: RunStore) -> None:
    a, b = new_run(store), new_run(store)
    save(store, a, *(make_rollout(index, n) for index in (0, 1, 2) for n in (0, 1)))
    # The same rows at other positions: rows are found by their id.
    save(store, b, *(make_rollout(index, row_id=f"row{index - 5}", policy="baseline") for index in (5, 7, 9)))
    for rollout_id, value in {"policy.0.0": 1.0, "policy.0.1": 0.5, "policy.2.0": 0.0, "policy.1.0": 1.0}.items():
        score(store, a, rollout_id, Score("f", value), Score("g", 9.0))
    score(store, b, "baseline.5.0", Score("f", 0.25))
    score(store, b, "baseline.7.0", Score("f", failure=FAILURE))
    assert list(store.paired_scores(a, b, "f", policy_b="baseline")) == [
        PairedRow(0, "row0", [1.0, 0.5], [0.25]),
        PairedRow(2, "row2", [0.0, None], [None]),
    ]
    assert list(store.paired_scores(a, b, "f")) == []
    save(store, a, make_rollout(0, policy="baseline"))
    assert list(store.paired_scores(a, a, "f", policy_b="baseline")) == [PairedRow(0, "row0", [1.0, 0.5], [None])]


# Resuming.


def test_unfinished_runs_of_a_command_are_listed_newest_first(store: RunStore) -> None:
    first, second, finished, another_command = new_run(store), new_run(store), new_run(store), new_run(store, "test")
    for run, status in (
        (first, "interrupted"),
        (second, "failed"),
        (finished, "finished"),
        (another_command, "failed"),
    ):
        asyncio.run(store.mark(run, status))
    assert [run.id for run in store.unfinished_runs("eval")] == [second, first]
    asyncio.run(store.resume_run(first))
    resumed = store.find_run(first)
    assert (resumed.status, resumed.finished_at) == ("running", None)
    # This process works on it.
    assert [run.id for run in store.unfinished_runs("eval")] == [second]


def test_the_names_that_differ_between_two_identities(store: RunStore) -> None:
    run = store.find_run(new_run(store, model="m", rows=[1, 2]))
    assert store.differences(run, {"model": "m", "rows": (1, 2)}) == {}
    assert store.differences(run, {"model": "x", "n": 1}) == {
        "model": ("m", "x"),
        "n": (None, 1),
        "rows": ([1, 2], None),
    }


CHILD = """
import asyncio, sys
from pathlib import Path
from osmosis_ai.records import *
from osmosis_ai.store.run_store import RunStore

def rollout(index):
    messages = [{"role": "tool", "content": f"{index} " * 1000}]
    row = Row(index, f"row{index}", "s", "u")
    return Rollout(f"r{index}", index, row.id, 0, "policy", messages, "stop", 1.0), row

async def main(root, begin, end):
    store = RunStore.open(root)
    run = await store.create_run("eval", identity={}, config={})
    print(run, flush=True)
    sys.stdin.readline()
    indices = iter(range(begin, end))
    async def produce():
        for index in indices:
            await store.save_rollout(run, *rollout(index))
            print(f"r{index}", flush=True)
    await asyncio.gather(*(produce() for _ in range(8)))
    store.close()

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
"""


def child(root: Path, begin: int, end: int, code: str = CHILD) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(begin), str(end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def send_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_run_that_a_living_process_writes_is_left_to_it(store: RunStore, tmp_path: Path) -> None:
    with child(tmp_path, 0, 0) as process:
        run = read_line(process)
        assert store.find_run(run).alive
        assert store.unfinished_runs("eval") == []
        for attempt in (store.resume_run, store.delete_run):
            with pytest.raises(StoreError, match=f"run {run} is being written by process {process.pid}"):
                asyncio.run(attempt(run))
        process.kill()
    (found,) = store.unfinished_runs("eval")
    assert (found.id, found.status, found.alive) == (run, "running", False)
    asyncio.run(store.resume_run(run))
    assert store.find_run(run).alive


def execute(store: RunStore, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute(statement, values)


def test_a_run_is_owned_by_its_writer_whatever_the_clock_says(store: RunStore, tmp_path: Path) -> None:
    with child(tmp_path, 0, 0) as process:
        run = read_line(process)
        # Set the clock, and all times that are derived from the boot time move with it.
        execute(store, "UPDATE runs SET owner_started = ?, created_at = created_at - 10 WHERE id = ?", 10.0, run)
        assert store.find_run(run).alive
        for attempt in (store.resume_run, store.delete_run):
            with pytest.raises(StoreError, match=f"run {run} is being written by process {process.pid}"):
                asyncio.run(attempt(run))
        process.kill()


FORKS = """
import asyncio, os, sys, time
from pathlib import Path
from osmosis_ai.store.run_store import RunStore

store = RunStore.open(Path(sys.argv[1]))
run = asyncio.run(store.create_run("eval", identity={}, config={}))
forked = os.fork()
if not forked:
    time.sleep(600)
print(run, flush=True)
print(forked, flush=True)
time.sleep(600)
"""


def test_a_fork_that_outlives_the_writer_does_not_keep_its_run(store: RunStore, tmp_path: Path) -> None:
    with child(tmp_path, 0, 0, FORKS) as process:
        run, forked = read_line(process), int(read_line(process))
        try:
            assert store.find_run(run).alive
            process.kill()
            process.wait()
            os.kill(forked, 0)
            assert not store.find_run(run).alive
            asyncio.run(store.resume_run(run))
        finally:
            os.kill(forked, signal.SIGKILL)


def test_an_ended_run_is_free_at_once_and_one_of_a_closed_store_too(store: RunStore, tmp_path: Path) -> None:
    ended, left = new_run(store), new_run(store)
    asyncio.run(store.mark(ended, "interrupted"))
    resume = "asyncio.run(RunStore.open(Path(sys.argv[1])).resume_run(sys.argv[2]))"
    code = f"import asyncio, sys\nfrom pathlib import Path\nfrom osmosis_ai.store.run_store import RunStore\n{resume}"

    def resumed(run: str) -> bool:
        command = [sys.executable, "-c", code, str(tmp_path), run]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    assert [resumed(ended), resumed(left)] == [True, False]
    # Another store of this process neither gives the run up nor keeps it.
    RunStore.open(tmp_path).close()
    assert store.find_run(left).alive
    store.close()
    assert not store.find_run(left).alive
    assert resumed(left)


def make_older(store: RunStore, version: int) -> None:
    """Give a store the form that an earlier version wrote."""
    for table in ("verdicts", "judge_prompts"):
        execute(store, f"DROP TABLE {table}")
    if version < 2:
        execute(store, "CREATE INDEX runs_created ON runs (created_at)")
    execute(store, f"PRAGMA user_version = {version}")


def test_a_run_without_a_lock_file_was_killed(store: RunStore, tmp_path: Path) -> None:
    """As written by earlier versions, which compared process times."""
    run = new_run(store)
    store.close()
    (tmp_path / ".osmosis" / "runs.lock").unlink()
    make_older(store, 1)
    execute(store, "UPDATE runs SET owner_pid = ?, owner_started = 1.0", os.getpid())
    with RunStore.open(tmp_path) as opened:
        found = opened.find_run(run)
        assert (found.status, found.alive) == ("running", False)
        asyncio.run(opened.resume_run(run))
        assert opened.find_run(run).alive


def test_the_newest_run_is_the_one_made_last_also_after_the_clock_went_back(store: RunStore) -> None:
    first, second = new_run(store), new_run(store)
    execute(store, "UPDATE runs SET created_at = created_at - 86400 WHERE id = ?", second)
    asyncio.run(store.mark(first, "interrupted"))
    asyncio.run(store.mark(second, "interrupted"))
    assert store.find_run("latest").id == second
    assert [run.id for run in store.list_runs()] == [second, first]
    assert [run.id for run in store.unfinished_runs("eval")] == [second, first]


def test_two_processes_write_two_runs_at_once(tmp_path: Path) -> None:
    with child(tmp_path, 0, 500) as first, child(tmp_path, 500, 1000) as second:
        runs = [read_line(first), read_line(second)]
        for process in (first, second):
            send_line(process)
        reported = [process.communicate(timeout=120)[0].split() for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0)
    with RunStore.open(tmp_path) as store:
        for run, ids, start in zip(runs, reported, (0, 500), strict=True):
            found = stored(store, run)
            assert [rollout.id for rollout in found] == [f"r{index}" for index in range(start, start + 500)]
            assert {rollout.id for rollout in found} == set(ids)
            assert found[7].messages == [{"role": "tool", "content": f"{start + 7} " * 1000}]


@pytest.mark.parametrize("seed", range(6))
def test_what_was_reported_survives_the_process(tmp_path: Path, seed: int) -> None:
    moment = random.Random(seed).randint(1, 400)
    with child(tmp_path, 0, 100_000) as process:
        run = read_line(process)
        send_line(process)
        reported = [read_line(process) for _ in range(moment)]
        os.kill(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        # What it had written to the pipe before it died; the last line may have been cut short.
        reported += [line.strip() for line in process.stdout if line.endswith("\n")]
    assert process.returncode == -signal.SIGKILL
    assert len(reported) >= moment
    with RunStore.open(tmp_path) as store:
        found = {rollout.id: rollout for rollout in stored(store, run)}
        assert set(reported) <= set(found)
        assert store.find_run(run).rollouts == len(found)
        for rollout in found.values():
            assert rollout.messages == [{"role": "tool", "content": f"{rollout.row_index} " * 1000}]
        # The store takes the rest of the run.
        asyncio.run(store.resume_run(run))
        save(store, run, make_rollout(100_000))
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# Nothing that is a key.


def test_known_keys_are_masked_in_everything_written(tmp_path: Path) -> None:
    key, pin = "sk-very-secret", "4242424242"
    leak = Failure("tool", f"refused {key}", "exception", f"/x/{key}.py", 1, f"key={key}")
    call = ToolCall(0, "c", key, f'{{"k": "{key}"}}', 1.0, content={"env": {key: [key]}})
    rollout = make_rollout(
        messages=[{"role": "tool", "content": f"{key} {pin} " * 200, "number": int(pin)}],
        failure=leak,
        tool_calls=[call],
        turns=[Turn(0, "stop", Usage(), 1.0, params={"extra": key})],
    )
    row = make_row(user_prompt=f"my key is {key}", extra={"k": key})
    with RunStore.open(tmp_path, masker=Masker([key, pin])) as store:

        async def write() -> str:
            run = await store.create_run(f"eval {key}", identity={"url": f"http://{key}@h"}, config={"k": [key]})
            saved = await store.save_rollout(run, rollout, row)
            problem = Score("g", failure=leak)
            await store.save_scores({saved: [Score("f", 1.0, explanation=f"saw {key}"), problem]})
            await store.mark(run, "failed", {"error": key})
            return run

        run = asyncio.run(write())
        (whole,) = store.scored(run, with_trajectory=True)
        found = whole.stored.rollout
        everything = [store.find_run(run), whole, *store.outcomes(run)]
        assert key not in repr(everything)
        assert found.messages == [{"role": "tool", "content": f"{MASK} {MASK} " * 200, "number": int(pin)}]
        assert whole.row.extra == {"k": MASK}
        assert found.tool_calls[0].content == {"env": {MASK: [MASK]}}
        # An identity with a key in it is still the same identity.
        assert store.differences(store.find_run(run), {"url": f"http://{key}@h"}) == {}
        assert list(store.differences(store.find_run(run), {"url": "http://h"})) == ["url"]
        files = [path.read_bytes() for path in store.path.parent.iterdir()]
    assert not any(key.encode() in data for data in files)


# The file.


def test_the_folder_ignores_itself_in_git(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    RunStore.open(tmp_path).close()
    status = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, check=True, capture_output=True)
    assert status.stdout == b""
    (tmp_path / ".osmosis" / ".gitignore").write_text("mine\n", encoding="utf-8")
    RunStore.open(tmp_path).close()
    assert (tmp_path / ".osmosis" / ".gitignore").read_text(encoding="utf-8") == "mine\n"


def test_no_store_is_made_for_looking_at_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there are no runs"):
        RunStore.open(tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []
    RunStore.open(tmp_path).close()
    RunStore.open(tmp_path, create=False).close()


def test_a_store_may_be_made_by_several_at_the_same_time(tmp_path: Path) -> None:
    roots = [tmp_path / str(number) for number in range(40)]
    for root in roots:
        root.mkdir()
    together = threading.Barrier(4)

    def open_all() -> None:
        for root in roots:
            together.wait(timeout=60)
            RunStore.open(root).close()

    with ThreadPoolExecutor(4) as threads:
        for opened in [threads.submit(open_all) for _ in range(4)]:
            opened.result()
    for root in roots:
        with RunStore.open(root) as store:
            assert store.list_runs() == []


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    RunStore.open(tmp_path).close()
    path = tmp_path / ".osmosis" / "runs.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(StoreError, match=r"newer version of osmosis-ai.*upgrade with: pip install -U osmosis-ai"):
        RunStore.open(tmp_path)


TABLES = [
    RunColumns,
    RowColumns,
    RolloutColumns,
    TrajectoryColumns,
    ScoreColumns,
    JudgePromptColumns,
    VerdictColumns,
]
SQL_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL", bytes: "BLOB", type(None): "NULL"}


def sql_types(annotation: Any) -> set[str]:
    if annotation in SQL_TYPES:
        return {SQL_TYPES[annotation]}
    values = get_args(annotation)
    if get_origin(annotation) is Literal:
        return {SQL_TYPES[type(value)] for value in values}
    return set().union(*map(sql_types, values))


@pytest.mark.parametrize("kind", TABLES)
def test_a_tables_struct_declares_the_columns_that_the_migrations_make(kind: type[Columns], tmp_path: Path) -> None:
    RunStore.open(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / ".osmosis" / "runs.db")) as db:
        made = {
            name: {sql_type} if not_null or key else {sql_type, "NULL"}
            for _, name, sql_type, not_null, _, key in db.execute(f"PRAGMA table_info({kind.table})")
        }
    hints = get_type_hints(kind)
    assert {name: sql_types(hints[name]) for name in kind.__struct_fields__} == made


FIRST = ("CREATE TABLE notes (text TEXT)",)
SECOND = ("ALTER TABLE notes ADD COLUMN stars INTEGER NOT NULL DEFAULT 3", "CREATE INDEX by_stars ON notes (stars)")


def test_an_older_file_is_brought_up_to_date_and_keeps_its_records(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(FIRST[0])
        db.execute("PRAGMA user_version = 1")
        db.execute("INSERT INTO notes VALUES ('kept')")
        migrate(db, path, (FIRST, SECOND))
        migrate(db, path, (FIRST, SECOND))
        assert db.execute("SELECT * FROM notes").fetchall() == [("kept", 3)]
        assert db.execute("PRAGMA user_version").fetchone() == (2,)


def test_a_step_that_another_process_did_meanwhile_is_not_done_again(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db, closing(sqlite3.connect(path)) as other:
        other.isolation_level = None

        def overtake(statement: str) -> None:
            if statement.startswith("BEGIN"):
                db.set_trace_callback(None)
                migrate(other, path, (FIRST, SECOND))

        db.set_trace_callback(overtake)
        migrate(db, path, (FIRST, SECOND))
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
        assert db.execute("SELECT text, stars FROM notes").fetchall() == []


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        migrate(db, path, (FIRST,))
        with pytest.raises(sqlite3.OperationalError):
            migrate(db, path, (FIRST, (*SECOND, "CREATE NONSENSE")))
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert [column[1] for column in db.execute("PRAGMA table_info(notes)")] == ["text"]


def not_a_database(path: Path) -> None:
    path.write_bytes(b"This is no database. " * 100)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


@pytest.mark.parametrize(
    ("damage", "cause"), [(not_a_database, "is not a database"), (truncated, "malformed|damaged|not a database")]
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(
    tmp_path: Path, damage: Callable[[Path], None], cause: str
) -> None:
    with RunStore.open(tmp_path) as store:
        run = new_run(store)
        save(store, run, *(make_rollout(index) for index in range(50)))
    damage(store.path)
    with (
        pytest.raises(StoreError, match=rf"runs\.db.*({cause}).*move .*runs\.db away"),
        RunStore.open(tmp_path) as again,
    ):
        stored(again, run)


def test_a_damaged_record_is_an_error(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout())
    for damage in (b"{not json", b"\x78\x01 not zlib"):
        with closing(sqlite3.connect(store.path)) as db, db:
            db.execute("UPDATE trajectories SET data = ?", (damage,))
        with pytest.raises(StoreError, match="a record is damaged"):
            stored(store, run)


def test_a_file_in_the_folders_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".osmosis").write_text("", encoding="utf-8")
    with pytest.raises(StoreError, match=r"can't keep runs in .*\.osmosis: .*exists"):
        RunStore.open(tmp_path)


READ_ONLY = """
import os, sys, pathlib
from osmosis_ai.errors import StoreError
from osmosis_ai.store.run_store import RunStore
import psutil
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    RunStore.open(pathlib.Path(sys.argv[1]), folder=pathlib.Path(sys.argv[1], ".osmosis"))
except StoreError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of folders are another matter there")
@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(exists: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if exists:
            RunStore.open(root).close()
        folders = [root / ".osmosis", root] if exists else [root]
        for path in root.rglob("*.*"):
            path.chmod(0o444)
        for folder in folders:
            folder.chmod(0o555)
        with child(root, 0, 0, READ_ONLY) as process:
            message = process.communicate(timeout=60)[0]
        for folder in reversed(folders):
            folder.chmod(0o755)
    assert name in message
    assert "writable" in message


FULL = """
import asyncio, os, resource, sys
from pathlib import Path
from osmosis_ai.errors import StoreError
from osmosis_ai.records import *
from osmosis_ai.store.run_store import RunStore

async def main(root):
    store = RunStore.open(root)
    run = await store.create_run("eval", identity={}, config={})
    print(run)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    async def save(index):
        rollout = Rollout(f"r{index}", index, f"row{index}", 0, "policy", [{"x": os.urandom(1000).hex()}], "stop", 1.0)
        try:
            await store.save_rollout(run, rollout, Row(index, f"row{index}", "s", "u"))
        except StoreError as error:
            return str(error)
        print(rollout.id)
    for begin in range(0, 100_000, 8):
        errors = await asyncio.gather(*(save(index) for index in range(begin, begin + 8)))
        if any(errors):
            break
    print(*filter(None, errors), sep="\\n")

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files there")
def test_a_full_disk_is_an_error_and_costs_nothing_that_was_reported(tmp_path: Path) -> None:
    with child(tmp_path, 0, 0, FULL) as process:
        run, *lines = process.communicate(timeout=120)[0].split("\n")
    errors = [line for line in lines if line.startswith("run store")]
    reported = [line for line in lines if line.startswith("r") and line not in errors]
    # How many of the eight the writer finds waiting at once isn't known.
    assert errors
    for error in errors:
        assert "runs.db: disk I/O error" in error or "runs.db: database or disk is full" in error
    with RunStore.open(tmp_path) as store:
        assert set(reported) <= {rollout.id for rollout in stored(store, run)}
    assert reported
    # Here a file can't grow, but another one can be made.
    with RunStore.open(tmp_path, folder=copy_named_by(errors[0]), create=False) as store:
        assert len(stored(store, run)) == len(reported) + len(errors)


def copy_named_by(message: str) -> Path:
    found = re.search(r"every record, also the last ones, is in (.*?): `osmosis runs --store \1`", message)
    assert found is not None, message
    return Path(found[1])


@pytest.mark.parametrize("files", ["the folder", "the log", "replaced"])
def test_what_a_removed_store_holds_is_copied_and_no_write_counts(files: str, tmp_path: Path) -> None:
    folder = tmp_path / ".osmosis"
    with RunStore.open(tmp_path) as store:
        run = new_run(store)
        save(store, run, make_rollout(0))
        if files == "the log":
            (folder / "runs.db-wal").unlink()
        else:
            folder.rename(tmp_path / "gone")
            shutil.rmtree(tmp_path / "gone")
        if files == "replaced":
            RunStore.open(tmp_path).close()
        with pytest.raises(StoreError, match=r"removed or replaced while saving rollout policy\.1\.0") as lost:
            save(store, run, make_rollout(1))
        assert store.lost
        # Others that were about to be stored.
        with pytest.raises(StoreError, match="removed or replaced") as again:
            save(store, run, make_rollout(2))
        assert str(again.value) == str(lost.value)
        with pytest.raises(StoreError):
            asyncio.run(store.mark(run, "interrupted"))
    copy = copy_named_by(str(lost.value))
    assert copy == folder / f"recovered-{run}"
    assert [(path.stat().st_mode & 0o77) for path in (copy, copy / "runs.db")] == [0, 0]
    with RunStore.open(tmp_path, folder=copy, create=False) as opened:
        assert [rollout.id for rollout in stored(opened, run)] == ["policy.0.0", "policy.1.0", "policy.2.0"]
        assert opened.find_run(run).status == "interrupted"
        asyncio.run(opened.resume_run(run))


def test_a_store_whose_folder_cannot_be_made_again_is_copied_to_the_temporary_one(tmp_path: Path) -> None:
    with RunStore.open(tmp_path) as store:
        run = new_run(store)
        shutil.rmtree(tmp_path / ".osmosis")
        (tmp_path / ".osmosis").write_text("in the way", encoding="utf-8")
        with pytest.raises(StoreError, match="removed or replaced") as lost:
            save(store, run, make_rollout(0))
    copy = copy_named_by(str(lost.value))
    assert copy.parent == Path(tempfile.gettempdir())
    assert copy.stat().st_mode & 0o77 == 0
    with RunStore.open(tmp_path, folder=copy, create=False) as opened:
        assert [rollout.id for rollout in stored(opened, run)] == ["policy.0.0"]
    shutil.rmtree(copy)


def test_a_store_without_a_run_of_this_process_is_not_copied(tmp_path: Path) -> None:
    with RunStore.open(tmp_path) as store:
        run = new_run(store)
        asyncio.run(store.mark(run, "finished"))
        shutil.rmtree(tmp_path / ".osmosis")
        with pytest.raises(StoreError, match=r"removed or replaced while .*; put it back, or run again"):
            asyncio.run(store.mark(run, "finished", {"mean": 1.0}))
        assert not store.lost
    assert list(tmp_path.iterdir()) == []


def test_configuration_and_identity_are_json(store: RunStore) -> None:
    run = asyncio.run(store.create_run("eval", identity={"n": 2**70}, config={"params": {"stop": ["\n", "é"]}}))
    found = store.find_run(run)
    assert json.dumps(found.identity) == json.dumps({"n": 2**70})
    assert found.config == {"params": {"stop": ["\n", "é"]}}
