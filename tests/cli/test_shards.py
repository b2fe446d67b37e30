"""Shards: each runs its part of the rows, and the merged run equals one that was never split."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from commands import Finished, documented, run_osmosis
from osmosis_ai.config import RunConfig
from osmosis_ai.data.dataset import open_dataset
from osmosis_ai.errors import StoreError, UsageError
from osmosis_ai.runtime.run.merge import found_shards, merge_shards
from osmosis_ai.shards import Shard
from osmosis_ai.store.queries import Queries
from osmosis_ai.store.run_store import RunStore
from repos import write_repo

DOCUMENT = Path(__file__).parents[2] / "docs" / "scale.md"
ROWS = [
    {
        "system_prompt": "Use the tools.",
        "user_prompt": f"What is {number} + 1?",
        # Every third answer is wrong, and every second row has a solution to play.
        "ground_truth": str(number + (1 if number % 3 else 2)),
        **({"solution": [{"tool": "add", "arguments": {"a": number, "b": 1}}, "{{result[0]}}"]} if number % 2 else {}),
    }
    for number in range(12)
]
OPTIONS = ("--model", "offline/oracle", "--n", "2", "--baseline-model", "offline/empty", "--offset", "1")
NUMBERS = range(1, 4)


class Sharded(NamedTuple):
    repo: Path
    whole: str
    merged: str

    def place(self, number: int) -> str:
        return str(self.repo / f"shard-{number}")


def evaluate(repo: Path, *options: str, command: str = "eval") -> Finished:
    return run_osmosis(command, *options, cwd=repo)


def shard(repo: Path, text: str, *options: str, store: str | None = None) -> dict[str, Any]:
    done = evaluate(repo, *(options or OPTIONS), "--shard", text, "--store", store or f"shard-{text[0]}", "--json")
    assert done.code == 0, done.stderr
    return done.json


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Sharded:
    """A run, and the same in three shards: one store, one repository, one pushed file."""
    repo = write_repo(tmp_path_factory.mktemp("shards") / "repo", rows=ROWS)
    whole = evaluate(repo, *OPTIONS, "--json")
    assert whole.code == 0, whole.stderr
    for number in NUMBERS:
        shard(repo, f"{number}/3")
    (repo / "other").mkdir()
    shutil.move(repo / "shard-2", repo / "other" / ".osmosis")
    assert run_osmosis("runs", "push", "shard-2", "--store", "other/.osmosis", cwd=repo).code == 0
    (repo / "shard-3").rename(repo / "moved")
    (repo / "shard-3").mkdir()
    (repo / "moved").rename(repo / "shard-3" / ".osmosis")
    done = run_osmosis("runs", "merge", "shard-1", "shard-2", "shard-3", "--json", cwd=repo)
    assert done.code == 0, done.stderr
    merged = documented("runs-merge", done.stdout)
    assert merged["new"] is True
    assert [one["shard"] for one in merged["shards"]] == ["1/3", "2/3", "3/3"]
    return Sharded(repo, whole.json["config"]["run_id"], merged["run"]["id"])


def without(value: Any, *names: str) -> Any:
    """Return JSON without what differs between two equal runs: ids and times."""
    if isinstance(value, dict):
        return {key: without(item, *names) for key, item in value.items() if key not in names}
    return [without(item, *names) for item in value] if isinstance(value, list) else value


def test_a_row_stays_in_its_shard(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=ROWS)
    file = repo / "test_data.jsonl"
    before = {row.id for row in open_dataset(file).rows()}
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join([lines[-1].replace("?", "!"), *reversed(lines)]), encoding="utf-8")
    after = {row.id for row in open_dataset(file).rows()}
    assert len(after - before) == 1
    for total in (1, 2, 5):
        shards = [Shard(number, total) for number in range(1, total + 1)]
        parts = [{row for row in before if one.has(row)} for one in shards]
        assert sorted(row for part in parts for row in part) == sorted(before)
        assert parts == [{row for row in after & before if one.has(row)} for one in shards]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4/3", "shards are 1/3 to 3/3, counted from 1"),
        ("0/3", "shards are 1/3 to 3/3, counted from 1"),
        ("1/0", "there is at least one shard"),
        ("3", "such as 2/4"),
        ("-1/3", "such as 2/4"),
        ("a/b", "such as 2/4"),
    ],
)
def test_what_is_no_shard_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--shard {text}: ") + ".*" + re.escape(said)):
        RunConfig.of(shard=text)


def test_the_merged_run_equals_an_unsharded_one(sharded: Sharded) -> None:
    store = Queries(sharded.repo / ".osmosis" / "runs.db")
    whole, merged = store.find_run(sharded.whole), store.find_run(sharded.merged)
    assert merged.identity == whole.identity
    assert merged.summary == whole.summary
    apart = {"merged", "name"}
    assert without(merged.config, *apart) == without(whole.config, *apart)
    assert (merged.status, merged.rollouts, merged.failed) == (whole.status, whole.rollouts, whole.failed)
    times = ("id", "run_id", "rollout_id", "duration_ms", "started_at", "finished_at", "created_at", "latency_ms")
    exports = [
        [without(json.loads(line), *times) for line in done.stdout.splitlines()]
        for run in (sharded.whole, sharded.merged)
        if (done := run_osmosis("runs", "export", run, "--policy", "all", cwd=sharded.repo)).code == 0
    ]
    assert exports[0] == exports[1]
    assert len(exports[0]) == whole.rollouts == 44
    results = []
    for run in (sharded.whole, sharded.merged):
        done = evaluate(sharded.repo, *OPTIONS, "--resume-run", run, "--json")
        assert done.code == 0, done.stderr
        assert "44 rollouts are recorded" in done.stderr
        found = without(done.json, "run_id", "duration_ms", "total_duration_ms", "wall_ms", "median_ms", "p95_ms")
        results.append(found)
    assert results[0] == results[1]


def test_merging_again_changes_nothing(sharded: Sharded) -> None:
    places = [sharded.place(number) for number in NUMBERS]
    done = run_osmosis("runs", "merge", *places, cwd=sharded.repo)
    assert (done.code, done.stdout) == (0, f"{sharded.merged}\n")
    assert "nothing to do: these 3 shards were merged before" in done.stderr
    assert len(run_osmosis("runs", "--json", cwd=sharded.repo).json["runs"]) == 2


def refused(sharded: Sharded, tmp_path: Path, *places: str) -> str:
    """Merge into an empty store, which stays empty."""
    done = run_osmosis("runs", "merge", *places, "--store", str(tmp_path / "into"), cwd=sharded.repo)
    assert done.code == 2
    assert Queries(tmp_path / "into" / "runs.db").list_runs() == []
    return done.stderr


def test_a_missing_or_doubled_shard_is_named(sharded: Sharded, tmp_path: Path) -> None:
    first, second, third = (sharded.place(number) for number in NUMBERS)
    assert "missing: shard 2/3; run --shard 2/3, and name its store too" in refused(sharded, tmp_path, first, third)
    # The same run from two places counts once.
    done = run_osmosis("runs", "merge", first, first, second, third, "--store", str(tmp_path / "ok"), cwd=sharded.repo)
    assert done.code == 0, done.stderr
    shard(sharded.repo, "1/3", store=str(tmp_path / "again"))
    said = refused(sharded, tmp_path, first, second, third, str(tmp_path / "again"))
    assert "shard 1/3 is there twice: run " in said
    # Which of the two is named first depends on their ids.
    assert f"in {tmp_path / 'again'})" in said
    assert "; name only one of the stores" in said
    assert "is neither a store, nor a repository with one" in refused(sharded, tmp_path, str(tmp_path / "nothing"))
    assert "has no run of a shard" in refused(sharded, tmp_path, str(sharded.repo))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--n", "2", "--max-turns", "3"), "--max-turns changed (10 → 3)"),
        (("--n", "2", "--pass-threshold", "0.5"), "--pass-threshold changed (1.0 → 0.5)"),
        (("--n", "2", "--eval-fn", "shorter"), "functions changed"),
        ("shorter", "the code of reward_fn.rewards:exact changed"),
        ("-> int", "the tools' code changed"),
        ("4/4", "--shard changed (…/3 → …/4)"),
    ],
)
def test_what_does_not_fit_is_named(sharded: Sharded, tmp_path: Path, change: tuple[str, ...] | str, said: str) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(sharded.repo, repo, ignore=shutil.ignore_patterns(".osmosis", "shard-*", "other"))
    rewards, main = repo / "reward_fn" / "rewards.py", repo / "mcp" / "main.py"
    text, options = "3/3", (*OPTIONS[:2], "--n", "2", *OPTIONS[4:])
    if isinstance(change, tuple):
        options = (*options, *change[2:])
        if "shorter" in change:
            rewards.write_text(rewards.read_text().replace("def exact", "def shorter"), encoding="utf-8")
    elif "/" in change:
        text = change
    else:
        file = main if "->" in change else rewards
        file.write_text(file.read_text().replace("1.0 if", "2.0 if").replace("-> int", "-> float"), encoding="utf-8")
    shard(repo, text, *options, store=str(tmp_path / "other"))
    places = [sharded.place(1), sharded.place(2), str(tmp_path / "other")]
    assert said in refused(sharded, tmp_path, *places)


def test_an_unfinished_shard_merges_and_the_merged_run_goes_on(sharded: Sharded, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(sharded.repo / "shard-1", unfinished)
    with closing(sqlite3.connect(unfinished / "runs.db", isolation_level=None)) as db:
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("DELETE FROM rollouts WHERE pk IN (SELECT pk FROM rollouts ORDER BY pk DESC LIMIT 3)")
        db.execute("UPDATE runs SET status = 'interrupted', summary = NULL")
    places = [str(unfinished), sharded.place(2), sharded.place(3)]
    into = ("--store", str(tmp_path / "into"))
    done = run_osmosis("runs", "merge", *places, *into, cwd=sharded.repo)
    assert done.code == 0, done.stderr
    assert "3 shards merged: 41 of 44 rollouts" in done.stderr
    assert "the run is unfinished; run it with --resume-run" in done.stderr
    resumed = evaluate(sharded.repo, *OPTIONS, "--resume", *into)
    assert resumed.code == 0, resumed.stderr
    assert f"resuming run {done.stdout.strip()}: 41 rollouts are recorded" in resumed.stderr
    stores = [Queries(path / "runs.db") for path in (sharded.repo / ".osmosis", tmp_path / "into")]
    ended = stores[1].find_run(done.stdout.strip())
    assert (ended.status, ended.rollouts) == ("finished", 44)
    assert ended.summary == stores[0].find_run(sharded.whole).summary


def test_a_shard_that_was_continued_after_the_merge_is_told(sharded: Sharded, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(sharded.repo / "shard-1", unfinished)
    with closing(sqlite3.connect(unfinished / "runs.db", isolation_level=None)) as db:
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("DELETE FROM rollouts WHERE pk IN (SELECT pk FROM rollouts ORDER BY pk DESC LIMIT 3)")
    into = ("--store", str(tmp_path / "into"))
    rest = [sharded.place(2), sharded.place(3)]
    merged = run_osmosis("runs", "merge", str(unfinished), *rest, *into, cwd=sharded.repo)
    assert merged.code == 0, merged.stderr
    again = run_osmosis("runs", "merge", sharded.place(1), *rest, *into, cwd=sharded.repo)
    assert again.code == 2
    assert f"remove it with `osmosis runs rm {merged.stdout.strip()}`, and merge again" in again.stderr


def test_a_shard_without_rows_is_a_finished_run(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=ROWS[:1])
    (row,) = open_dataset(repo / "test_data.jsonl").rows()
    empty = 2 if Shard(1, 2).has(row.id) else 1
    done = evaluate(repo, "--model", "offline/oracle", "--shard", f"{empty}/2", "--fail-under", "0.9", "--store", "s")
    assert done.code == 0, done.stderr
    assert f"nothing to run: shard {empty}/2 has none of the rows" in done.stderr
    tested = evaluate(repo, "--model", "offline/oracle", "--shard", f"{empty}/2", command="test")
    assert tested.code == 0, tested.stderr
    listed = run_osmosis("runs", "--store", "s", "--json", cwd=repo).json["runs"]
    assert [(run["status"], run["planned"], run["shard"]) for run in listed] == [("finished", 0, f"{empty}/2")]
    shard(repo, f"{3 - empty}/2", "--model", "offline/oracle", store="t")
    merged = run_osmosis("runs", "merge", "s", "t", cwd=repo)
    assert merged.code == 0, merged.stderr
    assert "2 shards merged: 1 of 1 rollouts" in merged.stderr


def test_shards_in_one_store_share_a_name_and_continue_their_own(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=ROWS)
    for text in ("1/2", "2/2", "2/2"):
        done = evaluate(repo, "--model", "offline/oracle", "--name", "nightly", "--shard", text)
        assert done.code == 0, done.stderr
    assert "resuming run " in done.stderr
    assert evaluate(repo, "--model", "offline/oracle", "--limit", "3", "--shard", "1/2").code == 0
    assert "can't merge" in run_osmosis("runs", "merge", ".", cwd=repo).stderr
    merged = run_osmosis("runs", "merge", ".", "--name", "nightly", cwd=repo)
    assert merged.code == 0, merged.stderr
    assert "2 shards merged: 12 of 12 rollouts" in merged.stderr
    listed = run_osmosis("runs", "--json", cwd=repo).json["runs"]
    assert listed[0]["id"] == merged.stdout.strip()
    assert (listed[0]["name"], listed[0]["shard"]) == ("nightly", None)


def test_a_merge_that_is_cut_off_leaves_nothing(sharded: Sharded, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(sharded.repo / "shard-3" / ".osmosis", damaged)
    places = [("1", Path(sharded.place(1))), ("2", Path(sharded.place(2))), ("3", damaged)]
    with closing(sqlite3.connect(sharded.repo / "shard-1" / "runs.db")) as db:
        (row_id,) = db.execute("SELECT row_id FROM rows").fetchone()
    # The last shard can't be copied, after the others were.
    with closing(sqlite3.connect(damaged / "runs.db", isolation_level=None)) as db:
        db.execute("UPDATE rows SET row_id = ? WHERE rowid = (SELECT min(rowid) FROM rows)", (row_id,))
    with RunStore.open(tmp_path, folder=tmp_path / "into") as store, found_shards(places, tmp_path) as shards:
        merging = merge_shards(store, shards)
        with pytest.raises(StoreError, match="UNIQUE"):
            asyncio.run(merging)
    with closing(sqlite3.connect(tmp_path / "into" / "runs.db")) as db:
        counts = {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("runs", "rollouts")}
    assert counts == {"runs": 0, "rollouts": 0}
