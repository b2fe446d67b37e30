"""Training runs: what is frozen when one is submitted, and what the trainer is given."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from osmosis_ai.platform.queue import Limits
from platforms import Platform, commit, make_workspace, rows, serving
from token_models import write_model
from waiting import eventually

TRAININGS, SECRETS = "/api/cli/training-runs", "/api/cli/environment-secrets"
TRAINER = """
import json, os, pathlib, sys, time

order = json.loads(pathlib.Path(sys.argv[1]).read_text())
print("training", order["model"], "with", os.environ["THE_WORD"], flush=True)
main = pathlib.Path(order["code"], "rollouts", order["rollout"], order["entrypoint"])
checkpoint = pathlib.Path(order["output"], "checkpoint")
time_of_it = "again" if checkpoint.exists() else "first"
# Before it says so, because the job is killed when it has.
checkpoint.touch()
# A progress bar writes for hours without the end of a line.
print("\\r" * (2 << 20), flush=True)
print("newer" if "newer" in main.read_text() else "frozen", time_of_it, flush=True)
while order["training"]["lr"] == 2.0:
    time.sleep(0.05)
sys.exit(3 if order["training"]["lr"] == 3.0 else 0)
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, workspace: Path) -> Iterator[Platform]:
    trainer = tmp_path_factory.mktemp("trainer") / "trainer.py"
    trainer.write_text(TRAINER, encoding="utf-8")
    with serving(tmp_path_factory.mktemp("platform"), Limits(2, trainer=f"{sys.executable} {trainer}")) as platform:
        assert platform.upload("sums", rows(4)).status == 200
        secret = {"name": "THE_WORD", "value": "abracadabra", "scope": "user"}
        assert platform.ask("POST", SECRETS, secret).status == 200
        platform.ask("GET", TRAININGS, headers={"X-Osmosis-Path": str(workspace)})
        yield platform


def submission(lr: float = 1.0, **experiment: str) -> dict[str, Any]:
    usual = {"rollout": "plain", "entrypoint": "main.py", "model_path": "acme/model", "dataset": "sums"}
    secrets = {"required": ["THE_WORD"]}
    return {"experiment_config": {**usual, **experiment}, "training_config": {"lr": lr}, "secrets": secrets}


def submit(platform: Platform, lr: float = 1.0) -> str:
    reply = platform.ask("POST", TRAININGS, submission(lr))
    assert (reply.status, reply.body["status"]) == (201, "queued"), reply
    return str(reply.body["id"])


def wait(platform: Platform, run: str, *statuses: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}

    def reached() -> bool:
        shown.update(platform.ask("GET", f"{TRAININGS}/{run}").body)
        return shown["training_run"]["status"] in (statuses or ("finished", "failed", "stopped"))

    eventually(reached, lambda: f"{shown}\n{log(platform, run)}")
    return shown


def log(platform: Platform, run: str) -> list[str]:
    entries = platform.ask("GET", f"{TRAININGS}/{run}/logs?limit=200").body["logs"]
    return [f"{entry['step']}: {entry['message']}" for entry in entries]


def test_the_trainer_gets_the_inputs_as_they_were_submitted(platform: Platform, workspace: Path) -> None:
    head = commit(workspace)
    blocking = submit(platform, 2.0), submit(platform, 2.0)
    run = submit(platform)
    main = workspace / "rollouts/plain/main.py"
    main.write_text(main.read_text("utf-8") + "# newer\n", "utf-8")
    commit(workspace)
    for each in blocking:
        assert platform.ask("POST", f"{TRAININGS}/{each}/stop", {}).status == 200
    shown = wait(platform, run)
    told = log(platform, run)
    assert shown["training_run"]["status"] == "finished", told
    assert (shown["commit_sha"], shown["training_run"]["dataset_name"]) == (head, "sums")
    assert "train: training acme/model with [masked]" in told
    assert "train: frozen first" in told
    written = (platform.home.run(run) / "training.json").read_text("utf-8")
    order = json.loads(written)
    assert (order["commit"], order["training"], order["secrets"]) == (head, {"lr": 1.0}, ["THE_WORD"])
    assert Path(order["dataset"]).read_bytes() == rows(4)
    assert "abracadabra" not in written


