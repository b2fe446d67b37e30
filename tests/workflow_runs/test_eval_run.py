"""`osmosis eval run CONFIG`: both forms of run configs, options, variables, secrets, names, regrading, exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Finished, run_osmosis
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text
from running import running
from watching import Watching, write

SERVER = Path(__file__).parents[1] / "runtime" / "worker" / "workflows" / "plain_rollout.py"
CURRENT = """
[experiment]
rollout = "plain"
entrypoint = "main.py"
model_path = "offline/oracle"
dataset = "sums"

[evaluation]
limit = 2
n = 2
pass_threshold = 0.5
agent_workflow_timeout_s = 30
"""
OLDER = """
[eval]
dataset = "sums.jsonl"
rollout = "plain"
entrypoint = "main.py"
limit = 1
offset = 1

[llm]
model = "scripted"
base_url = "{url}"
api_key_env = "MY_KEY"

[runs]
n = 2
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for folder in ("rollouts/plain", "configs/eval", "data"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SERVER, tmp_path / "rollouts" / "plain" / "main.py")
    lines = [{"system_prompt": "Compute.", "user_prompt": f"{n} + 0", "ground_truth": str(n)} for n in range(3)]
    (tmp_path / "data" / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return tmp_path


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(by_turn(text("hm"), text("1")), api_key="sesame").run_in_thread() as served:
        yield served


def run(workspace: Path, config: str, *options: str, env: dict[str, str] | None = None, typed: str = "") -> Finished:
    (workspace / "configs" / "eval" / "plain.toml").write_text(config, encoding="utf-8")
    given = ["eval", "run", "configs/eval/plain.toml", "--json", *options]
    return run_osmosis(*given, cwd=workspace, env=env, typed=typed)


def test_a_config_names_rollout_model_dataset_and_extent(workspace: Path) -> None:
    finished = run(workspace, CURRENT)
    assert finished.code == 0, finished.stderr
    assert "scored with: its grader\n" in finished.stderr
    assert [len(row["runs"]) for row in finished.json["rows"]] == [2, 2]
    assert [each["scores"]["plain"] for row in finished.json["rows"] for each in row["runs"]] == [1.0] * 4
    assert finished.json["config"]["model"] == "offline/oracle"


def test_options_override_the_config(workspace: Path) -> None:
    other = workspace / "other.jsonl"
    shutil.copy(workspace / "data" / "sums.jsonl", other)
    finished = run(
        workspace, CURRENT, "--limit", "3", "--n", "1", "--dataset-file", "other.jsonl", "--max-in-flight", "2"
    )
    assert [len(row["runs"]) for row in finished.json["rows"]] == [1, 1, 1]
    assert finished.json["config"]["dataset"].endswith("other.jsonl")


def test_the_older_form_is_read(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    config = OLDER.replace("{url}", endpoint.url)
    finished = run(workspace, config, env={"MY_KEY": "sesame"})
    assert [row["row_index"] for row in finished.json["rows"]] == [1]
    assert [each["scores"]["plain"] for each in finished.json["rows"][0]["runs"]] == [1.0, 1.0]
    missing = run(workspace, config)
    assert missing.code == 2
    assert "MY_KEY" in missing.stderr


def test_variables_and_secrets_reach_the_server_and_no_result(workspace: Path) -> None:
    main = workspace / "rollouts" / "plain" / "main.py"
    shown = 'print("got", os.environ["COLOUR"], os.environ["MY_TOKEN"], flush=True)\n\n\nasync def health'
    main.write_text(main.read_text(encoding="utf-8").replace("async def health", shown, 1), encoding="utf-8")
    config = CURRENT + '\n[env]\nCOLOUR = "green"\n\n[secrets]\nrequired = ["MY_TOKEN"]\n'
    missing = run(workspace, config.replace("offline/oracle", "openai/gpt-5-mini"))
    assert missing.code == 2
    assert "needs the secrets MY_TOKEN" in missing.stderr
    (workspace / "secrets").write_text("MY_TOKEN=abracadabra\n", encoding="utf-8")
    assert run(workspace, config, "--secrets-file", "secrets").code == 0
    (log,) = (workspace / ".osmosis" / "logs").iterdir()
    assert "got green" in log.read_text(encoding="utf-8")
    assert "abracadabra" not in log.read_text(encoding="utf-8")


def test_variables_of_a_config_are_for_the_rollout_alone(workspace: Path) -> None:
    main = workspace / "rollouts" / "plain" / "main.py"
    shown = 'print("got", os.environ["OSMOSIS_BATCH_SIZE"], flush=True)\n\n\nasync def health'
    main.write_text(main.read_text(encoding="utf-8").replace("async def health", shown, 1), encoding="utf-8")
    # As an option of this command, it would be refused.
    config = CURRENT + '\n[env]\nOSMOSIS_BATCH_SIZE = "none"\n'
    assert run(workspace, config, "--name", "mine").code == 0
    (log,) = (workspace / ".osmosis" / "logs").iterdir()
    assert "got none" in log.read_text(encoding="utf-8")
    changed = run(workspace, config.replace('"none"', '"some"'), "--name", "mine")
    assert changed.code == 2
    assert '{"OSMOSIS_BATCH_SIZE":"none"} → {"OSMOSIS_BATCH_SIZE":"some"}' in changed.stderr


def test_an_option_sets_variables_of_the_rollout_too(workspace: Path) -> None:
    given = [
        "eval",
        "--rollout",
        "rollouts/plain",
        "-d",
        "data/sums.jsonl",
        "--model",
        "offline/oracle",
        "--limit",
        "1",
    ]
    main = workspace / "rollouts" / "plain" / "main.py"
    shown = 'print("got", os.environ["COLOUR"], flush=True)\n\n\nasync def health'
    main.write_text(main.read_text(encoding="utf-8").replace("async def health", shown, 1), encoding="utf-8")
    assert run_osmosis(*given, "--rollout-env", "COLOUR=sea green", cwd=workspace).code == 0
    (log,) = (workspace / ".osmosis" / "logs").iterdir()
    assert "got sea green" in log.read_text(encoding="utf-8")
    refused = run_osmosis(*given, "--rollout-env", "COLOUR", cwd=workspace)
    assert "--rollout-env COLOUR: write NAME=TEXT" in refused.stderr


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("[experiment]", "[other]", "no [experiment]"),
        ('model_path = "offline/oracle"', "", "missing required field `model_path`"),
        ("limit = 2", 'limit = "2"', "`evaluation.limit`"),
        ("limit = 2", "limits = 2", "limits"),
        ('rollout = "plain"', 'rollout = "none"', "there is no folder rollouts/none"),
        ('rollout = "plain"', 'rollout = "../x"', "isn't the name of a folder"),
        ('entrypoint = "main.py"', 'entrypoint = "../../x.py"', "is outside rollouts/plain"),
        ('dataset = "sums"', 'dataset = "none"', "--dataset-file"),
        ("[evaluation]", '[env]\n_OSMOSIS_X = "1"\n[evaluation]', "can't set _OSMOSIS_X"),
        ("[evaluation]", '[env]\nA = "1"\n[secrets]\nrequired = ["A"]\n[evaluation]', "keep one of them"),
        ("[experiment]", "[experiment", "plain.toml:2"),
        ("[evaluation]", "[training]\nlr = 1e-6\n[evaluation]", "a training config, as [training] shows"),
        ("n = 2", "n = 0", "plain.toml: n = 0: write a whole number of at least 1"),
        ("_timeout_s = 30", "_timeout_s = -1", "agent_workflow_timeout_s = -1"),
    ],
)
def test_an_unusable_config_is_explained(workspace: Path, before: str, after: str, said: str) -> None:
    finished = run(workspace, CURRENT.replace(before, after))
    assert finished.code == 2
    assert said in " ".join(finished.stderr.split())


