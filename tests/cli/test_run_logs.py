"""A run's log has the run's id; nothing is left of a log that nothing was written to."""

from __future__ import annotations

import time
from pathlib import Path

from commands import Osmosis
from repos import ADDING, EXACT, ROWS, write_repo

ORACLE = ["--model", "offline/oracle", "--json"]


def logs(repo: Path) -> list[str]:
    return sorted(file.name for file in (repo / ".osmosis" / "logs").iterdir())


def test_a_log_has_the_id_of_its_run_and_a_resumed_run_has_two(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", main=f"{ADDING}\nprint('loaded')\n")
    run_id = osmosis("test", *ORACLE, cwd=repo).json["config"]["run_id"]
    assert logs(repo) == [f"{run_id}.log"]
    again = osmosis("test", *ORACLE, "--retry-failed", "-q", cwd=repo)
    assert f"resuming run {run_id}: {len(ROWS)} rollouts are recorded" in again.stderr
    assert again.json["config"]["run_id"] == run_id
    assert logs(repo) == [f"{run_id}-2.log", f"{run_id}.log"]


def test_rescoring_has_a_log_of_its_own(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo")
    run_id = osmosis("test", *ORACLE, cwd=repo).json["config"]["run_id"]
    (repo / "reward_fn" / "rewards.py").write_text(f"{EXACT}\nprint('loaded')\n", encoding="utf-8")
    assert osmosis("runs", "rescore", cwd=repo).code == 0
    assert logs(repo) == [f"{run_id}-rescore.log"]


def test_code_that_prints_nothing_leaves_no_log(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo")
    assert osmosis("test", *ORACLE, cwd=repo).code == 0
    assert logs(repo) == []


def test_an_id_is_in_local_time_as_lists_of_runs_are(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo")
    before = time.strftime("%Y%m%d-%H%M%S")
    run_id = osmosis("test", *ORACLE, cwd=repo).json["config"]["run_id"]
    assert before <= run_id[: len(before)] <= time.strftime("%Y%m%d-%H%M%S")
