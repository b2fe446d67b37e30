"""The commands of a platform against a running one: submit, list, info, logs, download, stop; datasets and secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commands import Finished, run_osmosis
from platforms import Platform, commit, make_workspace, rows, serving
from waiting import eventually

CONFIG = """\
[experiment]
rollout = "plain"
entrypoint = "main.py"
model_path = "offline/oracle"
dataset = "sums"

[evaluation]
limit = 2

[secrets]
required = []
"""
Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    (folder / "configs/eval/sums.toml").write_text(CONFIG, encoding="utf-8")
    (folder / "data/sums.jsonl").write_bytes(rows(30))
    commit(folder)
    return folder


@pytest.fixture(scope="module")
def osmosis(platform: Platform, workspace: Path) -> Run:
    def run(*arguments: str, typed: str = "", **env: str) -> Finished:
        place = {"OSMOSIS_PLATFORM_DATA": str(platform.home.folder)}
        credentials = {"OSMOSIS_CREDENTIALS": str(platform.home.folder / "credentials.json")}
        return run_osmosis(*arguments, cwd=workspace, env={**place, **credentials, **env}, typed=typed)

    return run


@pytest.fixture(scope="module")
def uploaded(osmosis: Run) -> dict:
    done = osmosis("dataset", "upload", "data/sums.jsonl", "--json")
    assert done.code == 0, done.stderr
    return done.json


@pytest.fixture(scope="module")
def finished(osmosis: Run, uploaded: dict) -> dict:
    """A run that was submitted and followed to its end."""
    done = osmosis("eval", "submit", "configs/eval/sums.toml", "--yes", "--wait", "--json")
    assert done.code == 0, done.stderr
    return done.json["data"]


def error_of(done: Finished) -> dict:
    assert done.code == 1, done.stdout + done.stderr
    assert done.stdout == ""
    return json.loads(done.stderr.splitlines()[-1])["error"]


def test_a_dataset_is_uploaded_listed_shown_and_downloaded(osmosis: Run, uploaded: dict, tmp_path: Path) -> None:
    assert (uploaded["operation"], uploaded["status"]) == ("dataset.upload", "success")
    assert uploaded["resource"]["row_count"] == 30
    listed = osmosis("dataset", "list", "--json").json
    assert [item["file_name"] for item in listed["items"]] == ["sums"]
    assert listed["git"]["identity"].startswith("local/")
    shown = osmosis("dataset", "preview", "sums", "--rows", "2", "--json").json["data"]
    assert [row["ground_truth"] for row in shown["rows"]] == ["0", "1"]
    assert "ground_truth" in osmosis("dataset", "info", "sums").stdout
    done = osmosis("dataset", "download", "sums", "-o", str(tmp_path / "back.jsonl"))
    assert done.code == 0, done.stderr
    assert (tmp_path / "back.jsonl").read_bytes() == rows(30)
    assert error_of(osmosis("dataset", "upload", "data/sums.jsonl", "--json"))["code"] == "CONFLICT"


def test_a_run_is_followed_to_its_results(osmosis: Run, finished: dict) -> None:
    name = finished["eval_run"]["name"]
    assert finished["eval_run"]["status"] == "finished"
    assert (finished["summary"]["graded"], finished["summary"]["pass_rate"]) == (2, 1.0)
    listed = osmosis("eval", "list", "--json").json["items"]
    assert name in [item["name"] for item in listed]
    assert "finished" in osmosis("eval", "info", name).stdout
    logged = osmosis("eval", "logs", name, "--limit", "3", "--json").json
    assert logged["has_more"]
    older = osmosis("eval", "logs", name, "--limit", "3", "--cursor", logged["next_cursor"], "--json").json
    assert older["items"][-1]["timestamp"] <= logged["items"][0]["timestamp"]
    plain = osmosis("--plain", "eval", "list").stdout.splitlines()
    assert plain[0].split("\t")[0] == name


def test_a_run_that_is_waited_for_tells_its_log_and_its_pass_rate(osmosis: Run, uploaded: dict) -> None:
    done = osmosis("eval", "submit", "configs/eval/sums.toml", "--yes", "--wait")
    assert done.code == 0, done.stderr
    assert "rollout: 2 rollouts of 2 rows" in done.stderr
    assert "2/2 rollouts, 100.0% (95 % CI 34.2% to 100.0%) passed" in done.stderr
    assert "Pass rate: 100.0% (95 % CI 34.2% to 100.0%), with a reward of at least 1" in done.stdout


def test_waiting_for_a_run_that_fails_exits_with_1(osmosis: Run, workspace: Path, uploaded: dict) -> None:
    config = CONFIG.replace("[evaluation]", f'commit_sha = "{"0" * 40}"\n[evaluation]')
    (workspace / "configs/eval/nowhere.toml").write_text(config, encoding="utf-8")
    done = osmosis("eval", "submit", "configs/eval/nowhere.toml", "--yes", "--wait")
    assert done.code == 1
    assert "Status:    failed" in done.stdout
    assert "push it first" in done.stderr


def test_the_page_of_a_run_is_opened_by_a_url_with_a_token(osmosis: Run, platform: Platform, finished: dict) -> None:
    page = finished["platform_url"]
    assert page.startswith(f"{platform.url}/runs/local~")
    assert page.endswith(finished["eval_run"]["name"])
    assert page in osmosis("eval", "info", finished["eval_run"]["name"]).stdout
    opened = osmosis("platform", "open", finished["eval_run"]["name"], "--no-open", "--json").json["resource"]["url"]
    assert opened.startswith(f"{page}?token=")
    listed = osmosis("platform", "open", "--no-open").stdout
    assert f"{platform.url}/?token=" in listed


def test_the_files_of_a_run_are_downloaded(osmosis: Run, finished: dict, tmp_path: Path) -> None:
    name = finished["eval_run"]["name"]
    done = osmosis("eval", "download", name, "-o", str(tmp_path), "--rows", "1", "--json")
    assert done.code == 0, done.stderr
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["index.jsonl", "metrics.json", "summary.jsonl", "trajectories/row_1_run_0.json"]
    again = osmosis("eval", "download", name, "-o", str(tmp_path), "--rows", "1")
    assert "0 files" in again.stdout


def test_a_local_run_is_uploaded_once_and_replaced_when_asked(osmosis: Run, workspace: Path, tmp_path: Path) -> None:
    config = CONFIG.replace('"sums"', '"data/sums.jsonl"')
    (workspace / "configs/eval/local.toml").write_text(config, encoding="utf-8")
    done = osmosis("eval", "run", "configs/eval/local.toml", "-o", str(tmp_path))
    assert done.code == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    uploaded = osmosis("eval", "upload", str(folder), "--json")
    assert uploaded.code == 0, uploaded.stderr
    resource = uploaded.json["resource"]
    assert (resource["status"], resource["eval_run_name"]) == ("finalized", folder.name)
    shown = osmosis("eval", "info", folder.name, "--json").json["data"]
    assert (shown["eval_run"]["status"], shown["summary"]["graded"], shown["summary"]["pass_rate"]) == (
        "finished",
        2,
        1.0,
    )
    back = tmp_path / "back"
    assert osmosis("eval", "download", folder.name, "-o", str(back)).code == 0
    for name in ("metrics.json", "trajectories/row_1_run_0.json"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()

    again = osmosis("eval", "upload", str(folder), "--json").json["resource"]
    assert again["eval_run_id"] == resource["eval_run_id"]
    index = folder / "index.jsonl"
    index.write_text(index.read_text("utf-8").replace('"reward":1.0', '"reward":0.0', 1), "utf-8")
    assert error_of(osmosis("eval", "upload", str(folder), "--json"))["code"] == "CONFLICT"
    replaced = osmosis("eval", "upload", str(folder), "--replace", "--json").json["resource"]
    assert replaced["eval_run_id"] == resource["eval_run_id"]
    assert osmosis("eval", "info", folder.name, "--json").json["data"]["summary"]["pass_rate"] == 0.5
    assert "ran elsewhere" in error_of(osmosis("eval", "retry", folder.name, "--json"))["message"]
    assert "isn't the folder of a local run" in error_of(osmosis("eval", "upload", str(tmp_path), "--json"))["message"]


def test_rollouts_and_models_that_were_submitted_are_listed(osmosis: Run, finished: dict) -> None:
    listed = osmosis("rollout", "list", "--remote", "--json").json["items"]
    assert [(item["name"], len(item["last_synced_commit_sha"])) for item in listed] == [("plain", 40)]
    assert osmosis("rollout", "list", "--remote", "--branch", "other", "--json").json["items"] == []
    sections = osmosis("model", "list", "--json").json["sections"]
    assert "offline/oracle" in [item["model_name"] for item in sections["base"]["items"]]
    assert sections["lora"]["items"] == []
    assert "base\toffline/oracle" in osmosis("model", "list", "--type", "base", "--plain").stdout
    assert "use all, base or lora" in error_of(osmosis("model", "list", "--type", "x", "--json"))["message"]


def test_secrets_are_stored_and_never_shown(osmosis: Run, platform: Platform) -> None:
    done = osmosis("secret", "set", "MY_TOKEN", "--env", "VALUE", "--json", VALUE="abracadabra")
    assert done.code == 0, done.stderr
    listed = osmosis("secret", "list", "--json")
    assert [(item["name"], item["scope"]) for item in listed.json["items"]] == [("MY_TOKEN", "personal")]
    assert error_of(osmosis("secret", "set", "MY_TOKEN", "--json"))["code"] == "INTERACTIVE_REQUIRED"
    assert osmosis("secret", "delete", "MY_TOKEN", "--yes").code == 0
    missing = error_of(osmosis("secret", "delete", "MY_TOKEN", "--yes", "--json"))
    assert missing["code"] == "NOT_FOUND"
    for file in platform.home.folder.rglob("*"):
        assert not file.is_file() or b"abracadabra" not in file.read_bytes(), file


def test_whoami_shows_the_user_and_the_platform(osmosis: Run, platform: Platform) -> None:
    shown = osmosis("whoami", "--json").json["data"]
    assert (shown["platform_url"], shown["source"]) == (platform.url, "local")
    _, token = platform.accounts.create_token("ada", "test")
    done = osmosis("auth", "login", "--token", "-", "--json", typed=f"{token}\n")
    assert done.code == 0, done.stderr
    assert osmosis("auth", "whoami", "--json").json["data"]["name"] == "ada"
    assert osmosis("logout", "--yes", "--json").json["status"] == "success"
    assert osmosis("whoami", "--json").json["data"]["source"] == "local"
    assert error_of(osmosis("whoami", "--json", OSMOSIS_TOKEN="wrong"))["code"] == "AUTH_REQUIRED"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("limit = 2", "limits = 2", "sums.toml:8: unknown key limits in [evaluation]; did you mean limit?"),
        ("limit = 2", "limit = 0", "it should be at least 1"),
        ('dataset = "sums"', 'dataset = "none"', "there is no dataset none"),
        ("required = []", 'required = ["NOT_THERE"]', "`osmosis secret set NOT_THERE`"),
        ('rollout = "plain"', 'rollout = "plian"', "did you mean plain?"),
    ],
)
def test_a_config_is_refused_with_what_to_change(
    osmosis: Run, uploaded: dict, workspace: Path, before: str, after: str, said: str
) -> None:
    file = workspace / "configs/eval/wrong.toml"
    (workspace / "configs/eval/sums.toml").with_name("wrong.toml").write_text(CONFIG.replace(before, after), "utf-8")
    try:
        failed = error_of(osmosis("eval", "submit", "configs/eval/wrong.toml", "--yes", "--json"))
    finally:
        file.unlink()
    assert said.replace("sums.toml", "wrong.toml") in failed["message"]


def test_training_is_refused_until_there_is_a_trainer(osmosis: Run, uploaded: dict, workspace: Path) -> None:
    config = CONFIG.partition("[evaluation]")[0] + "[training]\nlr = 1e-6\n"
    file = workspace / "configs/training/sums.toml"
    file.write_text(config, encoding="utf-8")
    failed = error_of(osmosis("train", "submit", "configs/training/sums.toml", "--yes", "--json"))
    file.unlink()
    assert "no trainer is configured" in failed["message"]
    assert "`osmosis platform up --trainer COMMAND`" in failed["message"]
    assert osmosis("train", "list", "--json").json["items"] == []


def test_a_login_waits_until_it_is_approved_on_the_platform_s_machine(osmosis: Run, platform: Platform) -> None:
    def approve() -> None:
        code = eventually(lambda: platform.database.one("SELECT user_code FROM devices"))[0]
        assert platform.accounts.approve_login(code, "grace")

    with ThreadPoolExecutor(1) as pool:
        approved = pool.submit(approve)
        done = osmosis("auth", "login", "--json")
        approved.result()
    assert done.code == 0, done.stderr
    assert (done.json["resource"]["name"], done.json["resource"]["source"]) == ("grace", "device")
    assert "osmosis platform token approve" in done.stderr
    assert osmosis("auth", "whoami", "--json").json["data"]["name"] == "grace"
    assert osmosis("auth", "logout", "--yes").code == 0


def test_without_a_platform_each_command_says_how_to_start_one(osmosis: Run, tmp_path: Path) -> None:
    nothing = {"OSMOSIS_PLATFORM_DATA": str(tmp_path)}
    assert "`osmosis platform up`" in error_of(osmosis("eval", "list", "--json", **nothing))["message"]
    submitted = osmosis("eval", "submit", "configs/eval/sums.toml", "--yes", **nothing)
    assert submitted.code == 1
    assert "`osmosis eval run configs/eval/sums.toml`" in " ".join(submitted.stderr.split())


def test_doctor_creates_the_folders_of_a_workspace(osmosis: Run, tmp_path: Path) -> None:
    refused = run_osmosis("eval", "list", "--json", cwd=tmp_path)
    assert error_of(refused)["code"] == "WORKSPACE_REQUIRED"
    from platforms import git

    git(tmp_path, "init", "--quiet")
    assert error_of(run_osmosis("doctor", "--json", cwd=tmp_path))["details"]["missing"] != []
    assert run_osmosis("doctor", "--fix", "--yes", cwd=tmp_path).code == 0
    assert run_osmosis("doctor", "--json", cwd=tmp_path).json["status"] == "noop"