def values(finished: Finished) -> list[float | None]:
    return [each["scores"].get("plain") for row in finished.json["rows"] for each in row["runs"]]


def edit(workspace: Path, before: str, after: str) -> None:
    main = workspace / "rollouts" / "plain" / "main.py"
    source = main.read_text(encoding="utf-8")
    assert before in source
    main.write_text(source.replace(before, after), encoding="utf-8")


def test_what_the_reference_has_is_accepted(workspace: Path) -> None:
    every = CURRENT.replace(
        "[evaluation]", 'commit_sha = "abc1234"\n[evaluation]\nbatch_size = 1\ngrader_timeout_s = 9'
    )
    finished = run(workspace, every + '[env]\nLOG_LEVEL = "INFO"\n[secrets]\nrequired = []\n', "--yes", "--verbose")
    assert finished.code == 0, finished.stderr
    assert "commit_sha has no effect" in finished.stderr


def test_a_name_continues_its_run_and_fresh_starts_anew(workspace: Path) -> None:
    first = run(workspace, CURRENT, "--name", "mine")
    again = run(workspace, CURRENT, "--name", "mine")
    assert again.json["config"]["run_id"] == first.json["config"]["run_id"]
    assert "4 rollouts are recorded" in again.stderr
    changed = run(workspace, CURRENT, "--name", "mine", "--n", "3")
    assert changed.code == 2
    assert "--n changed (2 → 3); use the same as that run, or start a new one with --fresh" in changed.stderr
    fresh = run(workspace, CURRENT, "--name", "mine", "--n", "3", "--fresh")
    assert len(values(fresh)) == 6
    shown = run_osmosis("runs", "show", "mine", "--json", cwd=workspace)
    assert shown.json["run"]["name"] == "mine"
    assert shown.json["run"]["id"] == fresh.json["config"]["run_id"] != first.json["config"]["run_id"]


