"""A submitted run, from its acceptance to its results: every stage, in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from commands import command_line
from osmosis_ai.platform.job import sampled_rows
from osmosis_ai.platform.queue import Limits, choose
from osmosis_ai.platform.workspace import LocalWorkspace, snapshot
from osmosis_ai.testing import Gate, ScriptedEndpoint, by_turn, status, text
from platforms import Platform, commit, git, make_workspace, rows, serving, submission
from waiting import PATIENCE, eventually


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, workspace: Path) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        assert platform.upload("sums", rows(30)).status == 200
        # The workspace is registered at first sight.
        platform.ask("GET", "/api/cli/eval-runs", headers={"X-Osmosis-Path": str(workspace)})
        yield platform


def submit(platform: Platform, body: dict, **headers: str) -> dict:
    reply = platform.ask("POST", "/api/cli/eval-runs", body, headers=headers)
    assert reply.status in (200, 201), reply
    return reply.body


def test_a_submitted_run_goes_through_all_stages_to_its_results(platform: Platform) -> None:
    run = submit(platform, submission())
    assert run["status"] == "pending"
    shown = platform.wait(run["name"])
    steps = list(dict.fromkeys(line.partition(":")[0] for line in platform.log(run["name"])))
    assert shown["eval_run"]["status"] == "finished", platform.log(run["name"])
    assert steps == ["submit", "clone", "secrets", "select", "environment", "preflight", "rollout", "finish"]
    results = shown["results"]
    assert (results["graded"], results["passed"], results["sampled_rows"], results["total_dataset_rows"]) == (
        2,
        2,
        2,
        30,
    )
    assert results["reward_stats"]["pass_at_k"] == {"1": 1.0}
    assert len(shown["commit_sha"]) == 40


def test_without_a_limit_a_random_tenth_is_run_and_its_rows_are_known(platform: Platform) -> None:
    body = {**submission(), "evaluation_config": {"n": 2}}
    shown = platform.wait(submit(platform, body)["name"])
    assert (shown["results"]["sampled_rows"], shown["results"]["total_runs"]) == (3, 6)
    assert shown["config"]["row_numbers"] == sampled_rows(30, shown["config"]["seed"])


def test_an_operator_has_runs_go_to_a_cluster(tmp_path: Path, workspace: Path) -> None:
    """To one of an engine that there isn't, which is where it shows."""
    with serving(tmp_path, Limits(1, workers={"cluster": "dusk://here", "nodes": 2})) as platform:
        assert platform.upload("sums", rows(2)).status == 200
        platform.ask("GET", "/api/cli/eval-runs", headers={"X-Osmosis-Path": str(workspace)})
        run = submit(platform, submission())["name"]
        assert platform.wait(run)["eval_run"]["status"] == "failed"
        assert any("--cluster dusk://here: write auto, local or ray://HOST:PORT" in line for line in platform.log(run))


def test_a_repeated_key_starts_one_run(platform: Platform) -> None:
    key = {"Idempotency-Key": "once"}
    with ThreadPoolExecutor(4) as pool:
        names = {run["name"] for run in pool.map(lambda _: submit(platform, submission(), **key), range(8))}
    assert len(names) == 1
    other = platform.ask("POST", "/api/cli/eval-runs", {**submission(), "env_config": {"A": "1"}}, headers=key)
    assert (other.status, other.body["code"]) == (409, "CONFLICT")
    platform.wait(names.pop())


