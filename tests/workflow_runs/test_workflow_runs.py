"""`--rollout`: rollouts of a repository's own rollout server, here one without an SDK on the current interpreter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import run_osmosis
from osmosis_ai.testing import ScriptedEndpoint, by_turn, status, text, tool_call

SERVERS = Path(__file__).parents[1] / "runtime" / "worker" / "workflows"

EVAL = ("eval", "--rollout", "rollouts/plain", "-d", "rows.jsonl")
TOOLS = """
from fastmcp import Context, FastMCP

mcp = FastMCP("tools")
counts = {}


@mcp.tool
def count(context: Context) -> int:
    counts[context.session_id] = counts.get(context.session_id, 0) + 1
    return counts[context.session_id]


@mcp.tool
def divide(by: int) -> float:
    return 1 / by
"""
HALF = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def half(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 0.5
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "rollouts" / "plain"
    folder.mkdir(parents=True)
    shutil.copy(SERVERS / "plain_rollout.py", folder / "main.py")
    return tmp_path


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(by_turn(text("hm"), text("42"))).run_in_thread() as served:
        yield served


def rows(workspace: Path, *tasks: str, truth: str = "42") -> Path:
    path = workspace / "rows.jsonl"
    lines = [{"system_prompt": "Compute.", "user_prompt": task, "ground_truth": truth} for task in tasks]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def evaluate(
    workspace: Path, endpoint: ScriptedEndpoint, *options: str, env: dict[str, str] | None = None
) -> dict[str, Any]:
    model = ["--base-url", endpoint.url, "--model", "scripted"]
    given = ["--rollout", "rollouts/plain", "-d", "rows.jsonl", *model, "--json", *options]
    finished = run_osmosis("eval", *given, cwd=workspace, env=env)
    assert finished.stdout, finished.stderr
    left = [each for each in psutil.process_iter(["cmdline"]) if str(workspace) in " ".join(each.info["cmdline"] or [])]
    assert left == []
    return finished.json


def stored(workspace: Path) -> list[dict[str, Any]]:
    """The latest run's rollouts, in the order of the rows."""
    shown = run_osmosis("runs", "show", "--json", cwd=workspace)
    return sorted(shown.json["rollouts"], key=lambda rollout: rollout["row_index"])


def values(workspace: Path) -> list[float | None]:
    return [rollout["scores"].get("plain", {}).get("value") for rollout in stored(workspace)]


def test_rewards_become_scores_and_the_model_s_calls_the_trajectory(
    workspace: Path, endpoint: ScriptedEndpoint
) -> None:
    rows(workspace, "6 × 7?")
    results = evaluate(workspace, endpoint)
    assert results["rows"][0]["runs"][0]["scores"] == {"plain": 1.0}
    (rollout,) = run_osmosis("runs", "show", "--row", "0", "--json", cwd=workspace).json["rollouts"]
    messages = [message["content"] for message in rollout["messages"]]
    assert messages == ["Compute.", "6 × 7?", "hm", "Are you sure?", "42"]
    assert rollout["agent"]["metrics"] == {"turns": 2}
    assert len(rollout["turns"]) == 2
    assert [request.body["model"] for request in endpoint.chats] == ["scripted"] * 2


