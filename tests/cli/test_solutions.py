"""Reference solutions: played, checked, and hidden from models and functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Osmosis
from repos import EXACT, write_repo
from running import running
from watching import Watching, redone, rewards, write

TELLING = """
import json

from fastmcp import Context, FastMCP

mcp = FastMCP("telling")


@mcp.tool
def tell(ctx: Context) -> str:
    \"\"\"Tell what is known of the rollout.\"\"\"
    return repr(ctx.request_context.meta)
"""

LOOKING = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def simple(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return float("the plan" not in repr(extra_info) and extra_info["level"] == 1)


def full(messages: list, ground_truth: str, metadata: dict) -> float:
    return float("the plan" not in repr(metadata) and metadata["level"] == 1)
"""

LOOP = """
from osmosis_ai.rollout import RolloutAgentLoop


class Loop(RolloutAgentLoop):
    name = "looking"

    def get_tools(self, request):
        return []

    async def run(self, ctx):
        messages = [*ctx.request.messages, {"role": "assistant", "content": "no"}]
        assert ctx.request.metadata["level"] == 1
        seen = "the plan" in repr(vars(ctx)) or "the plan" in ctx.request.model_dump_json()
        return ctx.complete(messages, reward=0.0 if seen else 1.0)
"""


def row(prompt: str, **columns: Any) -> dict[str, Any]:
    return {"system_prompt": "Use the tools.", "user_prompt": prompt, **columns}


def add(a: Any, b: Any) -> dict[str, Any]:
    return {"tool": "add", "arguments": {"a": a, "b": b}}


SOLVED = [
    row("2 + 3 + 4", ground_truth="9", solution=[add(2, 3), add("{{result[0]}}", 4), "{{result[1]}}"]),
    row("1 + 1", ground_truth="2", solution=[add(1, 1), "{{result[0]}}"]),
    row("7", ground_truth="7"),
]


def test_without_a_model_solutions_are_played_and_ground_truths_answered(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=SOLVED)
    done = osmosis("test", "--json", cwd=repo)
    assert done.code == 0, done.stderr
    assert "offline/oracle is a stand-in, not a model" in done.stderr
    assert done.json["config"]["model"] == "offline/oracle"
    assert rewards(done.json) == [1.0, 1.0, 1.0]
    assert [result["tool_calls"] for result in done.json["results"]] == [2, 1, 0]


@pytest.mark.parametrize("model", [[], ["--model", "offline/oracle"], ["--model", "offline/smoke"]])
def test_rows_without_a_reference_get_a_smoke_test(osmosis: Osmosis, tmp_path: Path, model: list[str]) -> None:
    repo = write_repo(tmp_path / "repo", rows=[row("anything"), row("else")], rewards=None)
    done = osmosis("test", *model, "--json", cwd=repo)
    assert done.code == 0, done.stderr
    assert "offline/smoke is a stand-in, not a model" in done.stderr
    assert (done.json["config"]["model"], done.json["config"]["stand_in"]) == ("offline/smoke", True)
    assert done.json["summary"]["tools"]["add"]["calls"] == 2
    assert done.json["summary"]["tools"]["add"]["errors"] == {}


def test_a_solution_that_is_wrong_stops_the_run_before_it_begins(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=[SOLVED[0], row("x", solution=[add(1, "{{result[3]}}")])])
    done = osmosis("test", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "-q", cwd=repo)
    assert (done.code, done.stdout) == (2, "")
    assert "test_data.jsonl, line 2: column solution: step 0: {{result[3]}} refers to a call" in done.stderr


def test_a_reference_to_what_no_result_has_is_a_failed_rollout(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=[row("x", solution=[add(1, 2), "{{result[0].sum}}"]), SOLVED[1]])
    done = osmosis("test", "--json", cwd=repo)
    assert done.code == 1
    failed, passed = done.json["results"]
    assert failed["error"] == (
        "model: row 0's solution can't continue: {{result[0].sum}}: there is no 'sum' in the result: 3"
    )
    assert passed["reward"] == 1.0


def test_neither_tools_nor_functions_see_it(osmosis: Osmosis, tmp_path: Path) -> None:
    # The oracle answers with what the tool has told.
    solution = [{"tool": "tell"}, {"tool": "the plan"}, "told: {{result[0]}}"]
    rows = [row("x", ground_truth="the truth", level=1, solution=solution)]
    repo = write_repo(tmp_path / "repo", main=TELLING, rewards=LOOKING, rows=rows)
    done = osmosis(
        *("eval", "--eval-fn", "simple", "--eval-fn", "reward_fn.rewards:full", "--json", "--isolation", "rollout"),
        cwd=repo,
    )
    assert done.code == 0, done.stderr
    assert {name: value["mean"] for name, value in done.json["summary"]["eval_fns"].items()} == {
        "reward_fn.rewards:simple": 1.0,
        "reward_fn.rewards:full": 1.0,
    }
    shown = osmosis("runs", "show", "latest", "--row", "0", cwd=repo).stdout
    told = next(line for line in shown.splitlines() if line.startswith("told: "))
    assert "level" in told
    assert "the plan" not in told
    assert "the truth" not in told


def test_an_agent_loop_does_not_see_it(osmosis: Osmosis, tmp_path: Path) -> None:
    rows = [row("x", ground_truth="1", level=1, solution=[{"tool": "the plan"}])]
    repo = write_repo(tmp_path / "repo", rows=rows, rewards=None)
    (repo / "loop.py").write_text(LOOP, encoding="utf-8")
    done = osmosis("eval", "-m", "loop:Loop", "--json", cwd=repo)
    assert done.code == 0, done.stderr
    assert done.json["summary"]["eval_fns"]["looking"]["mean"] == 1.0


@pytest.mark.in_process
def test_a_tool_that_is_edited_flips_the_rows_whose_solutions_call_it(tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=SOLVED)
    main = (repo / "mcp" / "main.py").read_text(encoding="utf-8")
    data = (repo / "test_data.jsonl").read_text(encoding="utf-8")
    with running("test", "--watch", "--json", cwd=repo) as command:
        watch = Watching(command, repo, None)
        assert rewards(watch.next()) == [1.0, 1.0, 1.0]
        broken = watch.save({"mcp/main.py": main.replace("a + b", "a - b")})
        assert rewards(broken) == [0.0, 0.0, 1.0]
        assert [flip["row_index"] for flip in broken["iteration"]["flipped"]["failed"]] == [0, 1]
        assert rewards(watch.save({"mcp/main.py": main})) == [1.0, 1.0, 1.0]
        # A solution that is edited is played again, though its row is the same.
        edited = watch.save({"test_data.jsonl": data.replace("{{result[1]}}", "10")})
        assert (rewards(edited)[0], redone(edited)[0]) == (0.0, 3)
        assert edited["results"][0]["row_id"] == broken["results"][0]["row_id"]


def test_validate_plays_solutions(osmosis: Osmosis, tmp_path: Path) -> None:
    wrong = row("3 + 3", ground_truth="6", solution=[add(3, 4), {"tool": "ad"}, "{{result[0]}}"])
    repo = write_repo(tmp_path / "repo", rewards=EXACT, rows=[*SOLVED, wrong])

    def found() -> list[tuple[str, int | None]]:
        findings = osmosis("validate", "--json", cwd=repo).json["findings"]
        return [(one["code"], one["line"]) for one in findings if one["code"] in ("OSM410", "OSM411")]

    assert found() == [("OSM410", 4), ("OSM411", 4)]
    write(repo, {"test_data.jsonl": "".join(json.dumps(one) + "\n" for one in SOLVED)})
    assert found() == []