def test_an_unnamed_run_is_a_new_one(workspace: Path) -> None:
    ids = {run(workspace, CURRENT).json["config"]["run_id"] for _ in range(2)}
    assert len(ids) == 2


def test_failed_rollouts_of_a_name_run_again(workspace: Path) -> None:
    edit(workspace, 'if task == "raise":', 'if not os.path.exists("allowed"):')
    finished = run(workspace, CURRENT, "--name", "mine")
    assert values(finished) == [None] * 4
    assert finished.code == 0, "every rollout is recorded"
    (workspace / "rollouts" / "plain" / "allowed").touch()
    assert values(run(workspace, CURRENT, "--name", "mine", "--retry-failed")) == [1.0] * 4


def test_rows_are_named_by_their_numbers(workspace: Path) -> None:
    finished = run(workspace, CURRENT, "--rows", "2,0")
    assert [row["row_index"] for row in finished.json["rows"]] == [0, 2]
    for rows, said in (("1,7", "there is no row 7; the file has 3 rows"), ("2-1", "write row numbers")):
        refused = run(workspace, CURRENT, "--rows", rows)
        assert refused.code == 2
        assert said in refused.stderr
    both = run(workspace, CURRENT, "--rows", "1", "--limit", "1")
    assert "leave out --limit" in both.stderr


def test_a_run_that_is_not_complete_ends_with_1(workspace: Path) -> None:
    finished = run(workspace, CURRENT, "--max-cost", "0", "--name", "mine")
    assert (finished.code, finished.json["summary"]["missing"]) == (1, 4)
    assert run(workspace, CURRENT, "--name", "mine", "--regrade").code == 1
    shown = run_osmosis("runs", "show", "mine", "--json", cwd=workspace).json["run"]
    assert shown["status"] == "interrupted", "it can be continued"