def test_failures_of_workflow_and_grader_are_told_apart(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    rows(workspace, "raise", "grader breaks", "nan", "fine")
    evaluate(workspace, endpoint)
    raised, broken, nan, _ = stored(workspace)
    failure = raised["failure"]
    assert (failure["origin"], failure["kind"], failure["message"]) == (
        "agent",
        "exception",
        "RuntimeError: the workflow broke",
    )
    # Its line comes from the traceback in the server's output.
    line = (workspace / failure["file"]).read_text(encoding="utf-8").splitlines()[failure["line"] - 1]
    assert (failure["file"], line.strip()) == ("rollouts/plain/main.py", 'raise RuntimeError("the workflow broke")')
    assert broken["scores"]["plain"]["failure"]["message"] == "no such key"
    assert nan["scores"]["plain"]["failure"]["message"] == "the grader set nan as the reward"
    assert values(workspace) == [None, None, None, 1.0]


def test_a_workflow_and_its_grader_run_on_our_own_sdk(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    main = workspace / "rollouts" / "plain" / "main.py"
    shutil.copy(SERVERS / "raw_rollout.py", main)
    (main.parent / "pyproject.toml").write_text("[project]\nname = 'not installed'\n", encoding="utf-8")
    rows(workspace, "6 × 7?", "raise")
    evaluate(workspace, endpoint, "--sdk", "own")
    assert values(workspace) == [1.0, None]
    failure = stored(workspace)[1]["failure"]
    assert (failure["origin"], failure["message"]) == ("agent", "RuntimeError: the workflow broke")
    line = (workspace / failure["file"]).read_text(encoding="utf-8").splitlines()[failure["line"] - 1]
    assert (failure["file"], line.strip()) == ("rollouts/plain/main.py", 'raise RuntimeError("the workflow broke")')
    assert failure["detail"].startswith("Traceback (most recent call last, this repository's code only):")


def test_a_workflow_calls_the_repository_s_tools_in_its_own_session(workspace: Path) -> None:
    shutil.copy(SERVERS / "tools_rollout.py", workspace / "rollouts" / "plain" / "main.py")
    (workspace / "mcp").mkdir()
    (workspace / "mcp" / "main.py").write_text(TOOLS, encoding="utf-8")
    rows(workspace, "6 × 7?", "8 × 9?")
    script = by_turn(tool_call("count"), tool_call("count"), tool_call("divide", by=0), text("done"))
    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        evaluate(workspace, endpoint)
    # Each rollout has counted its own calls: one of its code's own, and two of the model's.
    assert values(workspace) == [3.0, 3.0]
    shown = run_osmosis("runs", "show", "--row", "0", "--json", cwd=workspace).json
    (rollout,) = shown["rollouts"]
    calls = [(call["turn"], call["name"], call.get("error")) for call in rollout["tool_calls"]]
    assert calls == [(0, "count", None), (0, "count", None), (1, "count", None), (2, "divide", "exception")]
    assert rollout["tool_calls"][3]["failure"]["file"] == "mcp/main.py"
    roles = [message["role"] for message in rollout["messages"]]
    assert roles == ["system", "user", *["assistant", "tool"] * 3, "assistant"]


def test_a_model_failure_is_the_model_s(workspace: Path) -> None:
    rows(workspace, "6 × 7?")
    with ScriptedEndpoint(lambda request: status(401)).run_in_thread() as endpoint:
        evaluate(workspace, endpoint)
    (rollout,) = stored(workspace)
    assert (rollout["failure"]["origin"], rollout["failure"]["kind"]) == ("model", "auth")


def test_a_limit_of_turns_holds(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    rows(workspace, "6 × 7?")
    evaluate(workspace, endpoint, "--max-turns", "1")
    (rollout,) = stored(workspace)
    assert (rollout["finish_reason"], rollout["failure"]) == ("max_turns", None)
    assert len(endpoint.chats) == 1


def test_a_workflow_that_kills_the_server_costs_only_its_own_rollout(
    workspace: Path, endpoint: ScriptedEndpoint
) -> None:
    rows(workspace, "one", "die", "two", "three")
    evaluate(workspace, endpoint)
    assert values(workspace) == [1.0, None, 1.0, 1.0]
    failure = stored(workspace)[1]["failure"]
    assert (failure["origin"], failure["kind"]) == ("worker", "died")
    assert failure["message"] == "the rollout server ended with code 3"


def test_a_server_gets_the_key_that_it_asks_for(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    rows(workspace, "6 × 7?")
    evaluate(workspace, endpoint, env={"OSMOSIS_ROLLOUT_API_KEY": "the key"})
    assert values(workspace) == [1.0]


@pytest.mark.parametrize("options", [("--isolation", "rollout"), ("--workers", "0")])
def test_rollouts_run_under_every_isolation(
    workspace: Path, endpoint: ScriptedEndpoint, options: tuple[str, str]
) -> None:
    rows(workspace, "6 × 7?")
    evaluate(workspace, endpoint, *options)
    assert values(workspace) == [1.0]


def edit(workspace: Path, before: str, after: str) -> None:
    main = workspace / "rollouts" / "plain" / "main.py"
    source = main.read_text(encoding="utf-8")
    assert before in source
    main.write_text(source.replace(before, after), encoding="utf-8")


def test_a_server_gets_as_many_rollouts_as_it_runs_at_a_time(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    rows(workspace, "one", "two", "three")
    edit(workspace, '"status": "ok"', '"status": "ok", "concurrency": {"max_concurrent": 1}')
    edit(workspace, 'request.app["tasks"].add(task)', 'app_is_free(request.app["tasks"], task)')
    busy = """def app_is_free(tasks, task):
    if any(not each.done() for each in tasks):
        os._exit(3)
    tasks.add(task)


async def run("""
    edit(workspace, "async def run(", busy)
    evaluate(workspace, endpoint)
    assert values(workspace) == [1.0] * 3


def test_a_rollout_may_declare_our_own_sdk(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    rows(workspace, "6 × 7?")
    declared = workspace / "rollouts" / "plain" / "pyproject.toml"
    own = '[project]\nname = "x"\nversion = "1"\ndependencies = ["no-such-package-1"]\n[tool.osmosis]\nsdk = "own"\n'
    declared.write_text(own, encoding="utf-8")
    evaluate(workspace, endpoint)
    assert values(workspace) == [1.0]
    declared.write_text(own.replace("own", "other"), encoding="utf-8")
    given = ["--rollout", "rollouts/plain", "-d", "rows.jsonl", "--model", "offline/empty"]
    assert "write declared or own" in run_osmosis("eval", *given, cwd=workspace).stderr


def test_a_server_that_does_not_start_ends_the_run_with_its_last_words(
    workspace: Path, endpoint: ScriptedEndpoint
) -> None:
    rows(workspace, "6 × 7?")
    (workspace / "rollouts" / "plain" / "main.py").write_text("import no_such_module\n", encoding="utf-8")
    given = ["--rollout", "rollouts/plain", "-d", "rows.jsonl", "--model", "m", "--base-url", endpoint.url]
    finished = run_osmosis("eval", *given, cwd=workspace)
    assert finished.code == 2
    assert "ended with code 1 before it was healthy" in finished.stderr
    assert "No module named 'no_such_module'" in finished.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rollout", "rollouts/none"], "there is no script"),
        (["--rollout", "rollouts"], "there is no main.py"),
        (["--rollout", "rollouts/plain", "--mcp", "mcp"], "use one of them"),
        (["--sdk", "own"], "name one with --rollout"),
        (["--rollout", "rollouts/plain", "--isolation", "sandbox"], "can't be in a sandbox"),
    ],
)
def test_conflicting_options_are_explained(workspace: Path, options: list[str], said: str) -> None:
    rows(workspace, "6 × 7?")
    finished = run_osmosis("eval", "-d", "rows.jsonl", "--model", "offline/empty", *options, cwd=workspace)
    assert finished.code == 2
    assert said in " ".join(finished.stderr.split())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve", "--rollout", "rollouts/plain"], "No such option"),
        (["test", "--interactive", "--rollout", "rollouts/plain", "--model", "offline/empty"], "don't go together"),
    ],
)
def test_commands_without_support_for_rollout_servers_say_so(workspace: Path, command: list[str], said: str) -> None:
    rows(workspace, "6 × 7?")
    finished = run_osmosis(*command, cwd=workspace)
    assert finished.code == 2
    assert said in " ".join(finished.stderr.split())


def test_a_saved_rollout_runs_again_and_a_finished_run_is_resumed(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    rows(workspace, "raise", "fine")
    evaluate(workspace, endpoint)
    calls = len(endpoint.chats)
    evaluate(workspace, endpoint, "--retry-failed")
    assert len(endpoint.chats) == calls + 2
    main = workspace / "rollouts" / "plain" / "main.py"
    main.write_text(main.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    given = ["--rollout", "rollouts/plain", "-d", "rows.jsonl", "--base-url", endpoint.url, "--model", "scripted"]
    refused = run_osmosis("eval", *given, "--retry-failed", cwd=workspace)
    assert refused.code == 2
    assert "code" in refused.stderr


def test_samples_that_a_grader_removes_do_not_count(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    rows(workspace, "remove", "fine")
    (workspace / "reward_fn").mkdir()
    (workspace / "reward_fn" / "half.py").write_text(HALF, encoding="utf-8")
    summary = evaluate(workspace, endpoint, "--fail-under", "0.5")["summary"]
    assert {name: summary[name] for name in ("passed", "failed", "missing", "removed")} == {
        "passed": 1, "failed": 0, "missing": 0, "removed": 1
    }  # fmt: skip
    for name, mean in {"plain": 1.0, "reward_fn.half:half": 0.5}.items():
        found = summary["eval_fns"][name]
        assert (found["mean"], found["count"], found["scored"], found["scoring_errors"]) == (mean, 1, 1, 0)
    removed, kept = stored(workspace)
    assert (removed["finish_reason"], removed["failure"], removed["scores"]) == ("removed", None, {})
    assert len(kept["scores"]) == 2

    totals = run_osmosis("runs", "show", "--json", cwd=workspace).json["functions"]
    assert {total["function"]: (total["mean"], total["rollouts"]) for total in totals} == {
        "plain": (1.0, 1), "reward_fn.half:half": (0.5, 1)
    }  # fmt: skip
    run_osmosis("runs", "rescore", cwd=workspace)
    assert stored(workspace)[0]["scores"] == {}
    short = run_osmosis("runs", "show", "--below", "2", "--json", cwd=workspace).json["rollouts"]
    assert [rollout["row_index"] for rollout in short] == [1]
    assert run_osmosis("runs", "export", "--format", "jsonl", "-o", "-", cwd=workspace).stdout.count("\n") == 1
    compared = run_osmosis("runs", "compare", "latest", "latest", "--json", cwd=workspace).json
    assert {name: each["rows"] for name, each in compared["functions"].items()} == {
        "plain": 1, "reward_fn.half:half": 1
    }  # fmt: skip

    shown = run_osmosis(*EVAL, "--base-url", endpoint.url, "--model", "scripted", cwd=workspace).stdout
    assert "1 of 2 rollouts completed, 1 removed" in shown


def test_a_label_and_metadata_reach_the_grader(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    row = {"system_prompt": "Compute.", "user_prompt": "6 × 7?", "label": 42, "metadata": {"level": 1}}
    (workspace / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    evaluate(workspace, endpoint)
    assert values(workspace) == [1.0]
