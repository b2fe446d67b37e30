"""`osmosis eval-rubric` against a scripted judge: result file, output and exit code."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Finished, Osmosis, documented
from osmosis_ai.records import Verdict
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, status, text
from running import running
from waiting import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"
KEY = "sk-judge-0123456789"
CONFIG = f"""\
version: 1
rubrics:
  - id: followup
    title: Follow-up
    rubric: Is the customer told what happens next?
    model_info: {{provider: openai, model: judge-x, api_base: URL, api_key: {KEY}}}
"""
RECORDS: list[dict[str, Any]] = [
    {"conversation_id": "one", "rubric_id": "followup", "solution_str": "0.9", "human": 1, "original_input": "When?"},
    {"rubric_id": "another", "solution_str": "0.0"},
    {"solution_str": "0.4", "metadata": {"human": "0.5", "channel": "mail"}, "ground_truth": "soon"},
    {"conversation_id": "three", "solution_str": "0.1", "human": False},
]
FUNCTION = """
from osmosis_ai import evaluate_rubric, osmosis_rubric


@osmosis_rubric
def own(solution_str: str, ground_truth: str | None, extra_info: dict) -> float:
    if solution_str == "0.1":
        raise LookupError("no such thing")
    info = {"provider": extra_info["provider"], "model": extra_info["model"]}
    return evaluate_rubric("own", solution_str, info, metadata=extra_info["metadata"])