def test_secrets_reach_the_rollout_and_nothing_else(platform: Platform, workspace: Path) -> None:
    main = workspace / "rollouts/plain/main.py"
    before = main.read_text(encoding="utf-8")
    said = ", ".join(f'os.environ["{name}"]' for name in ("COLOUR", "THE_WORD", "OTHER"))
    shown = f'print("got", {said}, flush=True)\n\n\nasync def health'
    main.write_text(before.replace("async def health", shown, 1), encoding="utf-8")
    commit(workspace)
    stored = {"name": "THE_WORD", "value": "abracadabra", "scope": "workspace"}
    assert platform.ask("POST", "/api/cli/environment-secrets", stored).status == 200
    provided = {"required": ["THE_WORD", "OTHER"], "provided": {"OTHER": "open-sesame"}}
    body = {**submission(), "env_config": {"COLOUR": "green"}, "secrets": provided}
    run = submit(platform, body)
    found = platform.wait(run["name"])
    main.write_text(before, encoding="utf-8")
    commit(workspace)
    assert found["eval_run"]["status"] == "finished", platform.log(run["name"])
    assert found["resolved_secret_scopes"] == {"THE_WORD": "workspace", "OTHER": "provided"}
    logs = "".join(path.read_text("utf-8") for path in platform.home.folder.glob("stores/*/logs/*.log"))
    assert "got green" in logs
    for file in [*platform.home.folder.rglob("*")]:
        if file.is_file():
            data = file.read_bytes()
            assert b"abracadabra" not in data, file
            assert b"open-sesame" not in data, file


@pytest.mark.parametrize(
    ("experiment", "step", "said"),
    [
        ({"rollout": "none"}, "select", "there is no folder rollouts/none"),
        ({"commit_sha": "0" * 40}, "clone", "push it first"),
        ({"branch": "nowhere"}, "clone", "nowhere"),
    ],
)
def test_a_run_that_cannot_start_fails_before_any_row(
    platform: Platform, experiment: dict[str, str], step: str, said: str
) -> None:
    run = submit(platform, submission(**experiment))
    shown = platform.wait(run["name"])
    assert (shown["eval_run"]["status"], shown["results"]) == ("failed", None)
    last = platform.log(run["name"])[-1]
    assert last.startswith(f"{step}: ")
    assert said in last


def test_a_model_that_refuses_the_key_fails_the_run_at_its_preflight(platform: Platform) -> None:
    with ScriptedEndpoint(by_turn(text("1")), api_key="sesame").run_in_thread() as endpoint:
        body = {**submission(model_path="scripted"), "advanced_config": {"base_url": endpoint.url}}
        run = submit(platform, body)
        shown = platform.wait(run["name"])
    assert (shown["eval_run"]["status"], shown["results"]) == ("failed", None)
    assert platform.log(run["name"])[-1].startswith("preflight: ")


def test_a_run_is_stopped_and_goes_on_where_it_was(platform: Platform) -> None:
    gate = Gate()
    held = by_turn(text("hm"), text("1"))

    def answer(request: Any) -> Any:
        return held(request).after(gate) if len(endpoint.chats) > 5 else held(request)

    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        body = {**submission(model_path="scripted"), "advanced_config": {"base_url": endpoint.url}}
        body["evaluation_config"] = {"limit": 6, "batch_size": 1}
        run = submit(platform, body)
        platform.wait(run["name"], "running")
        gate.reached.wait(PATIENCE)
        assert platform.ask("POST", f"/api/cli/eval-runs/{run['name']}/stop", {}).status == 200
        gate.open()
        shown = platform.wait(run["name"])
        assert shown["eval_run"]["status"] == "stopped"
        done = shown["results"]["total_runs"]
        assert 0 < done < 6
        assert platform.ask("POST", f"/api/cli/eval-runs/{run['name']}/stop", {}).status == 409
        assert platform.ask("POST", f"/api/cli/eval-runs/{run['name']}/retry", {}).status == 200
        shown = platform.wait(run["name"])
    assert (shown["eval_run"]["status"], shown["results"]["total_runs"]) == ("finished", 6)
    assert shown["results"]["resumed_count"] == done


def test_a_run_that_waits_for_a_place_is_stopped_at_once(platform: Platform) -> None:
    gate = Gate()
    with ScriptedEndpoint(lambda request: text("1").after(gate)).run_in_thread() as endpoint:
        body = {**submission(model_path="scripted"), "advanced_config": {"base_url": endpoint.url}}
        running = [submit(platform, body)["name"] for _ in range(2)]
        for name in running:
            platform.wait(name, "running")
        waiting = submit(platform, submission())["name"]
        assert platform.ask("POST", f"/api/cli/eval-runs/{waiting}/stop", {}).status == 200
        assert platform.wait(waiting)["eval_run"]["status"] == "stopped"
        gate.open()
        assert {platform.wait(name)["eval_run"]["status"] for name in running} == {"finished"}