def test_a_lost_job_starts_the_trainer_again_and_a_stop_ends_it(platform: Platform) -> None:
    run = submit(platform, 2.0)
    eventually(lambda: "train: frozen first" in log(platform, run) or "train: newer first" in log(platform, run))
    trainer = next(each for each in processes() if run in " ".join(each.info["cmdline"]))
    trainer.parent().kill()
    eventually(lambda: any(line.endswith("again") for line in log(platform, run)), lambda: str(log(platform, run)))
    assert platform.ask("POST", f"{TRAININGS}/{run}/stop", {}).status == 200
    assert wait(platform, run)["training_run"]["status"] == "stopped"
    eventually(lambda: not [each for each in processes() if run in " ".join(each.info["cmdline"])])


def processes() -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]]


def test_a_trainer_that_fails_fails_the_run(platform: Platform) -> None:
    run = submit(platform, 3.0)
    assert wait(platform, run)["training_run"]["status"] == "failed"
    assert log(platform, run)[-1] == "train: the trainer ended with status 3"


def test_a_dataset_s_name_cannot_replace_a_file_of_the_run(platform: Platform) -> None:
    table = b'[{"user_prompt": "x", "ground_truth": "y"}]'
    assert platform.upload("training", table, "json").status == 200
    reply = platform.ask("POST", TRAININGS, submission(dataset="training"))
    assert wait(platform, reply.body["id"])["training_run"]["status"] == "finished"
    order = json.loads((platform.home.run(reply.body["id"]) / "training.json").read_text("utf-8"))
    assert Path(order["dataset"]).read_bytes() == table


@pytest.mark.parametrize(
    ("experiment", "said"),
    [
        ({"rollout": "none"}, "has no rollouts/none/main.py"),
        ({"entrypoint": "other.py"}, "has no rollouts/plain/other.py"),
        ({"commit_sha": "0" * 40}, "push it first"),
        ({"dataset": "none"}, "there is no dataset none"),
    ],
)
def test_an_untrainable_config_is_refused_at_submission(
    platform: Platform, experiment: dict[str, str], said: str
) -> None:
    reply = platform.ask("POST", TRAININGS, submission(**experiment))
    assert reply.status in (400, 404)
    assert said in reply.body["error"]


def test_osmosis_itself_is_the_trainer(tmp_path: Path, workspace: Path) -> None:
    """With a trainer that learns nothing: every figure and checkpoint is shown, and the run's rollouts are stored."""
    fake = Path(__file__).parents[1] / "helpers" / "fake_trainer.py"
    trainer = f'{sys.executable} -m osmosis_ai train run --trainer "{sys.executable} {fake}"'
    with serving(tmp_path / "platform", Limits(2, trainer=trainer)) as platform:
        assert platform.upload("sums", rows(4)).status == 200
        platform.ask("GET", TRAININGS, headers={"X-Osmosis-Path": str(workspace)})
        body = submission(model_path=str(write_model(tmp_path / "model")))
        body |= {
            "training_config": {"n_samples_per_prompt": 2, "rollout_batch_size": 3},
            "checkpoints_config": {"checkpoint_save_freq": 1, "eval_interval": 1},
            "secrets": {"required": []},
        }
        run = str(platform.ask("POST", TRAININGS, body).body["id"])
        shown = wait(platform, run)["training_run"]
        assert shown["status"] == "finished", log(platform, run)
        assert (shown["current_step"], shown["total_steps"], shown["examples_processed_count"]) == (1, 1, 6)
        (checkpoint,) = platform.ask("GET", f"{TRAININGS}/{run}/checkpoints").body["checkpoints"]
        assert (checkpoint["checkpoint_step"], checkpoint["checkpoint_name"]) == (1, "checkpoint-1")
        figures = platform.ask("GET", f"{TRAININGS}/{run}/metrics").body
        rewards = next(one for one in figures["metrics"] if one["metric_key"] == "rollouts/reward")
        assert [point["value"] for point in rewards["data_points"]] == [shown["reward"]]
        assert figures["overview"]["latest_step"] == 1
        # Where the platform's pages look for it.
        assert list((tmp_path / "platform" / "stores").glob(f"*/training/{shown['name']}/run.json"))
        (listed,) = platform.ask("GET", TRAININGS).body["training_runs"]
        assert (listed["current_step"], listed["reward"]) == (1, shown["reward"])
