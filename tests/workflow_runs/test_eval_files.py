"""`osmosis eval run -o DIR`: the files that the tools of rollout servers read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import run_osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text

SERVER = Path(__file__).parents[1] / "runtime" / "worker" / "workflows" / "plain_rollout.py"
CONFIG = """
[experiment]
rollout = "plain"
entrypoint = "main.py"
model_path = "scripted"
dataset = "tasks"

[evaluation]
n = 2
agent_workflow_timeout_s = 1

[secrets]
required = ["PASSPORT"]
"""
KEEP = """
def keep(body, task):
    print("running", task, os.environ["PASSPORT"], flush=True)
    folder = os.path.join(os.environ["_OSMOSIS_ROLLOUT_ARTIFACT_ROOT"], body["rollout_id"], "artifacts")
    os.makedirs(folder)
    if task == "first":
        with open(os.path.join(folder, "notes.txt"), "w") as file:
            file.write("kept")
"""
TASKS = ["first", "raise", "grader breaks", "hang", "remove", "wrong"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which a run of every kind of item has been written to `out`, and another one with other rows."""
    root = tmp_path_factory.mktemp("workspace")
    for folder in ("rollouts/plain", "configs/eval", "data"):
        (root / folder).mkdir(parents=True)
    source = SERVER.read_text(encoding="utf-8")
    source = source.replace('print("running", task, flush=True)', "keep(body, task)")
    source = source.replace("if __name__ ==", f"{KEEP}\n\nif __name__ ==")
    (root / "rollouts/plain/main.py").write_text(source, encoding="utf-8")
    (root / "configs/eval/plain.toml").write_text(CONFIG, encoding="utf-8")
    rows = [{"system_prompt": "Do.", "user_prompt": task, "ground_truth": "ok"} for task in ["unused", *TASKS]]
    (root / "data/tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        evaluate(root, endpoint, "--rows", "1-6", "--name", "every")
        evaluate(root, endpoint, "--rows", "1", "--name", "small")
        evaluate(root, endpoint, "--rows", "1", "--name", "small")
        shutil.copytree(root / "out" / "small", root / "before")
        evaluate(root, endpoint, "--rows", "6", "--name", "small", "--fresh")
    return root


def evaluate(root: Path, endpoint: ScriptedEndpoint, *options: str) -> None:
    given = ["configs/eval/plain.toml", "--base-url", endpoint.url, "-o", "out", *options]
    finished = run_osmosis("eval", "run", *given, cwd=root, env={"PASSPORT": "hush-hush"})
    assert finished.code == 0, finished.stderr


def answer(request: Request) -> Reply:
    asked = [message["content"] for message in request.messages]
    return text("bad" if "wrong" in asked else "ok")


@pytest.fixture(scope="module")
def written(workspace: Path) -> Path:
    return workspace / "out" / "every"


def lines(file: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, file.read_text(encoding="utf-8").splitlines())


def test_the_index_has_a_line_per_rollout(written: Path) -> None:
    items = list(lines(written / "index.jsonl"))
    assert [(item["row_index"], item["run_index"]) for item in items] == [(r, k) for r in range(6) for k in range(2)]
    assert [item["source_row_index"] for item in items[::2]] == [1, 2, 3, 4, 5, 6]
    assert [(item["status"], item["error_type"], item["reward"]) for item in items[::2]] == [
        ("success", None, 1.0),
        ("failed", "workflow_failed", None),
        ("failed", "grader_failed", None),
        ("failed", "callback_timeout", None),
        ("skipped", None, None),
        ("success", None, 0.0),
    ]
    assert items[6]["tokens"] is None, "the model was never called"
    assert items[0]["tokens"] > 0
    assert (written / "summary.jsonl").read_bytes() == (written / "index.jsonl").read_bytes()


def test_metrics_count_failures_and_leave_out_skipped_rollouts(written: Path) -> None:
    metrics = json.loads((written / "metrics.json").read_text(encoding="utf-8"))
    run, summary = metrics["eval_run"], metrics["summary"]
    assert {run[name] for name in ("status", "name", "dataset_name", "model_name", "rollout_name")} == {
        "finished", "every", "tasks", "scripted", "plain"
    }  # fmt: skip
    assert run["started_at"] < run["completed_at"]
    assert summary.pop("tokens_used") > 0
    assert summary == {
        "total_samples": 12,
        "completed_samples": 12,
        "graded": 4,
        "passed": 2,
        "failed": 6,
        "skipped": 2,
        "pass_rate": 0.2,
        "pass_threshold": 1.0,
        "reward_stats": {"mean": 0.5, "median": 0.5, "std": 0.5, "min": 0.0, "max": 1.0},
        "n_runs": 2,
        "pass_at_k": [{"k": 1, "value": 0.2}, {"k": 2, "value": 0.2}],
    }
    progress = json.loads((written / "progress.json").read_text(encoding="utf-8"))
    assert progress == {"total_runs": 12, "sampled_rows": 6, "total_dataset_rows": 7}


def test_the_manifest_has_what_a_continued_run_must_share(written: Path) -> None:
    manifest = json.loads((written / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["schema_version"], manifest["run_name"]) == (1, "every")
    assert manifest["inputs"]["rollout server"]["rollout"] == "rollouts/plain/main.py"
    assert manifest["inputs"]["rows"]["rows"] == "1-6"


def test_the_journal_and_the_log_tell_what_happened_when(written: Path) -> None:
    events = list(lines(written / "events.jsonl"))
    assert [event["type"] for event in events] == ["run_started", *["item_completed"] * 12, "run_finished"]
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    log = (written / "logs.txt").read_text(encoding="utf-8").splitlines()
    assert len(log) == len(events)
    (raised, _) = [line for line in log if " ERROR [row 1 run " in line]
    details = json.loads(raised[raised.index("{") :])
    assert (details["err_message"], details["file"]) == ("RuntimeError: the workflow broke", "rollouts/plain/main.py")
    assert details["traceback"].endswith("RuntimeError: the workflow broke")


def test_a_secret_is_redacted_whatever_its_name(written: Path) -> None:
    assert "running first [REDACTED]" in (written / "server.log").read_text(encoding="utf-8")
    for file in written.rglob("*"):
        assert file.is_dir() or b"hush-hush" not in file.read_bytes()


def test_each_rollout_has_a_trajectory_and_its_artifacts(written: Path) -> None:
    assert len(list((written / "trajectories").iterdir())) == 12
    trajectory = json.loads((written / "trajectories/row_0_run_1.json").read_text(encoding="utf-8"))
    assert trajectory["schema_version"] == "ATIF-v1.7"
    assert [step["source"] for step in trajectory["steps"]] == ["system", "user", "agent", "user", "agent"]
    assert [step["metrics"]["completion_tokens"] > 0 for step in trajectory["steps"][2::2]] == [True, True]
    assert trajectory["agent"]["model_name"] == "scripted"
    about = trajectory["extra"]["osmosis"]
    assert (about["label"], about["reward"], about["sample_metrics"]) == ("ok", 1.0, {"turns": 2})
    kept = {file.relative_to(written / "artifacts").as_posix() for file in (written / "artifacts").rglob("*.txt")}
    assert kept == {"row_0_run_0/notes.txt", "row_0_run_1/notes.txt"}


def test_files_of_the_same_run_are_replaced_and_of_another_one_kept(workspace: Path) -> None:
    (kept,) = (workspace / "out").glob("small.archive-*")
    assert (kept / "index.jsonl").read_bytes() == (workspace / "before" / "index.jsonl").read_bytes()
    (new, *_) = lines(workspace / "out/small/index.jsonl")
    assert (new["row_index"], new["source_row_index"]) == (0, 6)
    assert sorted(path.name for path in (workspace / "out").iterdir()) == ["every", "small", kept.name]