def test_a_killed_job_goes_on_from_the_recorded_rollouts(platform: Platform) -> None:
    gate = Gate()
    held = by_turn(text("hm"), text("1"))

    def answer(request: Any) -> Any:
        return held(request).after(gate) if len(endpoint.chats) > 5 else held(request)

    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        body = {**submission(model_path="scripted"), "advanced_config": {"base_url": endpoint.url}}
        body["evaluation_config"] = {"limit": 6, "batch_size": 1}
        run = submit(platform, body)
        gate.reached.wait(PATIENCE)
        job = next(child for child in psutil.Process().children() if "osmosis_ai.platform.job" in command_line(child))
        job.kill()
        gate.open()
        shown = platform.wait(run["name"])
    assert (shown["eval_run"]["status"], shown["results"]["total_runs"]) == ("finished", 6), platform.log(run["name"])
    assert shown["results"]["resumed_count"] > 0


def test_failed_rollouts_are_run_again_by_a_retry(platform: Platform) -> None:
    broken = True

    def answer(request: Any) -> Any:
        return status(500) if broken else text("1")

    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        body = {**submission(model_path="scripted"), "advanced_config": {"base_url": endpoint.url}}
        name = submit(platform, body)["name"]
        shown = platform.wait(name)
        assert (shown["eval_run"]["status"], shown["results"]["failed"]) == ("finished", 2)
        broken = False
        retried = platform.ask("POST", f"/api/cli/eval-runs/{name}/retry", {})
        assert (retried.status, retried.body["retryable_samples"]) == (200, 2)
        shown = platform.wait(name)
    assert (shown["results"]["failed"], shown["results"]["graded"]) == (0, 2), platform.log(name)
    assert platform.ask("POST", f"/api/cli/eval-runs/{name}/retry", {}).status == 409


def test_events_tell_a_run_from_its_beginning_to_its_end(platform: Platform) -> None:
    run = submit(platform, submission())
    headers = {"Authorization": f"Bearer {platform.token}", "X-Osmosis-Git": "acme/rollouts"}
    url = f"{platform.url}/api/cli/eval-runs/{run['name']}/events"
    with urlopen(Request(url, headers=headers), timeout=60) as stream:
        lines = stream.read().decode().splitlines()
    kinds = [line for line in lines if line.startswith("event: ")]
    assert {*kinds} == {"event: log", "event: run"}
    assert '"status":"finished"' in lines[-2]


def test_a_snapshot_is_submitted_as_the_working_tree_is(platform: Platform, workspace: Path) -> None:
    root = workspace / "rollouts" / "new"
    shutil.copytree(workspace / "rollouts/plain", root)
    made = snapshot(LocalWorkspace(workspace, "acme/rollouts", None))
    shutil.rmtree(root)
    run = submit(platform, submission(rollout="new", commit_sha=made))
    assert platform.wait(run["name"])["eval_run"]["status"] == "finished", platform.log(run["name"])
    assert git(workspace, "status", "--porcelain") == ""


def test_nothing_of_a_repository_runs_or_leads_out_when_it_is_cloned(platform: Platform, tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "evil")
    hook = folder / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    (folder / ".gitattributes").write_text("* filter=run\n")
    (folder / "data/link").symlink_to("/etc")
    commit(folder)
    here = {"X-Osmosis-Git": "acme/evil", "X-Osmosis-Path": str(folder)}
    about = {"file_name": "sums", "file_size": len(rows(4)), "extension": "jsonl"}
    created = platform.ask("POST", "/api/cli/datasets", about, headers=here).body
    platform.ask("PUT", created["upload"]["presigned_url"], rows(4))
    platform.ask("POST", f"/api/cli/datasets/{created['id']}/complete", {}, headers=here)
    run = platform.ask("POST", "/api/cli/eval-runs", submission(), headers=here).body

    def ended() -> bool:
        shown = platform.ask("GET", f"/api/cli/eval-runs/{run['name']}", headers=here).body
        return shown["eval_run"]["status"] == "failed"

    eventually(ended)
    logs = platform.ask("GET", f"/api/cli/eval-runs/{run['name']}/logs", headers=here).body["logs"]
    assert logs[-1]["message"] == "data/link is a link that leads out of the repository"
    assert not (tmp_path / "ran").exists()


