"""`osmosis eval run CONFIG`: both forms of run configs, the options that override them, variables and secrets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Finished, run_osmosis
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text

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
    missing = run(workspace, config)
    assert missing.code == 2
    assert "needs the secrets MY_TOKEN" in missing.stderr
    (workspace / "secrets").write_text("MY_TOKEN=abracadabra\n", encoding="utf-8")
    assert run(workspace, config, "--secrets-file", "secrets").code == 0
    (log,) = (workspace / ".osmosis" / "logs").iterdir()
    assert "got green" in log.read_text(encoding="utf-8")
    assert "abracadabra" not in log.read_text(encoding="utf-8")


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
    ],
)
def test_a_config_that_can_t_be_used_is_told(workspace: Path, before: str, after: str, said: str) -> None:
    finished = run(workspace, CURRENT.replace(before, after))
    assert finished.code == 2
    assert said in " ".join(finished.stderr.split())
