"""Evaluations that ran elsewhere: what is uploaded becomes a run when it is whole and what was announced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from platforms import Platform, serving

IMPORTS = "/api/cli/eval-runs/imports"
INDEX = [
    {"row_index": 0, "run_index": 0, "rollout_id": "a" * 32, "status": "success", "reward": 1.0, "tokens": 5},
    {"row_index": 0, "run_index": 1, "rollout_id": "b" * 32, "status": "failed", "reward": None, "tokens": None},
    {"row_index": 1, "run_index": 0, "rollout_id": "c" * 32, "status": "skipped"},
    {"row_index": 1, "run_index": 1, "rollout_id": "d" * 32, "status": "success", "reward": 0.25},
]
INDEX[0]["trajectory_filename"] = "trajectory.json"
FILES = {
    "index.jsonl": "".join(json.dumps(line) + "\n" for line in INDEX).encode(),
    "progress.json": b'{"sampled_rows": 2, "total_dataset_rows": 20, "total_runs": 4}',
    f"rollout_trials/{'a' * 32}/trajectory.json": b'{"steps": []}',
    f"rollout_trials/{'a' * 32}/artifacts/notes/x.txt": b"x",
}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


def announced(local_id: str, files: dict[str, bytes], **changes: Any) -> dict[str, Any]:
    experiment = {
        "rollout": {"name": "plain", "source_digest": "x"},
        "entrypoint": "main.py",
        "model_path": "acme/model",
        "dataset": {"name": "sums", "sha256": "y", "selected_source_rows": "0-1"},
    }
    run = {
        "name": f"local-{local_id}",
        "started_at": "2026-11-22T10:00:00+00:00",
        "completed_at": "2026-11-22T10:01:00Z",
        "experiment_config": experiment,
        "evaluation_config": {"n": 2, "pass_threshold": 0.5},
    }
    described = [
        {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in files.items()
    ]
    about = {"schema_version": 1, "local_run_id": local_id, "manifest_digest": "z", "provenance": {}}
    return {**about, "run": run, "schema_versions": {}, "files": described, **changes}


def start(platform: Platform, local_id: str, files: dict[str, bytes]) -> dict[str, Any]:
    reply = platform.ask("POST", IMPORTS, announced(local_id, files))
    assert reply.status == 200, reply
    return reply.body


def send(platform: Platform, session: str, files: dict[str, bytes]) -> list[int]:
    asked = platform.ask("POST", f"{IMPORTS}/{session}/uploads", {"paths": list(files)})
    urls = {each["path"]: each["upload"]["presigned_url"] for each in asked.body["files"]}
    return [platform.ask("PUT", url, files[path]).status for path, url in urls.items()]


def test_the_results_are_computed_from_what_was_uploaded(platform: Platform) -> None:
    state = start(platform, "one", FILES)
    assert (state["status"], state["expected_files"], state["uploaded_files"]) == ("uploading", 4, 0)
    session = state["session_id"]
    early = platform.ask("POST", f"{IMPORTS}/{session}/finalize", {})
    assert (early.status, "aren't uploaded yet" in early.body["error"]) == (409, True)
    some = dict(list(FILES.items())[:2])
    assert send(platform, session, some) == [200, 200]
    # The upload was interrupted here: it goes on with what is missing.
    assert start(platform, "one", FILES)["uploaded_files"] == 2
    assert send(platform, session, FILES) == [200, 200]
    done = platform.ask("POST", f"{IMPORTS}/{session}/finalize", {}).body
    assert (done["status"], done["uploaded_files"], done["eval_run_name"]) == ("finalized", 4, "local-one")
    assert platform.ask("POST", f"{IMPORTS}/{session}/finalize", {}).body == done
    shown = platform.ask("GET", "/api/cli/eval-runs/local-one").body
    results = shown["results"]
    assert (results["graded"], results["passed"], results["failed"], results["skipped"]) == (2, 1, 1, 1)
    assert (results["pass_rate"], results["total_tokens"], results["total_dataset_rows"]) == (1 / 3, 5, 20)
    manifest = platform.ask("GET", "/api/cli/eval-runs/local-one/samples/manifest?types=trajectories,artifacts").body
    assert [file["path"] for file in manifest["files"]] == [
        "artifacts/row_0_run_0/notes/x.txt",
        "trajectories/row_0_run_0.json",
    ]


def test_two_local_runs_of_one_name_have_two_names(platform: Platform) -> None:
    names = []
    for local_id in ("two", "three"):
        body = announced(local_id, FILES)
        body["run"]["name"] = "same"
        session = platform.ask("POST", IMPORTS, body).body["session_id"]
        send(platform, session, FILES)
        names.append(platform.ask("POST", f"{IMPORTS}/{session}/finalize", {}).body["eval_run_name"])
    assert names[0] == "same" != names[1]


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//b", "./a", "a\\b", "a\nb", "x" * 1025, ""])
def test_a_path_that_leads_elsewhere_is_refused(platform: Platform, path: str) -> None:
    reply = platform.ask("POST", IMPORTS, announced("path", {**FILES, path: b"x"}))
    assert (reply.status, reply.body["field"]) == (400, "files")


def test_files_that_were_not_announced_are_refused(platform: Platform) -> None:
    session = start(platform, "four", FILES)["session_id"]
    changed = {name: data[:-1] + b" " for name, data in FILES.items()}
    assert send(platform, session, changed) == [400] * 4
    assert send(platform, session, {name: data + b"x" for name, data in FILES.items()}) == [400] * 4
    assert platform.ask("POST", f"{IMPORTS}/{session}/uploads", {"paths": ["other"]}).status == 400
    complete = platform.ask("POST", f"{IMPORTS}/{session}/uploads/complete", {"path": "index.jsonl"})
    assert complete.status == 409
    other = {"X-Osmosis-Git": "acme/other"}
    assert platform.ask("POST", f"{IMPORTS}/{session}/finalize", {}, headers=other).status == 404


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("index.jsonl", b"{"),
        ("index.jsonl", b'{"row_index": 0}\n'),
        ("index.jsonl", FILES["index.jsonl"] * 2),
        ("progress.json", b"[]"),
    ],
)
def test_an_unreadable_index_creates_no_run(platform: Platform, name: str, data: bytes) -> None:
    files = {**FILES, name: data}
    session = start(platform, f"odd-{hashlib.sha256(name.encode() + data).hexdigest()[:8]}", files)["session_id"]
    send(platform, session, files)
    refused = platform.ask("POST", f"{IMPORTS}/{session}/finalize", {})
    assert (refused.status, name in refused.body["error"]) == (400, True)


def test_two_files_cannot_have_the_same_destination(platform: Platform) -> None:
    files = {**FILES, "trajectories/row_0_run_0.json": b"x"}
    session = start(platform, "clash", files)["session_id"]
    send(platform, session, files)
    refused = platform.ask("POST", f"{IMPORTS}/{session}/finalize", {})
    assert (refused.status, "would overwrite another file" in refused.body["error"]) == (400, True)
