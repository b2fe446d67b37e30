"""`osmosis import` on files that other tools wrote: what becomes a run, what becomes rows, and what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import run_osmosis
from osmosis_ai.importers import IMPORT_FORMATS

FILES = Path(__file__).parents[1] / "data" / "imports"
REWARD = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def right(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(ground_truth in solution_str)
"""
LOGS = {
    "sums.eval": ("inspect_ai 0.3.285", "sums", ["includes", "match"], 4),
    "sums.json": ("inspect_ai 0.3.285", "sums", ["includes", "match"], 2),
    "traces.jsonl": ("verifiers 0.4.0", "my-sums", ["correct"], 4),
    "vf-eval": ("verifiers 0.1.14", "my_sums", ["reward"], 4),
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "reward_fn").mkdir()
    (tmp_path / "reward_fn" / "right.py").write_text(REWARD, encoding="utf-8")
    return tmp_path


def imported(file: Path, cwd: Path, *options: str, code: int = 0) -> dict[str, Any]:
    done = run_osmosis("import", file, "--json", *options, cwd=cwd)
    assert done.code == code, done.stderr
    return done.json


def shown(cwd: Path, *options: str) -> dict[str, Any]:
    done = run_osmosis("runs", "show", "--json", *options, cwd=cwd)
    assert done.code == 0, done.stderr
    return done.json


