"""`osmosis runs` on real runs: list, show, compare, export, rescore, rm."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from commands import Osmosis
from osmosis_ai.store.queries import Queries
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.testing.endpoint import Reply, Request, ScriptedEndpoint, by_turn, text, tool_call

BROKEN_ON_7 = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    if ground_truth == "7":
        raise ValueError("seven is not [red]allowed[/red]")
    return 1.0 if solution_str.strip() == ground_truth else 0.0
"""

EXIT_ON_7 = BROKEN_ON_7.replace('raise ValueError("seven is not [red]allowed[/red]")', "__import__('os')._exit(9)")

LENIENT = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 0.5
"""

EXACT = "reward_fn.rewards:exact"


def sums(request: Request) -> Reply:
    """A model that adds with the tool and answers with its result; in the row about 5 + 6 it is wrong."""
    numbers = [int(word.strip("?")) for word in request.messages[1]["content"].split() if word.strip("?").isdigit()]
    if request.turn == 0:
        return tool_call("add", a=numbers[0], b=numbers[1])
    return text("wrong" if numbers == [5, 6] else str(sum(numbers)))


@pytest.fixture
def run(osmosis: Osmosis, repo: Path) -> Callable[..., str]:
    """Make a run in `repo` and return its id."""

    def start(*arguments: str | Path, env: dict[str, str] | None = None, command: str = "eval") -> str:
        done = osmosis(command, "-q", *arguments, cwd=repo, env=env)
        assert done.code in (0, 1), done.stderr
        return Queries(repo / ".osmosis" / "runs.db").find_run("latest").id

    return start


@pytest.fixture
def scripted(run: Callable[..., str]) -> Callable[..., str]:
    """Make a run with a scripted model and return its id."""

    def start(script: Any, *arguments: str | Path, **options: Any) -> str:
        with ScriptedEndpoint(script).run_in_thread() as endpoint:
            return run("--base-url", endpoint.url, "--model", "scripted", *arguments, **options)

    return start


# Finding runs


def test_where_there_are_no_runs_it_says_how_to_make_one(osmosis: Osmosis, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for arguments in (["runs"], ["runs", "show"], ["runs", "list", "--root", "elsewhere"]):
        done = osmosis(*arguments, cwd=tmp_path)
        assert (done.code, done.stdout) == (2, "")
        assert "osmosis eval" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / ".osmosis").exists()


def test_a_store_without_runs_is_no_error(osmosis: Osmosis, tmp_path: Path) -> None:
    RunStore.open(tmp_path).close()
    done = osmosis("runs", cwd=tmp_path)
    assert (done.code, done.stdout) == (0, "")
    assert "no runs yet" in done.stderr
    assert osmosis("runs", "list", "--json", cwd=tmp_path).json == {"runs": []}


def test_the_list_has_the_newest_first(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    first = run("--model", "offline/empty", "--limit", "2")
    second = run("--model", "offline/oracle", command="test")
    found = osmosis("runs", "--json", cwd=repo).json["runs"]
    assert [(item["id"], item["command"], item["status"]) for item in found] == [
        (second, "test", "finished"),
        (first, "eval", "finished"),
    ]
    assert found[0]["model"] == "offline/oracle"
    assert found[0]["stand_in"] is True
    assert (found[0]["rollouts"], found[0]["planned"], found[0]["failed"]) == (3, 3, 0)
    assert found[0]["functions"] == {EXACT: 1.0}
    assert found[0]["dataset"].endswith("test_data.jsonl")
    listed = osmosis("runs", "list", "--limit", "1", cwd=repo)
    assert second in listed.stdout
    assert first not in listed.stdout
    assert "3 of 3" in listed.stdout
    assert "1.000" in listed.stdout


def test_runs_are_found_from_a_folder_of_the_repository_and_by_root(
    osmosis: Osmosis, repo: Path, tmp_path: Path, run: Callable[..., str]
) -> None:
    made = run("--model", "offline/empty")
    assert osmosis("runs", "--json", cwd=repo / "mcp").json["runs"][0]["id"] == made
    for arguments in (["runs", "--root", "repo", "show", made], ["runs", "show", made[:-2], "--root", repo]):
        done = osmosis(*arguments, cwd=tmp_path)
        assert done.code == 0, done.stderr
        assert made in done.stdout


def test_a_killed_run_is_called_so(osmosis: Osmosis, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path; from osmosis_ai.store.run_store import RunStore\n"
        "print(asyncio.run(RunStore.open(Path(sys.argv[1])).create_run('eval', identity={}, config={})))"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=True, encoding="utf-8"
    )
    found = osmosis("runs", "--json", cwd=tmp_path).json["runs"]
    assert [(item["id"], item["status"]) for item in found] == [(made.stdout.strip(), "killed")]
    # Such a run holds none of the figures that a run begins and ends with.
    for arguments in (["runs"], ["runs", "show"], ["runs", "export"]):
        done = osmosis(*arguments, cwd=tmp_path)
        assert done.code == 0, done.stderr


def test_a_run_that_does_not_exist(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    run("--model", "offline/empty")
    for arguments in (["show", "nope"], ["compare", "latest", "nope"], ["export", "nope"], ["rm", "nope"]):
        done = osmosis("runs", *arguments, cwd=repo)
        assert (done.code, done.stdout) == (2, "")
        assert "no run 'nope'" in done.stderr


# Show


def test_show_has_a_line_for_each_rollout(osmosis: Osmosis, repo: Path, scripted: Callable[..., str]) -> None:
    (repo / "reward_fn" / "rewards.py").write_text(BROKEN_ON_7, encoding="utf-8")
    made = scripted(sums)
    done = osmosis("runs", "show", cwd=repo)
    assert done.code == 0, done.stderr
    assert made in done.stdout
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line[:3].strip().isdigit()}
    assert lines["0"][:6] == ["0", "0", "stop", "1.000", "2", "1"]
    assert lines["2"][:4] == ["2", "0", "stop", "0.000"]
    assert lines["1"][3] == "error"
    assert "seven is not [red]allowed[/red]" in done.stdout
    failed = osmosis("runs", "show", "--failed", "--json", cwd=repo).json
    assert [item["row_index"] for item in failed["rollouts"]] == [1]
    assert failed["more"] == 0
    total = failed["functions"][0]
    assert (total["function"], total["rollouts"], total["scored"], total["errors"]) == (EXACT, 3, 2, 1)
    assert total["mean"] == pytest.approx(1 / 3)


def test_show_says_how_many_more_there_are(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    run("--model", "offline/empty", "--n", "3")
    done = osmosis("runs", "show", "--limit", "4", cwd=repo)
    assert "… and 5 more" in done.stdout
    one = osmosis("runs", "show", "--run-index", "2", "--limit", "2", "--json", cwd=repo).json
    assert [(item["row_index"], item["run_index"]) for item in one["rollouts"]] == [(0, 2), (1, 2)]
    assert one["more"] == 1


def test_the_transcript_of_a_row(osmosis: Osmosis, repo: Path, scripted: Callable[..., str]) -> None:
    (repo / "reward_fn" / "rewards.py").write_text(BROKEN_ON_7, encoding="utf-8")
    scripted(sums)
    done = osmosis("runs", "show", "--row", "1", cwd=repo)
    assert done.code == 0, done.stderr
    shown = done.stdout
    ordered = [
        "row 1, run 0: stop, 2 turns, 1 tool call",
        "ground truth: 7",
        "── system\nUse the tools.",
        "── user\nWhat is 3 + 4?",
        '→ add {"a":3,"b":4}',
        "── result of add",
        " ms\n7\n",
        "── assistant, turn 2",
        f"{EXACT}: no score\n  reward: ",
    ]
    places = [shown.index(part) for part in ordered]
    assert places == sorted(places)
    assert "rewards.py:8" in shown
    (rollout,) = osmosis("runs", "show", "latest", "--row", "1", "--json", cwd=repo).json["rollouts"]
    assert [message["role"] for message in rollout["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert rollout["tool_calls"][0]["name"] == "add"
    assert rollout["row"]["extra"] == {"level": 3}
    assert rollout["scores"][EXACT]["failure"]["line"] == 8


def test_a_row_that_is_not_there(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    run("--model", "offline/empty")
    done = osmosis("runs", "show", "--row", "9", cwd=repo)
    assert (done.code, done.stdout) == (2, "")
    assert "no row 9" in done.stderr
    assert "0 … 2" in done.stderr
    done = osmosis("runs", "show", "--row", "1", "--run-index", "4", cwd=repo)
    assert done.code == 2
    assert "--run-index 4" in done.stderr


def test_what_a_model_wrote_cannot_drive_the_terminal(
    osmosis: Osmosis, repo: Path, scripted: Callable[..., str]
) -> None:
    scripted(by_turn(text("\x1b]0;owned\x07\x1b[2Jhello\rbye")), "--limit", "1")
    for arguments in (["show", "--row", "0"], ["show"]):
        done = osmosis("runs", *arguments, cwd=repo)
        assert not {"\x1b", "\x07", "\r"} & set(done.stdout)
    shown = osmosis("runs", "show", "--row", "0", cwd=repo).stdout
    assert "\\x1b[2Jhello\\rbye" in shown


def test_keys_are_masked_in_everything_printed(osmosis: Osmosis, repo: Path, scripted: Callable[..., str]) -> None:
    secret = "sk-verysecretvalue"
    # The run doesn't know that it is a key; whoever looks back does.
    made = scripted(by_turn(text(f"the key is {secret}")))
    env = {"SOME_SECRET": secret}
    commands = [
        ["show", "--row", "0"],
        ["show", "--row", "0", "--json"],
        ["export"],
        ["export", "-o", "out.jsonl"],
        ["export", "-o", "out.parquet"],
        ["compare", made, made],
    ]
    for arguments in commands:
        done = osmosis("runs", *arguments, cwd=repo, env=env)
        assert done.code == 0, done.stderr
        assert secret not in done.stdout + done.stderr
    assert "[masked]" in (repo / "out.jsonl").read_text(encoding="utf-8")
    messages = pq.read_table(repo / "out.parquet")["messages"].to_pylist()
    assert [row[-1]["content"] for row in messages] == ["the key is [masked]"] * 3


# Compare


def test_compare_shows_what_flipped(osmosis: Osmosis, repo: Path, scripted: Callable[..., str]) -> None:
    a = scripted(by_turn(text("3")))
    b = scripted(sums)
    done = osmosis("runs", "compare", a, b, cwd=repo)
    assert done.code == 0, done.stderr
    assert "flipped to passing: 1, to failing: 0" in done.stdout
    assert "row 1  0.000 → 1.000  passes  What is 3 + 4?" in done.stdout
    found = osmosis("runs", "compare", a, b, "--json", cwd=repo).json
    function = found["functions"][EXACT]
    assert (function["a"]["mean"], function["b"]["mean"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert function["difference"] == pytest.approx(1 / 3)
    assert function["confidence_interval"][0] < 1 / 3 < function["confidence_interval"][1]
    assert (function["wins"], function["losses"], function["ties"]) == (1, 0, 2)
    assert [(flip["row_index"], flip["a"], flip["b"]) for flip in function["flips"]] == [(1, 0.0, 1.0)]
    assert found["rows"] == {"shared": 3, "only_a": 0, "only_b": 0}
    assert found["notes"] == ["the runs also differ in: endpoint"]
    backwards = osmosis("runs", "compare", b, a, cwd=repo)
    assert "row 1  1.000 → 0.000  fails" in backwards.stdout


def test_diff_shows_flips_and_where_two_conversations_part(
    osmosis: Osmosis, repo: Path, scripted: Callable[..., str]
) -> None:
    a = scripted(by_turn(tool_call("add", a=3, b=3), text("6")))
    b = scripted(by_turn(tool_call("add", a=3, b=4), text("7")))
    done = osmosis("runs", "diff", a, b, cwd=repo)
    assert done.code == 0, done.stderr
    assert done.stdout.index("flipped to passing: 1") < done.stdout.index("B − A")
    assert osmosis("runs", "diff", a, b, "--json", cwd=repo).json["functions"][EXACT]["now_pass"] == 1
    lines = osmosis("runs", "diff", a, b, "--row", "1", cwd=repo).stdout.splitlines()
    call = ["~ → add", '  {"a":3,"b":[-3-]{+4+}}', "  = [-6-]{+7+}"]
    assert lines[2:] == ["  … 2 equal steps", *call, "~ assistant", "  [-6-]{+7+}"]
    found = osmosis("runs", "diff", a, b, "--row", "1", "--json", cwd=repo).json
    assert [step["change"] for step in found["steps"]] == ["equal", "equal", "changed", "changed"]
    assert found["first_difference"] == 2
    assert "went the same way" in osmosis("runs", "diff", a, a, "--row", "1", cwd=repo).stdout
    assert (
        "has no attempt 1 of row 0" in osmosis("runs", "diff", a, b, "--row", "0", "--run-index", "1", cwd=repo).stderr
    )
    assert f"run {a} has no row 99" in osmosis("runs", "diff", a, b, "--row", "99", cwd=repo).stderr


def test_compare_warns_of_what_makes_it_less_than_it_seems(
    osmosis: Osmosis, repo: Path, run: Callable[..., str], scripted: Callable[..., str]
) -> None:
    a = run("--model", "offline/oracle", "--n", "2", "--limit", "2")
    (repo / "reward_fn" / "rewards.py").write_text(LENIENT, encoding="utf-8")
    b = scripted(sums, "--temperature", "0.5")
    done = osmosis("runs", "compare", a, b, cwd=repo)
    assert done.code == 0, done.stderr
    assert "run A: offline/oracle is an offline stand-in" in done.stderr
    assert "run B: " not in done.stderr
    assert "only the 2 common rows are compared; 0 are in A only, 1 in B only" in done.stderr
    assert "attempts per row differ: 2 in A, 1 in B" in done.stderr
    assert "parameters" in done.stderr
    assert f"the runs' scores of {EXACT} come from different code" in done.stderr
    half = osmosis("runs", "compare", a, b, "--pass-threshold", "0.5", "--json", cwd=repo).json
    assert half["functions"][EXACT]["flips"] == []


def test_compare_of_runs_without_a_common_row(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    a = run("--model", "offline/oracle", "--limit", "1")
    b = run("--model", "offline/oracle", "--offset", "1")
    done = osmosis("runs", "compare", a, b, cwd=repo)
    assert done.code == 1
    assert "no row in common" in done.stderr
    assert osmosis("runs", "compare", a, b, "--json", cwd=repo).json["rows"]["shared"] == 0


def test_compare_lists_a_limited_number_of_flips(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    a, b = run("--model", "offline/oracle"), run("--model", "offline/empty")
    done = osmosis("runs", "compare", a, b, "--limit", "1", cwd=repo)
    assert "flipped to passing: 0, to failing: 3" in done.stdout
    assert "… and 2 more" in done.stdout


# Export


def test_export_as_json_lines(osmosis: Osmosis, repo: Path, scripted: Callable[..., str]) -> None:
    made = scripted(sums)
    done = osmosis("runs", "export", made, cwd=repo)
    assert done.code == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["row_index"], row["reward"], row["rewards"]) for row in rows] == [
        (0, 1.0, {EXACT: 1.0}),
        (1, 1.0, {EXACT: 1.0}),
        (2, 0.0, {EXACT: 0.0}),
    ]
    first = rows[0]
    assert (first["model"], first["finish_reason"], first["error"]) == ("scripted", "stop", None)
    assert (first["ground_truth"], first["metadata"]) == ("3", {"level": 1})
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add"]
    call = first["messages"][2]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert first["messages"][3] == {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    assert first["token_usage"] == {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
    assert first["run_id"] == made


def test_export_selects(osmosis: Osmosis, repo: Path, scripted: Callable[..., str]) -> None:
    scripted(sums)
    for option, indices in (
        (["--only-passed"], [0, 1]),
        (["--min-reward", "0"], [0, 1, 2]),
        (["--min-reward", "1.5"], []),
    ):
        done = osmosis("runs", "export", *option, cwd=repo)
        assert done.code == 0, done.stderr
        assert [json.loads(line)["row_index"] for line in done.stdout.splitlines()] == indices


def test_export_leaves_the_baseline_out_unless_asked(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    run("--model", "offline/oracle", "--baseline-model", "offline/empty")
    for policy, models in (("policy", {"offline/oracle"}), ("all", {"offline/oracle", "offline/empty"})):
        done = osmosis("runs", "export", "--policy", policy, cwd=repo)
        assert {json.loads(line)["model"] for line in done.stdout.splitlines()} == models
        assert ("the model's (--policy)" if policy == "policy" else "both models' (--policy)") in done.stderr
        done = osmosis("runs", "export", "--policy", policy, "-o", "out.parquet", cwd=repo)
        assert done.code == 0, done.stderr
        assert {row["model"]: row["reward"] for row in pq.read_table(repo / "out.parquet").to_pylist()} == {
            model: float(model == "offline/oracle") for model in models
        }


def test_export_as_parquet(osmosis: Osmosis, repo: Path, scripted: Callable[..., str]) -> None:
    scripted(sums)
    done = osmosis("runs", "export", "-o", "out.parquet", "--json", cwd=repo)
    assert done.json["written"] == 3
    assert done.json["format"] == "parquet"
    first = pq.read_table(repo / "out.parquet").to_pylist()[0]
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert first["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1,"b":2}'}
    assert first["rewards"] == {EXACT: 1.0}
    assert json.loads(first["tools"])[0]["function"]["name"] == "add"
    assert json.loads(first["metadata"]) == {"level": 1}


def test_an_export_that_cannot_be_written_is_found_before(
    osmosis: Osmosis, repo: Path, run: Callable[..., str]
) -> None:
    run("--model", "offline/empty")
    for arguments, message in (
        (["-o", "missing/out.jsonl"], "doesn't exist"),
        (["-o", "mcp"], "is a folder"),
        (["--format", "parquet"], "-o"),
        (["--json"], "-o"),
    ):
        done = osmosis("runs", "export", *arguments, cwd=repo)
        assert (done.code, done.stdout) == (2, "")
        assert message in done.stderr


def test_a_full_disk_is_an_error_message(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    run("--model", "offline/empty")
    done = osmosis("runs", "export", "-o", "/dev/full", "--format", "jsonl", cwd=repo)
    assert done.code == 1
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr


# Rescore


def test_rescore_uses_the_code_as_it_is_now_and_no_model(
    osmosis: Osmosis, repo: Path, scripted: Callable[..., str]
) -> None:
    made = scripted(sums)
    (repo / "reward_fn" / "rewards.py").write_text(LENIENT, encoding="utf-8")
    # The endpoint is gone: a model request would fail.
    done = osmosis("runs", "rescore", made, "--json", cwd=repo)
    assert done.code == 0, done.stderr
    assert done.json["rescored"] == 3
    assert done.json["before"] == {EXACT: pytest.approx(2 / 3)}
    assert done.json["functions"][EXACT]["mean"] == 0.5
    (listed,) = osmosis("runs", "--json", cwd=repo).json["runs"]
    assert (listed["functions"], listed["status"]) == ({EXACT: 0.5}, "finished")
    again = osmosis("runs", "rescore", cwd=repo)
    assert again.code == 0, again.stderr
    assert "nothing to rescore" in again.stdout


def test_rescore_by_a_named_function(osmosis: Osmosis, repo: Path, scripted: Callable[..., str]) -> None:
    scripted(sums)
    (repo / "other.py").write_text(
        "def length(solution_str, ground_truth, extra_info):\n    return len(solution_str)\n", encoding="utf-8"
    )
    done = osmosis("runs", "rescore", "--eval-fn", "other:length", cwd=repo)
    assert done.code == 0, done.stderr
    assert "other:length" in done.stdout
    rows = [json.loads(line) for line in osmosis("runs", "export", cwd=repo).stdout.splitlines()]
    assert [row["rewards"] for row in rows] == [
        {EXACT: 1.0, "other:length": 1.0},
        {EXACT: 1.0, "other:length": 1.0},
        {EXACT: 0.0, "other:length": 5.0},
    ]
    missing = osmosis("runs", "rescore", "--eval-fn", "other:width", cwd=repo)
    assert missing.code == 2
    assert "width" in missing.stderr


def test_a_score_that_cannot_be_computed_is_exit_code_1(
    osmosis: Osmosis, repo: Path, scripted: Callable[..., str]
) -> None:
    scripted(sums)
    (repo / "reward_fn" / "rewards.py").write_text(BROKEN_ON_7, encoding="utf-8")
    done = osmosis("runs", "rescore", "--json", cwd=repo)
    assert done.code == 1
    assert done.json["functions"][EXACT]["errors"] == 1


def test_a_function_that_ends_its_worker_costs_only_its_own_score(
    osmosis: Osmosis, repo: Path, scripted: Callable[..., str]
) -> None:
    made = scripted(sums)
    (repo / "reward_fn" / "rewards.py").write_text(EXIT_ON_7, encoding="utf-8")
    done = osmosis("runs", "rescore", "--json", cwd=repo)
    assert done.code == 1
    assert done.json["rescored"] == 3
    totals = done.json["functions"][EXACT]
    assert (totals["scored"], totals["errors"]) == (2, 1)
    shown = osmosis("runs", "show", made, "--failed", "--json", cwd=repo)
    assert "exited with code 9" in shown.stdout


# Remove


def test_rm_removes_what_was_confirmed(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    first, second, third = (run("--model", "offline/empty", "--limit", "1") for _ in range(3))
    refused = osmosis("runs", "rm", first, cwd=repo)
    assert refused.code == 2
    assert first in refused.stderr
    assert "-y" in refused.stderr
    assert osmosis("runs", "rm", first, second, "-y", "--json", cwd=repo).json == {"removed": [first, second]}
    assert [item["id"] for item in osmosis("runs", "--json", cwd=repo).json["runs"]] == [third]
    assert osmosis("runs", "rm", "--all-finished", "-y", cwd=repo).code == 0
    assert osmosis("runs", "--json", cwd=repo).json["runs"] == []
    assert osmosis("runs", "rm", "-y", cwd=repo).code == 2


def test_a_run_that_another_process_writes_is_left_alone(osmosis: Osmosis, repo: Path, run: Callable[..., str]) -> None:
    finished = run("--model", "offline/empty", "--limit", "1")
    with RunStore.open(repo) as store:
        alive = asyncio.run(store.create_run("eval", identity={}, config={}))
        assert osmosis("runs", "--json", cwd=repo).json["runs"][0]["status"] == "running"
        for arguments in (["rm", "-y", finished, alive], ["rescore", alive]):
            done = osmosis("runs", *arguments, cwd=repo)
            assert done.code == 2
            assert alive in done.stderr
        assert len(store.list_runs()) == 2


def test_a_repository_without_runs_says_so(osmosis: Osmosis, repo: Path) -> None:
    for command in (["view", "nosuch", "--no-open"], ["view", "latest", "--html", "run.html"]):
        done = osmosis(*command, cwd=repo)
        assert (done.code, "there are no runs: " in done.stderr) == (2, True), done.stderr
    assert not (repo / "run.html").exists()