def test_each_user_in_turn_and_each_model_within_its_limit() -> None:
    def waiting(*runs: str) -> list[Any]:
        return [{"id": name, "creator": name[0], "model": name[1]} for name in runs]

    def chosen(limits: Limits, *runs: str) -> list[str]:
        return [row["id"] for row in choose(waiting(*runs), {}, limits)]

    assert chosen(Limits(3), "am1", "am2", "am3", "bm1") == ["am1", "bm1", "am2"]
    assert chosen(Limits(4, 2), "am1", "am2", "am3", "an1", "bm1") == ["am1", "bm1", "an1"]
    assert chosen(Limits(2, 1), "am1", "bm1") == ["am1"]


def test_a_model_s_limit_holds_back_its_runs_alone(tmp_path: Path, workspace: Path) -> None:
    gate = Gate()
    with (
        serving(tmp_path, Limits(2, 1)) as platform,
        ScriptedEndpoint(lambda request: text("1").after(gate)).run_in_thread() as endpoint,
    ):
        assert platform.upload("sums", rows(4)).status == 200
        platform.ask("GET", "/api/cli/eval-runs", headers={"X-Osmosis-Path": str(workspace)})
        body = {**submission(model_path="scripted"), "advanced_config": {"base_url": endpoint.url}}
        first, second = submit(platform, body)["name"], submit(platform, body)["name"]
        platform.wait(first, "running")
        other = submit(platform, submission())["name"]
        assert platform.wait(other)["eval_run"]["status"] == "finished"
        assert platform.log(second) == [f"submit: {second} is queued"]
        gate.open()
        assert {platform.wait(name)["eval_run"]["status"] for name in (first, second)} == {"finished"}


def test_a_clock_that_is_set_back_loses_no_run_and_makes_no_negative_time(tmp_path: Path, workspace: Path) -> None:
    day = 86400
    with serving(tmp_path) as platform:
        assert platform.upload("sums", rows(4)).status == 200
        platform.ask("GET", "/api/cli/eval-runs", headers={"X-Osmosis-Path": str(workspace)})
        name = submit(platform, submission(commit_sha="0" * 40))["name"]
        platform.wait(name)
        # As if everything until now had been written before the clock was set back by a day.
        with platform.database.write("setting the clock") as db:
            db.execute(f"UPDATE runs SET created_at = created_at + {day}")
            db.execute(f"UPDATE logs SET at = at + {day}")
            db.execute(f"UPDATE datasets SET updated_at = updated_at + {day}")
        assert platform.ask("POST", f"/api/cli/eval-runs/{name}/retry", {}).status == 200
        platform.wait(name)
        later = submit(platform, submission())["name"]
        assert platform.wait(later)["eval_run"]["status"] == "finished"
        listed = platform.ask("GET", "/api/cli/eval-runs").body["eval_runs"]
        assert [run["name"] for run in listed] == [later, name]
        assert platform.log(name)[-1].startswith("clone: ")
        with platform.database.write("setting the clock") as db:
            db.execute(f"UPDATE runs SET started_at = started_at + {day}")
        metrics = platform.ask("GET", f"/api/cli/eval-runs/{later}/metrics").body
        assert metrics["overview"]["duration_ms"] == 0
    # Nothing of it is taken for given up, or for expired.
    with serving(tmp_path) as platform:
        assert platform.ask("GET", "/api/cli/datasets/sums").body["status"] == "uploaded"