@pytest.mark.parametrize("name", LOGS)
def test_a_log_becomes_a_run_that_says_where_it_comes_from(name: str, tmp_path: Path) -> None:
    tool, task, scorers, rollouts = LOGS[name]
    (run,) = imported(FILES / name, tmp_path)["runs"]
    source = run["imported"]
    assert (source["tool"], source["task"], source["scorers"]) == (tool, task, scorers)
    assert (run["command"], run["status"]) == ("import", "finished")
    assert (run["rollouts"], run["planned"], run["failed"], run["cost_usd"]) == (rollouts, rollouts, 0, None)
    (rollout,) = shown(tmp_path, "latest", "--row", "0", "--run-index", "0")["rollouts"]
    assert [message["role"] for message in rollout["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = rollout["messages"][2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert rollout["messages"][3]["content"] == "5"
    assert [call["error"] for call in rollout["tool_calls"]] == [None]
    assert (rollout["row"]["user_prompt"], rollout["row"]["ground_truth"]) == ("What is 2 + 3?", "5")
    assert {score["value"] for score in rollout["scores"].values()} == {1.0}


def test_figures_are_those_of_the_tool(tmp_path: Path) -> None:
    (run,) = imported(FILES / "sums.eval", tmp_path)["runs"]
    assert run["functions"] == {"includes": 0.75, "match": 0.75}
    assert (run["model"], run["stand_in"], run["n"], run["total_tokens"]) == ("mockllm/model", True, 2, 252)
    (last,) = shown(tmp_path, "latest", "--row", "1", "--run-index", "1")["rollouts"]
    assert last["scores"]["match"]["value"] == 0.0
    assert [turn["usage"]["total_tokens"] for turn in last["turns"]] == [27, 36]


def test_runs_of_two_tools_compare_on_the_rows_both_have(tmp_path: Path, repository: Path) -> None:
    ids = [imported(FILES / name, repository)["runs"][0]["id"] for name in ("sums.eval", "vf-eval")]
    for run in ids:
        assert run_osmosis("runs", "rescore", run, cwd=repository).code == 0
    compared = run_osmosis("runs", "compare", *ids, "--json", cwd=repository).json
    # The other row has a column more in one of them.
    assert compared["rows"] == {"shared": 1, "only_a": 1, "only_b": 1}
    assert list(compared["functions"]) == ["reward_fn.right:right"]


def test_a_run_is_imported_once(tmp_path: Path) -> None:
    first = imported(FILES / "traces.jsonl", tmp_path)["runs"][0]["id"]
    again = run_osmosis("import", FILES / "traces.jsonl", cwd=tmp_path)
    assert (again.stdout.strip(), again.stderr) == (first, "traces.jsonl: already imported\n")


def test_our_own_traces_come_back_as_they_were(tmp_path: Path) -> None:
    imported(FILES / "sums.eval", tmp_path)
    run_osmosis("runs", "export", "--format", "verifiers", "-o", "traces.jsonl", cwd=tmp_path)
    before = shown(tmp_path, "latest", "--row", "1")["rollouts"]
    imported(tmp_path / "traces.jsonl", tmp_path, "--name", "back")
    for old, new in zip(before, shown(tmp_path, "latest", "--row", "1")["rollouts"], strict=True):
        assert (new["id"], new["row_id"]) == (old["id"], old["row_id"])
        assert [message["content"] for message in new["messages"]] == [each["content"] for each in old["messages"]]
        assert {name: score["value"] for name, score in new["scores"].items()} == {"includes": 0.0, "match": 0.0} or (
            new["run_index"] == 0
        )


def test_tokens_and_branches_of_a_trace(tmp_path: Path) -> None:
    line = json.loads((FILES / "traces.jsonl").read_text(encoding="utf-8").splitlines()[0])
    (trace,) = line["traces"]
    said = {"role": "assistant", "content": "5"}
    asked = {"role": "user", "content": "What is 2 + 3?"}
    trace["nodes"] = [
        {"message": asked, "token_ids": [1, 2]},
        {"message": {"role": "assistant", "content": "Hm."}, "parent": 0, "sampled": True},
        {"message": said, "parent": 0, "sampled": True, "token_ids": [3, 4], "mask": [False, True], "logprobs": [-0.5]},
    ]
    trace["calls"] = []
    judge = {**trace, "id": "judge", "agent": {**trace["agent"], "name": "judge", "trainable": False}}
    line["traces"].append(judge)
    (tmp_path / "t.jsonl").write_text(json.dumps(line), encoding="utf-8")
    (run,) = imported(tmp_path / "t.jsonl", tmp_path)["runs"]
    assert run["imported"]["left_out"] == {"traces of judge, an agent that isn't trained": 1}
    (rollout,) = shown(tmp_path, "latest", "--row", "0")["rollouts"]
    assert rollout["messages"] == [asked, said]
    assert [each[-1]["content"] for each in rollout["agent"]["conversations"]] == ["Hm."]
    (turn,) = rollout["turns"]
    assert turn["token_ids"] == {"prompt_token_ids": [1, 2, 3], "token_ids": [4]}
    assert turn["logprobs"]["content"][0]["logprob"] == -0.5


def changed(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> Path:
    log = json.loads((FILES / "sums.json").read_text(encoding="utf-8"))
    change(log)
    (tmp_path / "changed.json").write_text(json.dumps(log), encoding="utf-8")
    return tmp_path / "changed.json"


def test_errors_limits_and_odd_scores_of_a_sample(tmp_path: Path) -> None:
    def change(log: dict[str, Any]) -> None:
        failed, limited = log["samples"]
        failed["error"] = {"message": "no sandbox", "traceback": "Traceback …"}
        failed["scores"] = None
        limited["limit"] = {"type": "token", "limit": 10}
        limited["scores"] = {
            "parts": {"value": {"a": "P", "b": True}},
            "said": {"value": "green"},
            "huge": {"value": 10**400},
            "unscored": {"value": float("nan")},
        }
        limited["messages"][3]["error"] = {"type": "timeout", "message": "too slow"}
        log["status"] = "error"

    (run,) = imported(changed(change, tmp_path), tmp_path)["runs"]
    assert (run["status"], run["failed"]) == ("interrupted", 1)
    failed, limited = shown(tmp_path, "latest", "--row", "0")["rollouts"]
    assert (failed["failure"]["message"], failed["failure"]["detail"]) == ("no sandbox", "Traceback …")
    assert limited["finish_reason"] == "max_tokens_total"
    assert {name: score["value"] for name, score in limited["scores"].items()} == {
        "parts.a": 0.5,
        "parts.b": 1.0,
        "said": None,
        "huge": None,
    }
    assert limited["tool_calls"][0]["error"] == "timeout"


def test_times_and_texts_that_cannot_be_are_unknown(tmp_path: Path) -> None:
    content = (FILES / "traces.jsonl").read_text(encoding="utf-8").splitlines()[0]
    line = json.loads(content)
    line["traces"][0]["timing"] = {"start": 1e308, "agent": {"start": 5, "end": -1e308}, "scoring": {"end": 1e300}}
    line["traces"][0]["nodes"][1]["message"]["content"] = "half a pair: \ud800"
    line["traces"][0]["calls"][0]["time"] = {"start": 0, "end": 1e300}
    (tmp_path / "t.jsonl").write_text(json.dumps(line), encoding="utf-8")
    imported(tmp_path / "t.jsonl", tmp_path)
    (rollout,) = shown(tmp_path, "latest", "--row", "0")["rollouts"]
    assert (rollout["duration_ms"], rollout["turns"][0]["duration_ms"]) == (0.0, 0.0)
    assert rollout["messages"][1]["content"] == "half a pair: ?"


def test_a_sample_that_cannot_be_read_is_reported_and_left_out(tmp_path: Path) -> None:
    def change(log: dict[str, Any]) -> None:
        log["samples"][0]["messages"][1]["role"] = 7

    result = imported(changed(change, tmp_path), tmp_path, code=1)
    (problem,) = result["problems"]
    assert problem["where"] == "sample 0"
    assert "$.messages[1].role" in problem["reason"]
    (run,) = result["runs"]
    assert (run["rollouts"], run["planned"], run["imported"]["unreadable"]) == (1, 2, 1)


def test_a_damaged_line_and_a_damaged_member(tmp_path: Path) -> None:
    lines = (FILES / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "t.jsonl").write_text("\n".join([lines[0], lines[1][:90], lines[2]]), encoding="utf-8")
    done = run_osmosis("import", tmp_path / "t.jsonl", cwd=tmp_path)
    assert done.code == 1
    assert "t.jsonl, line 2: not valid JSON" in done.stderr
    whole = bytearray((FILES / "sums.eval").read_bytes())
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        member = archive.getinfo("samples/four_epoch_1.json")
    whole[member.header_offset + 100 : member.header_offset + 200] = bytes(100)
    (tmp_path / "damaged.eval").write_bytes(whole)
    done = run_osmosis("import", tmp_path / "damaged.eval", cwd=tmp_path)
    assert done.code == 1
    assert "samples/four_epoch_1.json: " in done.stderr
    assert "3 rollouts" in done.stderr


def test_an_archive_with_deflate_and_without_a_header_is_of_a_run_that_did_not_end(tmp_path: Path) -> None:
    log = json.loads((FILES / "sums.json").read_text(encoding="utf-8"))
    start = {"version": 2, "eval": log["eval"], "plan": log["plan"]}
    with zipfile.ZipFile(tmp_path / "cut.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", json.dumps(start))
        archive.writestr("samples/four_epoch_1.json", json.dumps(log["samples"][0]))
    (run,) = imported(tmp_path / "cut.eval", tmp_path)["runs"]
    assert (run["status"], run["rollouts"], run["planned"]) == ("interrupted", 1, 2)


def test_keys_are_masked_and_urls_lose_their_passwords(tmp_path: Path) -> None:
    content = (FILES / "traces.jsonl").read_text(encoding="utf-8")
    content = content.replace("The answer is 5.", "The key is sk-a-very-secret-key.")
    content = content.replace("http://127.0.0.1", "http://user:hidden@127.0.0.1")
    (tmp_path / "t.jsonl").write_text(content, encoding="utf-8")
    done = run_osmosis("import", "t.jsonl", cwd=tmp_path, env={"OPENAI_API_KEY": "sk-a-very-secret-key"})
    assert done.code == 0
    (database,) = (tmp_path / ".osmosis").glob("*.db")
    assert b"hidden@" not in database.read_bytes()
    (rollout, *_) = shown(tmp_path, "latest", "--row", "0")["rollouts"]
    assert "very-secret" not in json.dumps(rollout)


def test_rows_of_a_config_run_as_a_dataset(tmp_path: Path) -> None:
    done = run_osmosis("import", FILES / "promptfooconfig.yaml", "-o", "rows.jsonl", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert done.stderr == (
        "6 rows written to rows.jsonl\n"
        "6 had no system prompt and got “You are a helpful assistant.” (--system-prompt)\n"
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["ground_truth"] for row in rows] == [None, None, "avocado", "avocado", None, None]
    assert rows[3]["user_prompt"] == "Write a concise, funny tweet about avocado toast"
    assert run_osmosis("preview", "rows.jsonl", cwd=tmp_path).code == 0


def test_rows_of_evaluation_rows(tmp_path: Path) -> None:
    result = imported(FILES / "eval_protocol.jsonl", tmp_path, "-o", "rows.jsonl", "--system-prompt", "Add.")
    assert result["rows"] == 2
    first, second = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert first == {
        "system_prompt": "Use the tool.",
        "user_prompt": "What is 2 + 3?",
        "ground_truth": "5",
        "level": "easy",
        "id": "two",
    }
    assert (second["system_prompt"], second["ground_truth"]) == ("Add.", {"answer": 8})


def test_tests_as_csv(tmp_path: Path) -> None:
    (tmp_path / "promptfooconfig.yaml").write_text(
        'prompts:\n  - \'[{"role": "system", "content": "Be {{tone}}."}, {"role": "user", "content": '
        '"{{ question }}"}]\'\ndefaultTest:\n  vars: {tone: short}\ntests: file://tests.csv\n',
        encoding="utf-8",
    )
    (tmp_path / "tests.csv").write_text(
        "question,__expected,__metadata:level,__description\n"
        'Why?,"equals: because",easy,one\n'
        "Who?,somebody\n"
        "How?,llm-rubric: is kind,hard,\n",
        encoding="utf-8",
    )
    result = imported(tmp_path / "promptfooconfig.yaml", tmp_path, "-o", "rows.jsonl", code=1)
    (problem,) = result["problems"]
    assert (problem["where"], problem["reason"]) == ("tests.csv, line 3", "more or fewer cells than the header")
    first, last = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (first["system_prompt"], first["user_prompt"], first["ground_truth"]) == ("Be short.", "Why?", "because")
    assert (first["metadata"], first["description"]) == ({"level": "easy"}, "one")
    assert (last["ground_truth"], last["assert"]) == (None, [{"type": "llm-rubric", "value": "is kind"}])


def test_a_list_of_texts_is_a_row_for_each(tmp_path: Path) -> None:
    (tmp_path / "promptfooconfig.yaml").write_text(
        "prompts: ['{{a}} {{b}} {{n}}']\ntests: [{vars: {a: [x, y], b: [u, v], n: [1, 2]}}]", encoding="utf-8"
    )
    assert imported(tmp_path / "promptfooconfig.yaml", tmp_path, "-o", "rows.jsonl")["rows"] == 4
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["user_prompt"] for row in rows] == ["x u [1, 2]", "x v [1, 2]", "y u [1, 2]", "y v [1, 2]"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("prompts: ['{{a | upper}}']\ntests: [{vars: {a: b}}]", "only {{variables}} are filled in"),
        ("prompts: ['{{a}}']\ntests: [{vars: {b: c}}]", "the prompt has the variable a, but the test doesn't set it"),
        ("prompts: ['file://../secret.txt']\ntests: [{vars: {b: c}}]", "isn't below the config's folder"),
        ("prompts: ['file://prompt.py']\ntests: [{vars: {b: c}}]", "code isn't run"),
        ("tests: [{vars: {b: c, d: e}}]", "there are no prompts"),
        ("a: !!python/object/apply:os.getcwd []\nprompts: [x]", "could not determine a constructor"),
        ("a: &a [x, x]\nb: &b [*a, *a, *a]\nprompts: &c [*b, *c]", "more than 5,000,000 values"),
        ("prompts: [", "while parsing"),
    ],
)
def test_a_config_that_cannot_be_rows_says_why(config: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "promptfooconfig.yaml").write_text(config, encoding="utf-8")
    done = run_osmosis("import", "promptfooconfig.yaml", "-o", "rows.jsonl", cwd=tmp_path)
    assert done.code == 2
    assert reason in done.stderr
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "content", "options", "answer"),
    [
        ("notes.txt", "hello", [], "is in no format that can be imported (inspect: "),
        ("rows.jsonl", '{"user_prompt": "x", "messages": []}', [], "a dataset of rows needs no import"),
        ("log.json", '{"version": 2, "eval": {}, "samples": []}', [], "there are no samples"),
        ("log.json", '{"version": 2, "eval": [', [], "not valid JSON"),
        ("log.eval", "PK no archive", [], "can't be read"),
        ("t.jsonl", '{"traces": [], "task": {}}', [], "line 1: the episode has no trace"),
        ("t.jsonl", '{"messages": []}', [], "name the dataset to write with -o rows.jsonl"),
        ("t.jsonl", '{"messages": []}', ["-o", "rows.jsonl"], "line 1: no user message"),
        ("t.jsonl", '{"messages": []}', ["--format", "other"], "--format other is not one of inspect, verifiers"),
        ("t.jsonl", '{"traces": [], "task": {}}', ["-o", "x.jsonl"], "-o: the files are runs"),
        ("t.jsonl", "[" * 10_000, ["--format", "verifiers"], "line 1: nested more than 200 levels deep"),
    ],
)
def test_files_that_cannot_be_imported_are_refused(
    name: str, content: str, options: list[str], answer: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    done = run_osmosis("import", name, *options, cwd=tmp_path)
    assert (done.code, done.stdout) == (2, "")
    assert answer in done.stderr


def test_every_format_is_an_option_and_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    for each in IMPORT_FORMATS.values():
        assert f"| `{each.name}` |" in page
        assert each.description in page
