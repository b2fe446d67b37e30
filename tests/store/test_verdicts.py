"""What people say of rollouts, and what judges were asked: both belong to the conversation that was seen."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from test_store import child, make_older, make_rollout, new_run, read_line, save, score, send_line

from osmosis_ai.errors import StoreError
from osmosis_ai.masking import MASK, Masker
from osmosis_ai.records import JudgeCall, Score, Verdict
from osmosis_ai.store.queries import Queries
from osmosis_ai.store.run_store import RunStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(tmp_path, masker=Masker(["sekret-1"])) as opened:
        yield opened


def say(store: RunStore, run: str, rollout_id: str, verdict: Verdict | None) -> None:
    asyncio.run(store.save_verdict(run, rollout_id, verdict))


def said(store: Queries, run: str) -> list[Verdict | None]:
    return [found.verdict for found in store.scored(run)]


def count(store: RunStore, table: str) -> int:
    with closing(sqlite3.connect(store.path)) as db:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_a_verdict_is_given_changed_and_taken_back(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout(0), make_rollout(1))
    say(store, run, "policy.0.0", Verdict(0, "it says sekret-1"))
    assert said(store, run) == [Verdict(0, f"it says {MASK}"), None]
    say(store, run, "policy.0.0", Verdict(1))
    assert said(store, run) == [Verdict(1), None]
    say(store, run, "policy.0.0", None)
    assert said(store, run) == [None, None]


def test_another_conversation_has_no_verdict_yet(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout(0), make_rollout(1))
    for rollout_id in ("policy.0.0", "policy.1.0"):
        say(store, run, rollout_id, Verdict(1))
    score(store, run, "policy.1.0", Score("f", 1.0))
    save(store, run, make_rollout(0, id="again"), replace=True)
    assert said(store, run) == [None, Verdict(1)]
    # Who still sees the first one is told.
    with pytest.raises(StoreError, match="was run again or removed"):
        say(store, run, "policy.0.0", Verdict(1))
    asyncio.run(store.delete_run(run))
    assert count(store, "verdicts") == 0


def test_a_run_that_goes_on_in_another_process_takes_verdicts_and_loses_nothing(tmp_path: Path) -> None:
    with child(tmp_path, 0, 400) as beside:
        run = read_line(beside)
        send_line(beside)
        first = read_line(beside)
        given = 0
        while beside.poll() is None and given < 200:
            with RunStore.open(tmp_path) as store:
                say(store, run, first, Verdict(1, str(given)))
            given += 1
        beside.communicate(timeout=60)
    reader = Queries(tmp_path / ".osmosis" / "runs.db")
    assert (beside.returncode, len(said(reader, run))) == (0, 400)
    assert [verdict for verdict in said(reader, run) if verdict is not None] == [Verdict(1, str(given - 1))]


ASKED = [{"role": "system", "content": "Score it."}, {"role": "user", "content": "The key is sekret-1."}]
JUDGED = Score("f", 0.5, judge_calls=[JudgeCall("openai/judge", 1.0, reply=each, prompt=ASKED) for each in ("a", "b")])


def test_what_judges_were_asked_is_stored_once_and_masked(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout(0), make_rollout(1))
    score(store, run, "policy.0.0", JUDGED, Score("g", 1.0))
    first, second = store.scored(run, with_trajectory=True)
    shown = [ASKED[0], {"role": "user", "content": f"The key is {MASK}."}]
    assert [call.prompt for call in first.scores["f"].judge_calls] == [shown, shown]
    assert second.scores == {}
    # Lists don't read them.
    assert [call.prompt for call in next(store.scored(run)).scores["f"].judge_calls] == [[], []]
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("SELECT data FROM judge_prompts").fetchone()[0].count(b"Score it.") == 1
    # A score that is computed again has asked for itself.
    score(store, run, "policy.0.0", Score("f", 1.0))
    assert count(store, "judge_prompts") == 0


def test_a_file_of_an_earlier_version_is_read_as_it_is(store: RunStore) -> None:
    run = new_run(store)
    save(store, run, make_rollout(0))
    store.close()
    make_older(store, 2)
    reader = Queries(store.path)
    assert [found.verdict for found in reader.scored(run, with_trajectory=True)] == [None]
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
