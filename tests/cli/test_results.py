"""The results of a run: documented JSON, tables, exit code, and the right stream for each."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from commands import COMMAND, Finished, Osmosis, clean_environment, documented, run_osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, by_turn, hang, status, text, tool_call, tool_calls
from repos import ROWS, write_repo

pytestmark = pytest.mark.xdist_group("results")

EXACT_NAME = "reward_fn.rewards:exact"


def row_of(request: Request) -> int:
    """Return the index of the conftest row that a request belongs to."""
    prompts = [row["user_prompt"] for row in ROWS]
    return prompts.index(request.messages[1]["content"])


def keys(value: dict[str, Any], *names: str) -> set[str]:
    """Return the names that are missing."""
    return set(names) - value.keys()


def lines(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


def test_the_object_of_eval(osmosis: Osmosis, repo: Path) -> None:
    """Five attempts per row: the first row always solved, the second twice of five times, the third never."""
    attempts = [0, 0, 0]

    def script(request: Request) -> Reply:
        row = row_of(request)
        if request.turn == 0:
            return tool_call("add", a=1, b=2)
        attempts[row] += 1
        right = row == 0 or (row == 1 and attempts[row] <= 2)
        return text(ROWS[row]["ground_truth"] if right else "no idea", prompt_tokens=100, completion_tokens=7)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        done = osmosis("eval", *model, "--n", "5", "--json", "-o", "out.json", "--fail-under", "0.46", cwd=repo)
        assert len(endpoint.chats) == 30
    result = documented("eval", done.stdout)
    assert json.loads((repo / "out.json").read_text(encoding="utf-8")) == result

    assert list(result) == ["config", "summary", "rows"]
    assert not keys(result["config"], "model", "n_runs", "pass_threshold", "eval_fns")
    config = result["config"]
    assert (config["model"], config["n_runs"], config["pass_threshold"]) == ("scripted", 5, 1.0)
    assert config["eval_fns"] == [EXACT_NAME]

    summary = result["summary"]
    assert (summary["total_rows"], summary["total_runs"]) == (3, 15)
    assert summary["total_tokens"] == 15 * (15 + 107)
    assert summary["wall_ms"] > 0
    durations = [run["duration_ms"] for row in result["rows"] for run in row["runs"]]
    assert summary["total_duration_ms"] == pytest.approx(sum(durations), abs=0.1)
    scores = summary["eval_fns"][EXACT_NAME]
    expected = {"mean": 7 / 15, "mean_scored": 7 / 15, "min": 0.0, "max": 1.0, "scoring_errors": 0}
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    assert scores["std"] == pytest.approx((7 / 15 * 8 / 15) ** 0.5)
    # Rows are clusters: the standard error is that of three row means, and wider than fifteen attempts would say.
    assert scores["standard_error"] > scores["std"] / 15**0.5
    low, high = scores["confidence_interval"]
    assert low < 7 / 15 < high
    # 2 of 5 right: pass@3 is 1 - C(3,3)/C(5,3), and 3 of 3 never are.
    assert scores["pass_at_1"] == pytest.approx((1 + 2 / 5) / 3)
    assert scores["pass_at_3"] == pytest.approx((1 + 9 / 10) / 3)
    assert scores["pass_at_5"] == pytest.approx(2 / 3)
    assert "pass_at_10" not in scores
    assert (scores["pass_hat_3"], scores["pass_hat_5"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))

    assert [row["row_index"] for row in result["rows"]] == [0, 1, 2]
    for row in result["rows"]:
        assert [run["run_index"] for run in row["runs"]] == [0, 1, 2, 3, 4]
        for run in row["runs"]:
            assert not keys(run, "success", "scores", "duration_ms", "tokens")
            assert (run["success"], run["tokens"]) == (True, 122)
    assert sum(run["scores"][EXACT_NAME] for run in result["rows"][1]["runs"]) == 2

    assert done.code == 0, done.stderr
    assert "scripted on 3 rows × 5" in done.stderr


ENDINGS: dict[str, tuple[Reply, str, str | None]] = {
    "stop": (text("yes"), "stop", None),
    "length": (text("ye", finish_reason="length"), "length", None),
    "turns": (tool_call("add", a=1, b=2), "max_turns", None),
    "tokens": (
        tool_calls([("add", {"a": 1, "b": 2})], content="yes", completion_tokens=9000),
        "max_tokens_total",
        None,
    ),
    "refused": (status(400, body={"error": {"message": "the context is too long"}}), "error", "model: "),
    "refused again": (status(400, body={"error": {"message": "the context is too long"}}), "error", "model: "),
    "nonsense": (text("yes", choice={"message": None}), "error", "model: "),
    "hang": (hang(), "timeout", "timeout: "),
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, dict[str, Any]]:
    """A run in which every row ends differently: its piped output and its results file."""
    rows = [{"system_prompt": "s", "user_prompt": name, "ground_truth": "yes"} for name in ENDINGS]
    repo = write_repo(tmp_path_factory.mktemp("endings") / "repo", rows=rows)
    with ScriptedEndpoint(lambda request: ENDINGS[request.messages[1]["content"]][0]).run_in_thread() as endpoint:
        options = ["--max-turns", "3", "--max-tokens-total", "5000", "--timeout", "2", "-o", "out.json"]
        done = run_osmosis("test", "--base-url", endpoint.url, "--model", "scripted", *options, cwd=repo)
    result = documented("test", (repo / "out.json").read_text(encoding="utf-8"))
    return done, result


def test_the_object_of_test(endings: tuple[Finished, dict[str, Any]]) -> None:
    done, result = endings
    assert done.code == 1
    summary = result["summary"]
    assert not keys(summary, "total", "passed", "failed", "total_duration_ms", "total_tokens")
    assert (summary["total"], summary["passed"], summary["failed"]) == (8, 4, 4)
    rows = result["results"]
    assert summary["total_tokens"] == sum(row["token_usage"]["total_tokens"] for row in rows)
    assert [row["row_index"] for row in rows] == list(range(8))
    for row, (name, (_, reason, error)) in zip(rows, ENDINGS.items(), strict=True):
        assert not keys(row, "row_index", "success", "error", "duration_ms", "token_usage", "reward", "finish_reason")
        assert (name, row["finish_reason"]) == (name, reason)
        assert row["success"] is (error is None)
        if error is None:
            assert row["error"] is None
        else:
            assert row["error"].startswith(error)
            assert row["reward"] is None
        assert row["token_usage"].keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}
    # A wrong answer is no error: the rollout has passed, and its reward is 0.
    assert [row["reward"] for row in rows[:4]] == [1.0, 0.0, 0.0, 1.0]
    assert rows[2]["token_usage"] == {"prompt_tokens": 30, "completion_tokens": 15, "total_tokens": 45}
    assert 2000 <= rows[7]["duration_ms"] < 20_000
    scores = summary["functions"][EXACT_NAME]
    assert (scores["mean"], scores["mean_scored"], scores["scoring_errors"]) == (2 / 8, 2 / 4, 0)


def test_failures_are_grouped_by_cause_with_one_example_each(endings: tuple[Finished, dict[str, Any]]) -> None:
    done, result = endings
    causes = {(cause["origin"], cause["kind"]): cause for cause in result["summary"]["failures"]}
    assert {cause: values["count"] for cause, values in causes.items()} == {
        ("model", "bad_request"): 2,
        ("model", "bad_reply"): 1,
        ("timeout", "rollout"): 1,
    }
    assert (causes["model", "bad_request"]["row_index"]) in (4, 5)
    printed = lines(done.stdout)
    start = printed.index("failures")
    assert re.match(r"2 × model.* row [45]: .*the context is too long", printed[start + 1])
    assert any(line.startswith("1 × timeout, for example row 7: ") for line in printed[start:])


def test_piped_output_is_plain(endings: tuple[Finished, dict[str, Any]]) -> None:
    done, _ = endings
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert "4 of 8 rollouts completed, 4 failed" in done.stdout
    table = lines(done.stdout)
    assert "function mean min max" in table
    assert f"{EXACT_NAME} 0.250 0.000 1.000" in table
    assert any(re.fullmatch(r"add \d+ – [\d.]+ m?s [\d.]+ m?s", line) for line in table)
    # What isn't a result is on stderr.
    assert "results written to" in done.stderr
    assert "tools: add" in done.stderr


def test_quiet_leaves_only_results(osmosis: Osmosis, repo: Path) -> None:
    with ScriptedEndpoint(by_turn(text("3"))).run_in_thread() as endpoint:
        done = osmosis("test", "--base-url", endpoint.url, "--model", "scripted", "-q", cwd=repo)
    assert done.code == 0
    assert done.stderr == ""
    assert "3 of 3 rollouts completed" in done.stdout


SCORES = """
import asyncio
from osmosis_ai import osmosis_reward