"""


SAID = ["0.9", "0.1", "0.8", "0.2", "0.7"]


def solution_of(request: Request) -> str:
    found = re.search(r"<solution_\w+>\n(.*)\n</solution", request.messages[1]["content"])
    assert found is not None
    return found[1]


def script(request: Request) -> Reply:
    """A judge that reads its score from the solution."""
    score = float(solution_of(request))
    return text(json.dumps({"score": score, "explanation": f"worth {score}, {KEY}"}))


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        yield endpoint


def prepare(folder: Path, endpoint: ScriptedEndpoint) -> Path:
    """A folder with a rubric file and records."""
    (folder / "rubric_configs.yaml").write_text(CONFIG.replace("URL", endpoint.url), encoding="utf-8")
    lines = "".join(f"{json.dumps(record)}\n" for record in RECORDS)
    (folder / "data.jsonl").write_text(lines, encoding="utf-8")
    return folder


def result_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.iterdir()
    assert re.fullmatch(r"rubric_eval_result_\d+\.json", file.name)
    content = file.read_text(encoding="utf-8")
    assert KEY not in content
    return documented("eval-rubric", content)


def test_a_dash_as_output_is_stdout(osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    prepare(tmp_path, endpoint)
    done = osmosis("eval-rubric", "--rubric", "followup", "-d", "data.jsonl", "-o", "-")
    assert done.code == 0, done.stderr
    assert documented("eval-rubric", done.stdout)["overall_statistics"]["success_count"] == 3
    assert not (tmp_path / "-").exists()


def test_the_result_has_the_documented_layout(osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    prepare(tmp_path, endpoint)
    done = osmosis("eval-rubric", "--rubric", "followup", "-d", "data.jsonl", "-n", "2", "--output", "results")
    assert done.code == 0, done.stderr
    assert KEY not in done.stdout + done.stderr
    assert "skipped records for other rubrics: 1" in done.stderr
    assert "average 0.467" in done.stdout
    assert re.search(r"mean 0\.467 ± 0\.\d+, 95 % confidence interval 0\.\d+ … 0\.\d+ over 3 records", done.stdout)
    assert "6 of 6 runs succeeded" in done.stdout
    result = result_in(tmp_path / "results")
    assert [*result][:9] == [
        "generated_at",
        "rubric_id",
        "rubric_source",
        "provider",
        "model",
        "number",
        "config_path",
        "data_path",
        "spread",
    ]
    assert (result["rubric_id"], result["provider"], result["model"], result["number"]) == (
        "followup",
        "openai",
        "judge-x",
        2,
    )
    assert result["config_path"] == str(tmp_path / "rubric_configs.yaml")
    overall = result["overall_statistics"]
    assert overall["average"] == pytest.approx(1.4 / 3)
    assert overall["stdev"] == pytest.approx(overall["variance"] ** 0.5)
    assert (overall["min"], overall["max"]) == (0.1, 0.9)
    assert (overall["success_count"], overall["failure_count"], overall["total_runs"]) == (6, 0, 6)
    assert [record["record_index"] for record in result["records"]] == [0, 2, 3]
    assert [record["id"] for record in result["records"]] == ["one", "record-2", "three"]
    record = result["records"][0]
    assert sorted(record) == ["conversation_id", "id", "input_record", "record_index", "runs", "statistics"]
    assert record["input_record"] == RECORDS[0]
    assert record["statistics"]["average"] == 0.9
    assert [run["run_index"] for run in record["runs"]] == [0, 1]
    run = record["runs"][1]
    assert sorted(run) == [
        "completed_at",
        "duration_seconds",
        "error",
        "explanation",
        "preview",
        "raw",
        "run_index",
        "score",
        "started_at",
        "status",
    ]
    assert (run["status"], run["score"], run["error"], run["preview"]) == ("success", 0.9, None, "0.9")
    assert run["explanation"] == "worth 0.9, ***"
    assert run["raw"]["choices"][0]["message"]["content"].startswith('{"score": 0.9')
    assert run["started_at"] <= run["completed_at"]


def test_a_failing_record_is_recorded_and_the_others_are_judged(osmosis: Osmosis, tmp_path: Path) -> None:
    def failing(request: Request) -> Reply:
        refusal = status(400, body={"error": {"message": f"no: {KEY}"}})
        return refusal if solution_of(request) == "0.4" else script(request)

    with ScriptedEndpoint(failing).run_in_thread() as endpoint:
        prepare(tmp_path, endpoint)
        done = osmosis("eval-rubric", "--rubric", "followup", "--data", "data.jsonl", "--output", "out/result.txt")
    assert done.code == 1
    assert "2 of 3 runs succeeded" in done.stdout
    assert KEY not in done.stdout + done.stderr
    content = (tmp_path / "out" / "result.txt").read_text(encoding="utf-8")
    assert KEY not in content
    result = json.loads(content)
    failed = result["records"][1]
    assert (failed["runs"][0]["status"], failed["runs"][0]["score"]) == ("error", None)
    assert "the judge failed: no: ***" in failed["runs"][0]["error"]
    assert failed["statistics"] == {
        **dict.fromkeys(("average", "variance", "stdev", "min", "max")),
        "success_count": 0,
        "failure_count": 1,
        "total_runs": 1,
    }
    assert result["overall_statistics"]["average"] == pytest.approx(0.5)


def test_records_are_judged_concurrently(osmosis: Osmosis, tmp_path: Path) -> None:
    """All answers wait at a gate that the third one opens."""
    gate = Gate()

    def gated(request: Request) -> Reply:
        if len(endpoint.requests) == 3:
            gate.open()
        return script(request).after(gate)

    with ScriptedEndpoint(gated).run_in_thread() as endpoint:
        prepare(tmp_path, endpoint)
        done = osmosis("eval-rubric", "--rubric", "followup", "-d", "data.jsonl", "--batch-size", "3", "-o", "r.json")
    assert done.code == 0, done.stderr


def test_agreement_spread_and_baseline(osmosis: Osmosis, tmp_path: Path) -> None:
    def wavering(request: Request) -> Reply:
        if solution_of(request) != "0.4":
            return script(request)
        times = sum(solution_of(other) == "0.4" for other in endpoint.requests)
        return text(json.dumps({"score": 0.2 * times, "explanation": "hm"}))

    with ScriptedEndpoint(wavering).run_in_thread() as endpoint:
        prepare(tmp_path, endpoint)
        baseline = {"overall_statistics": {"average": 0.25}}
        (tmp_path / "before.json").write_text(json.dumps(baseline), encoding="utf-8")
        done = osmosis(
            *("eval-rubric", "--rubric", "followup", "-d", "data.jsonl", "-n", "3", "-o", "r.json", "--json"),
            *("--against", "human", "--baseline", "before.json"),
        )
        sent = "".join(request.messages[1]["content"] for request in endpoint.requests)
    assert done.code == 0, done.stderr
    result = documented("eval-rubric", done.stdout)
    assert result == json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    # The scores of the second record are 0.2, 0.4 and 0.6, whichever comes first.
    assert result["spread"] == {
        "records": 3,
        "mean_stdev": pytest.approx((0.08 / 3) ** 0.5 / 3),
        "max_range": pytest.approx(0.4),
        "widest_record": "record-2",
        "unanimous": 2,
    }
    assert result["agreement"] == {
        "column": "human",
        "records": 3,
        "mean_absolute_error": pytest.approx(0.1),
        "spearman": pytest.approx(1.0),
        "threshold": 0.5,
        "confusion": {"true_positive": 1, "false_positive": 0, "false_negative": 1, "true_negative": 1},
        "accuracy": pytest.approx(2 / 3),
        "accuracy_interval": pytest.approx([0.208, 0.939], abs=1e-3),
        "kappa": pytest.approx(0.4),
        "kappa_interval": pytest.approx([-0.426, 0.889], abs=1e-3),
    }
    assert result["baseline"] == {
        "path": "before.json",
        "average": 0.25,
        "difference": pytest.approx(1.4 / 3 - 0.25),
    }
    # The judge sees the metadata, but not the label in it.
    assert '"channel": "mail"' in sent
    assert "human" not in sent


def test_the_default_place_is_beside_the_runs_and_eval_rubric_is_the_newer_name(
    osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint
) -> None:
    prepare(tmp_path, endpoint)
    home = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / ".cache")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = osmosis("eval", "rubric", "--rubric", "followup", "-d", "../data.jsonl", cwd=elsewhere, env=home)
    assert done.code == 0, done.stderr
    (file,) = tmp_path.rglob("rubric_eval_result_*.json")
    assert file.parent == elsewhere / ".osmosis" / "eval-rubric" / "followup"
    assert (elsewhere / ".osmosis" / ".gitignore").read_text(encoding="utf-8") == "*\n"
    assert str(file) in done.stderr.replace("\n", "")


@pytest.mark.parametrize("named_by", ["variable", "option", "pyproject"])
def test_results_follow_the_store(named_by: str, osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    prepare(tmp_path, endpoint)
    if named_by == "pyproject":
        (tmp_path / "pyproject.toml").write_text('[tool.osmosis]\nstore = "kept"\n', encoding="utf-8")
    options = ["--store", "kept"] if named_by == "option" else []
    env = {"OSMOSIS_STORE": "kept"} if named_by == "variable" else {}
    done = osmosis("eval-rubric", "--rubric", "followup", "-d", "data.jsonl", *options, env=env)
    assert done.code == 0, done.stderr
    (file,) = tmp_path.rglob("rubric_eval_result_*.json")
    assert file.parent == tmp_path / "kept" / "eval-rubric" / "followup"


@pytest.mark.litellm
@pytest.mark.parametrize("name", ["own", "reward_rubric.mine:own", "followup", "rubric_configs.yaml#followup"])
def test_rubrics_are_named_as_in_a_run(name: str, osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    prepare(tmp_path, endpoint)
    (tmp_path / "reward_rubric").mkdir()
    (tmp_path / "reward_rubric" / "mine.py").write_text(FUNCTION, encoding="utf-8")
    (tmp_path / "records").mkdir()
    records = "".join(f"{json.dumps({'solution_str': score})}\n" for score in ("0.9", "0.4", "0.1"))
    (tmp_path / "records" / "data.jsonl").write_text(records, encoding="utf-8")
    done = osmosis(
        *("eval-rubric", "--rubric", name, "-d", "records/data.jsonl", "--limit", "2", "--n", "2", "--json"),
        *("--judge-model", "local", "--judge-base-url", endpoint.url),
        env={"OSMOSIS_JUDGE_API_KEY": KEY},
    )
    assert done.code == 0, done.stderr
    result = documented("eval-rubric", done.stdout)
    assert [[run["score"] for run in record["runs"]] for record in result["records"]] == [[0.9, 0.9], [0.4, 0.4]]
    assert (result["model"], result["base_url"], result["number"]) == ("local", endpoint.url, 2)


@pytest.mark.litellm
def test_a_repositorys_own_function_judges_in_a_worker(
    osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint
) -> None:
    prepare(tmp_path, endpoint)
    (tmp_path / "reward_rubric").mkdir()
    (tmp_path / "reward_rubric" / "mine.py").write_text(FUNCTION, encoding="utf-8")
    done = osmosis(
        *("eval-rubric", "--rubric", "reward_rubric.mine:own", "-d", "data.jsonl", "--output", "results/"),
        *("--judge-model", "local", "--judge-base-url", endpoint.url, "--against", "human"),
        env={"OSMOSIS_JUDGE_API_KEY": KEY},
    )
    assert done.code == 1, done.stderr
    result = result_in(tmp_path / "results")
    assert (result["rubric_source"], result["model"], result["config_path"]) == ("function", "local", None)
    good, bad = (record["runs"][0] for record in result["records"])
    assert (good["score"], good["explanation"]) == (0.4, "worth 0.4, ***")
    assert good["raw"][0]["model"] == "openai/local"
    assert bad["error"] == "reward_rubric/mine.py:8: LookupError: no such thing"
    assert endpoint.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert '"channel": "mail"' in endpoint.requests[0].messages[1]["content"]
    assert "human" not in endpoint.requests[0].messages[1]["content"]


def test_the_judge_is_compared_with_the_verdicts_on_a_run(
    osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint
) -> None:
    prepare(tmp_path, endpoint)
    shutil.copytree(EXAMPLE / "mcp", tmp_path / "mcp")
    rows = [{"system_prompt": "s", "user_prompt": f"Say {truth}", "ground_truth": truth} for truth in SAID]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    run = osmosis("test", "-d", "rows.jsonl", "--model", "offline/oracle", "--json").json["config"]["run_id"]
    judging = ("eval-rubric", "--rubric", "followup", "--run", "latest", "--against", "human")
    assert "has no answer with a verdict: give some in `osmosis view`" in osmosis(*judging).stderr
    with RunStore.open(tmp_path) as store:
        for index, found in enumerate(list(store.scored(run))[:-1]):
            asyncio.run(store.save_verdict(run, found.stored.rollout.id, Verdict(1 if index < 2 else 0)))
    done = osmosis(*judging, "--json")
    result = documented("eval-rubric", done.stdout)
    assert done.code == 0, done.stderr
    # The last answer has no verdict: the judge isn't asked about it.
    assert [record["id"] for record in result["records"]] == [f"row {index}, attempt 0" for index in range(4)]
    assert result["run"] == "latest"
    agreed = result["agreement"]
    assert agreed["confusion"] == {"true_positive": 1, "false_positive": 1, "false_negative": 1, "true_negative": 1}
    assert (agreed["accuracy"], agreed["kappa"], agreed["records"]) == (0.5, 0.0, 4)
    assert agreed["kappa_interval"][0] < 0 < agreed["kappa_interval"][1]
    assert "human" not in endpoint.requests[0].messages[1]["content"]
    printed = osmosis(*judging).stdout
    assert "judge and label agree on 2 of 4 (95 % CI 0.15 … 0.85), Cohen's kappa 0.000" in printed
    assert "4 are few: only the intervals say something" in printed
    both = osmosis(*judging, "-d", "rows.jsonl")
    assert (both.code, "--data and --run exclude each other" in both.stderr) == (2, True)


@pytest.mark.litellm
@pytest.mark.in_process
def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    gate = Gate()
    with ScriptedEndpoint(lambda request: script(request).after(gate)).run_in_thread() as endpoint:
        prepare(tmp_path, endpoint)
        arguments = ("eval-rubric", "--rubric", "followup", "-d", "data.jsonl", "--output", "results/")
        with running(*arguments, cwd=tmp_path) as command:
            eventually(lambda: len(endpoint.requests) == 3)
            command.interrupt()
            done = command.wait()
    assert (done.code, done.stdout) == (130, ""), done.stderr
    assert "interrupted; nothing was written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.parametrize("in_the_way", [False, True])
def test_what_the_judge_said_is_kept_though_its_folder_was_removed(
    in_the_way: bool, osmosis: Osmosis, tmp_path: Path
) -> None:
    def removing(request: Request) -> Reply:
        shutil.rmtree(tmp_path / "results", ignore_errors=True)
        if in_the_way:
            (tmp_path / "results").touch()
        return script(request)

    with ScriptedEndpoint(removing).run_in_thread() as endpoint:
        prepare(tmp_path, endpoint)
        done = osmosis("eval-rubric", "--rubric", "followup", "-d", "data.jsonl", "--output", "results/a.json")
    assert "Traceback" not in done.stderr
    file = tmp_path / "results" / "a.json"
    if in_the_way:
        found = re.search(r"the results are in (\S+)", done.stderr.replace("\n", ""))
        assert found is not None, done.stderr
        file = Path(found[1])
    assert documented("eval-rubric", file.read_text(encoding="utf-8"))["records"]
    assert ("error: " in done.stderr) == in_the_way


def refused(done: Finished) -> str:
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_what_can_not_start_says_why_before_any_call(
    osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint
) -> None:
    prepare(tmp_path, endpoint)
    base = ("eval-rubric", "--rubric", "followup", "-d", "data.jsonl")
    assert "has no rubric 'followups'; did you mean followup" in refused(
        osmosis("eval-rubric", "--rubric", "followups", "-d", "data.jsonl")
    )
    assert "no such file" in refused(osmosis("eval-rubric", "--rubric", "followup", "-d", "missing.jsonl"))
    assert "no record has this column; there are conversation_id, " in refused(osmosis(*base, "--against", "label"))
    assert "--threshold needs --against" in refused(osmosis(*base, "--threshold", "1"))
    (tmp_path / "empty.json").write_text("{}", encoding="utf-8")
    assert "it has no overall_statistics.average" in refused(osmosis(*base, "--baseline", "empty.json"))
    assert "nope.yaml: no such file; a rubric file is YAML" in refused(osmosis(*base, "--config", "nope.yaml"))
    (tmp_path / "blocked").write_text("", encoding="utf-8")
    assert "can't be written" in refused(osmosis(*base, "--output", "blocked/results/"))
    (tmp_path / "bad.jsonl").write_text('{"solution_str": ""}\n[]\n{"solution_str": "x", "metadata": 1}\n{', "utf-8")
    said = refused(osmosis("eval-rubric", "--rubric", "followup", "-d", "bad.jsonl"))
    for problem in (
        "bad.jsonl: 4 problems",
        "line 1: column solution_str: an empty string",
        "line 2: a list",
        "line 3: column metadata: a number, where an object is expected",
        "line 4: not valid JSON",
    ):
        assert problem in said
    config = (tmp_path / "rubric_configs.yaml").read_text(encoding="utf-8")
    keyless = config.replace(f"api_key: {KEY}", "api_key_env: NOT_SET_KEY")
    (tmp_path / "rubric_configs.yaml").write_text(keyless, encoding="utf-8")
    assert "NOT_SET_KEY is not set. Set it with export NOT_SET_KEY=" in refused(osmosis(*base))
    assert endpoint.requests == []
    assert list(tmp_path.rglob("rubric_eval_result*")) == []