def test_a_rollout_of_several_conversations_is_graded_again(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    config = OLDER.replace("{url}", endpoint.url)
    key = {"MY_KEY": "sesame"}
    edit(workspace, 'messages.append({"role": "user", "content": "Are you sure?"})', "del messages[2:]")
    # Both conversations begin with the same request, and each has its own reply.
    edit(workspace, 'reward = float(messages[-1]["content"] == body["label"])', "reward = 0.5")
    first = run(workspace, config, "--name", "mine", env=key)
    calls = len(endpoint.requests)
    edit(workspace, "reward = 0.5", "reward = 0.25")
    again = run(workspace, config, "--name", "mine", "--regrade", env=key)
    assert (values(first), values(again)) == ([0.5, 0.5], [0.25, 0.25])
    assert len(endpoint.requests) == calls
    (rollout, _) = run_osmosis("runs", "show", "mine", "--row", "1", "--json", cwd=workspace).json["rollouts"]
    assert (len(rollout["turns"]), len(rollout["agent"]["conversations"])) == (2, 1)
    # It can be graded any number of times.
    assert values(run(workspace, config, "--name", "mine", "--regrade", env=key)) == [0.25, 0.25]


def test_grading_again_calls_no_model(workspace: Path, endpoint: ScriptedEndpoint) -> None:
    config = OLDER.replace("{url}", endpoint.url)
    key = {"MY_KEY": "sesame"}
    assert values(run(workspace, config, "--name", "mine", env=key)) == [1.0, 1.0]
    calls = len(endpoint.requests)
    edit(workspace, 'reward = float(messages[-1]["content"] == body["label"])', "reward = 0.25")
    again = run(workspace, config, "--name", "mine", "--regrade", env=key)
    assert values(again) == [0.25, 0.25]
    edit(workspace, "reward = 0.25", "reward = None")
    edit(workspace, '"reward": reward, "metrics"', '"remove_sample": True, "metrics"')
    removed = run(workspace, config, "--name", "mine", "--regrade", env=key)
    assert (removed.json["summary"]["removed"], values(removed)) == (2, [None, None])
    edit(workspace, '"remove_sample": True, "metrics"', '"reward": 0.5, "metrics"')
    counted = run(workspace, config, "--name", "mine", "--regrade", env=key)
    assert ("removed" in counted.json["summary"], values(counted)) == (False, [0.5, 0.5])
    (rollout, _) = run_osmosis("runs", "show", "mine", "--row", "1", "--json", cwd=workspace).json["rollouts"]
    assert len(rollout["turns"]) == 2, "the rollout itself stays"
    edit(workspace, "Are you sure?", "Really?")
    other = run(workspace, config, "--name", "mine", "--regrade", env=key)
    (failure, _) = [each["scoring_errors"]["plain"] for each in other.json["rows"][0]["runs"]]
    assert "has no reply to this request, which differs from message 4 on" in failure
    assert len(endpoint.requests) == calls


def test_rows_with_metadata_need_no_prompts(workspace: Path) -> None:
    rows = [{"metadata": {"task": 1}, "label": "7"}, {"user_prompt": "1 + 0", "ground_truth": "1"}]
    (workspace / "data" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    edit(workspace, 'task = messages[-1]["content"]', 'task = messages[-1]["content"] if messages else "none"')
    missing = run(workspace, CURRENT)
    assert "line 2: column user_prompt" not in missing.stderr
    assert missing.code == 0, missing.stderr
    rows[0].pop("metadata")
    (workspace / "data" / "sums.jsonl").write_text(json.dumps(rows[0]) + "\n", encoding="utf-8")
    assert "user_prompt" in run(workspace, CURRENT).stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--name", "a/b"], "letters, digits"),
        (["--name", "new", "--resume"], "no run of `osmosis eval` with the name new"),
        (["--fresh", "--resume"], "--fresh starts anew"),
        (["--regrade", "--retry-failed"], "use one of them"),
        (["--regrade"], "there is no run of"),
        (["--upload"], "-o DIR"),
        (["--rollout-port", "8000"], "_OSMOSIS_ROLLOUT_PORT"),
        (["-o", "results.json"], "writes a folder of files"),
        (["-o", "out", "--watch"], "--watch never ends"),
    ],
)
def test_unusable_options_are_explained(workspace: Path, options: list[str], said: str) -> None:
    finished = run(workspace, CURRENT, *options)
    assert finished.code == 2
    assert said in " ".join(finished.stderr.split())


@pytest.mark.in_process
def test_a_save_of_the_rollout_or_of_the_config_runs_again(workspace: Path) -> None:
    config = CURRENT.replace("n = 2", "n = 1")
    write(workspace, {"configs/eval/plain.toml": config})
    with ScriptedEndpoint(by_turn(text("hm"), text("1"))).run_in_thread() as endpoint:
        given = ["run", "configs/eval/plain.toml", "--watch", "--json", "--base-url", endpoint.url, "--model", "m"]
        with running("eval", *given, cwd=workspace) as process:
            watch = Watching(process, workspace, endpoint)

            def seen(line: dict[str, Any]) -> list[list[float | None]]:
                return [[each["scores"]["plain"] for each in row["runs"]] for row in line["rows"]]

            assert seen(watch.next()) == [[0.0], [1.0]]
            main = (workspace / "rollouts/plain/main.py").read_text(encoding="utf-8")
            watch.requests()
            graded = watch.save({"rollouts/plain/main.py": main.replace("reward = float(", "reward = 0.5 * float(")})
            assert (seen(graded), watch.requests()) == ([[0.0], [0.5]], 0)
            assert seen(watch.save({"configs/eval/plain.toml": config.replace("limit = 2", "limit = 3")})) == [
                [0.0],
                [0.5],
                [0.0],
            ]