@osmosis_reward
def classic(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float:
    if extra_info["row_index"] == 1:
        raise KeyError("weight")
    return float(solution_str == ground_truth)


@osmosis_reward
async def whole(messages, ground_truth, metadata):
    await asyncio.sleep(0)
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    return metadata["level"] / 10


@osmosis_reward
def not_a_float(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1
"""


def test_scoring_errors_are_counted_and_shown_and_stop_nothing(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rewards=SCORES)
    (repo / "reward_fn" / "broken.py").write_text(
        "import no_such_package\nfrom osmosis_ai import osmosis_reward\n\n\n@osmosis_reward\n"
        "def broken(solution_str: str, ground_truth: str, extra_info: dict = None) -> float: return 1.0\n",
        encoding="utf-8",
    )
    (repo / "reward_fn" / "unreadable.py").write_text("def broken(\n", encoding="utf-8")
    done = osmosis("eval", "--model", "offline/oracle", "--keep-going", "-o", "out.json", cwd=repo)
    assert done.code == 1, done.stderr
    result = documented("eval", (repo / "out.json").read_text(encoding="utf-8"))
    names = [f"reward_fn.rewards:{name}" for name in ("classic", "whole", "not_a_float")]
    assert list(result["summary"]["eval_fns"]) == names
    classic, whole, not_a_float = result["summary"]["eval_fns"].values()
    assert (classic["mean"], classic["mean_scored"], classic["scoring_errors"]) == (pytest.approx(2 / 3), 1.0, 1)
    assert (whole["mean"], whole["mean_scored"], whole["scoring_errors"]) == (pytest.approx(0.3), pytest.approx(0.3), 0)
    assert (not_a_float["mean"], not_a_float["mean_scored"], not_a_float["scoring_errors"]) == (0.0, None, 3)
    assert result["summary"]["scoring_errors"] == 4
    assert (result["summary"]["passed"], result["summary"]["failed"]) == (3, 0)
    run = result["rows"][1]["runs"][0]
    assert run["success"] is True
    assert run["scores"] == {names[0]: None, names[1]: 0.3, names[2]: None}
    assert "KeyError" in run["scoring_errors"][names[0]]

    printed = lines(done.stdout)
    assert any("1 × reward at reward_fn/rewards.py:9" in line and "KeyError: 'weight'" in line for line in printed)
    assert any("3 × reward at reward_fn/rewards.py:" in line and "not_a_float returned 1" in line for line in printed)
    assert any(line.startswith("function mean ± stderr errors mean scored") for line in printed)
    # What can't be imported or read is named, and the rest goes on.
    assert "reward_fn/broken.py:1: ModuleNotFoundError" in done.stderr
    assert "reward_fn/unreadable.py:1: SyntaxError" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_functions_are_named_and_a_mean_under_the_bound_fails(osmosis: Osmosis, tmp_path: Path) -> None:
    """Found from the repository's root, then from the working directory, then by a discovered function's bare name."""
    repo = write_repo(tmp_path / "repo")
    (repo / "scores.py").write_text("def length(solution_str, ground_truth, extra_info): return len(solution_str)\n")
    (tmp_path / "scores.py").write_text("raise RuntimeError('the repository comes first')\n", encoding="utf-8")
    (tmp_path / "more.py").write_text(
        "async def half(messages, ground_truth, metadata): return 0.5\n", encoding="utf-8"
    )
    done = osmosis(
        *("eval", "--mcp", "repo/mcp", "--model", "offline/oracle", "--json", "--fail-under", "0.75"),
        *("--eval-fn", "scores:length", "--eval-fn", "more:half", "--eval-fn", "exact"),
        cwd=tmp_path,
    )
    means = {name: scores["mean"] for name, scores in done.json["summary"]["eval_fns"].items()}
    assert means == {"scores:length": pytest.approx(4 / 3), "more:half": 0.5, EXACT_NAME: 1.0}
    assert done.code == 1
    assert "more:half: the mean 0.500 is under 0.75 (--fail-under)" in done.stderr
    assert "scores:length: the mean" not in done.stderr


def test_a_baseline_on_the_same_rows(osmosis: Osmosis, repo: Path) -> None:
    """The new model solves the first two rows, the old one the last two."""

    def script(request: Request) -> Reply:
        row = row_of(request)
        solved = row in ((0, 1) if request.model == "new" else (1, 2))
        return text(ROWS[row]["ground_truth"] if solved else "?", completion_tokens=1 if request.model == "new" else 2)

    with ScriptedEndpoint(script, models=["new", "old"]).run_in_thread() as endpoint:
        models = ["--base-url", endpoint.url, "--model", "new", "--baseline-model", "old"]
        models += ["--baseline-base-url", endpoint.url, "--baseline-api-key", "sk-of-the-baseline"]
        done = osmosis("eval", *models, "-o", "out.json", cwd=repo)
        asked = {request.model: request.headers.get("authorization") for request in endpoint.chats}
    assert done.code == 0, done.stderr
    assert asked == {"new": None, "old": "Bearer sk-of-the-baseline"}
    result = documented("eval", (repo / "out.json").read_text(encoding="utf-8"))
    assert result["config"]["baseline_model"] == "old"
    assert result["summary"]["total_tokens"] == 33
    baseline = result["baseline"]
    assert (baseline["model"], baseline["total_tokens"]) == ("old", 36)
    comparison = baseline["comparison"][EXACT_NAME]
    assert (comparison["wins"], comparison["losses"], comparison["ties"]) == (1, 1, 1)
    assert comparison["mean_difference"] == 0.0
    low, high = comparison["confidence_interval"]
    assert low == pytest.approx(-high)
    assert high > 0
    assert [row["runs"][0]["scores"][EXACT_NAME] for row in baseline["rows"]] == [0.0, 1.0, 1.0]
    table = lines(done.stdout)
    assert any(re.match(r"baseline old at .*, on the same rows", line) for line in table)
    assert "function baseline win loss tie difference 95 % CI" in table
    assert any(re.match(re.escape(EXACT_NAME) + r" 0\.667 ± 0\.\d+ 1 1 1 \+0\.000 -", line) for line in table)


def write_jsonl(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(rows), encoding="utf-8")


def write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, [name.upper() for name in rows[0]])
        writer.writeheader()
        writer.writerows({name.upper(): value for name, value in row.items()} for row in rows)


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


LEVEL = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def position(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    info = {name.lower(): value for name, value in extra_info.items()}
    return info["row_index"] + float(info["level"]) / 10 + float(solution_str == ground_truth) / 100
"""


FORMATS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".parquet": write_parquet}


def run_part(suffix: str, folder: Path) -> Finished:
    repo = write_repo(folder / "repo", rewards=LEVEL)
    (repo / "test_data.jsonl").unlink()
    last = {**ROWS[0], "user_prompt": "What is 9 + 9?", "ground_truth": "18", "level": 9}
    FORMATS[suffix](repo / f"rows{suffix}", [*ROWS, last])
    part = ["--data", f"rows{suffix}", "--offset", "1", "--limit", "2"]
    return run_osmosis("test", *part, "--model", "offline/oracle", "--json", cwd=repo)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_part_of_a_dataset_of_each_format(suffix: str, tmp_path: Path) -> None:
    done = run_part(suffix, tmp_path)
    assert done.code == 0, done.stderr
    assert done.json["summary"]["total"] == 2
    # The position is the one in the file, for the functions, too.
    found = [(row["row_index"], row["reward"]) for row in done.json["results"]]
    assert found == [(1, pytest.approx(1.31)), (2, pytest.approx(2.51))]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no modes")
def test_a_results_file_that_cant_be_written_keeps_the_earlier_one(repo: Path, osmosis: Osmosis) -> None:
    folder = repo / "kept"
    folder.mkdir()
    earlier = folder / "results.json"
    earlier.write_text("earlier", encoding="utf-8")

    def script(request: Request) -> Reply:
        # By the time the run ends, there is a folder in the file's place.
        if earlier.is_file():
            earlier.rename(repo / "earlier.json")
            earlier.mkdir()
        return text("1")

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        done = osmosis("test", "--base-url", endpoint.url, "--model", "m", "-o", str(earlier), cwd=repo)
    assert done.code == 1
    assert f"{earlier} could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert (repo / "earlier.json").read_text(encoding="utf-8") == "earlier"


def test_what_a_run_leaves_can_be_read_by_its_owner_alone(repo: Path, osmosis: Osmosis) -> None:
    assert osmosis("test", "--model", "offline/empty", "--cache", cwd=repo).code == 0
    made = [repo / ".osmosis", repo / ".osmosis" / "runs.db"]
    assert [path.stat().st_mode & 0o077 for path in made] == [0, 0]


def test_a_pipe_among_the_tools_is_not_waited_for(repo: Path, osmosis: Osmosis) -> None:
    os.mkfifo(repo / "mcp" / "pipe.py")
    assert osmosis("test", "--model", "offline/empty", cwd=repo).code == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_gets_a_live_bar(repo: Path) -> None:
    """The last row waits until the bar has shown the others, so the drawing doesn't depend on timing."""
    import pty

    from osmosis_ai.testing import Gate

    gate = Gate()

    def script(request: Request) -> Reply:
        reply = text(ROWS[row_of(request)]["ground_truth"])
        return reply.after(gate) if row_of(request) == 2 else reply

    ours, theirs = pty.openpty()
    with ScriptedEndpoint(script).run_in_thread() as endpoint, (repo / "out").open("wb") as out:
        process = subprocess.Popen(
            [str(COMMAND), "test", "--base-url", endpoint.url, "--model", "scripted"],
            cwd=repo,
            env=clean_environment(TERM="xterm-256color", COLUMNS="120"),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=theirs,
        )
        os.close(theirs)
        drawn = b""
        try:
            while chunk := read_terminal(ours):
                drawn += chunk
                if b"2/3" in drawn and b"mean score 1.000" in drawn:
                    gate.open()
        finally:
            gate.open()
            os.close(ours)
            code = process.wait(timeout=60)
    assert code == 0
    shown = drawn.decode("utf-8")
    assert "━" in shown
    for part in ("2/3", "/s", "mean score 1.000", "0 failed", "30 tokens"):
        assert part in shown
    # It is redrawn in place, and nothing of it is left at the end, nor in the results.
    assert "\x1b[2K" in shown
    assert "2/3" not in (repo / "out").read_text(encoding="utf-8")


def read_terminal(descriptor: int) -> bytes:
    """Read the next bytes; none at the end, where a pseudo-terminal raises an error on Linux."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def test_a_dash_is_stdout_wherever_there_is_an_output_file(osmosis: Osmosis, repo: Path) -> None:
    done = osmosis("eval", "--model", "offline/oracle", "-o", "-", cwd=repo)
    assert documented("eval", done.stdout)["summary"]["total_runs"] == 3
    exported = osmosis("runs", "export", "-o", "-", cwd=repo)
    assert len(exported.stdout.splitlines()) == 3
    assert not (repo / "-").exists()


def test_an_unknown_suffix_of_an_export_is_an_error_that_lists_the_formats(osmosis: Osmosis, repo: Path) -> None:
    osmosis("eval", "--model", "offline/oracle", cwd=repo)
    done = osmosis("runs", "export", "-o", "x.csv", cwd=repo)
    assert (done.code, done.stdout) == (2, "")
    assert (
        "-o x.csv: no export format has the suffix .csv; use one of jsonl (.jsonl), parquet (.parquet)" in done.stderr
    )
    assert not (repo / "x.csv").exists()
    assert osmosis("runs", "export", "-o", "x.csv", "--format", "jsonl", cwd=repo).code == 0
