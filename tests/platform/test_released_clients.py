"""The released clients of the hosted platform, aimed at this one by their environment variables.

`make test-released` runs them. Without Python 3.12 or a package index, they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from osmosis_ai.errors import RepositoryError
from osmosis_ai.runtime.worker.workflows.environments import prepare_environment
from osmosis_ai.testing import Gate, ScriptedEndpoint, text
from platforms import SERVER, Platform, commit, git, make_workspace, rows, serving

pytestmark = pytest.mark.released

VERSIONS = ("0.2.25", "0.3.7")
DECLARATION = """
[project]
name = "client"
version = "0.1.0"
requires-python = ">=3.12,<3.13"
dependencies = ["osmosis-ai[server]=={version}", "httpx"]
"""
CONFIG = """\
[experiment]
rollout = "plain"
entrypoint = "main.py"
model_path = "{model}"
dataset = "sums"

[evaluation]
limit = 3
n = 2

[env]
COLOUR = "green"

[secrets]
required = ["THE_WORD"]
"""


class Client(NamedTuple):
    """A released command, in a workspace."""

    version: str
    command: Path
    workspace: Path
    environ: dict[str, str]

    def __call__(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run a command line, which must end with this code, and return its JSON."""
        done = subprocess.run(
            [str(self.command), "--json", *arguments],
            cwd=self.workspace,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        found: dict[str, Any] = json.loads((done.stderr if code else done.stdout).splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Clients of 0.2 import the rollout before they submit it.
    folder = make_workspace(tmp_path_factory.mktemp("workspace"), SERVER.with_name("raw_rollout.py"))
    (folder / "rollouts/plain/pyproject.toml").write_text('[tool.osmosis]\nsdk = "own"\n', encoding="utf-8")
    (folder / "data/sums.jsonl").write_bytes(rows(30))
    git(folder, "remote", "add", "origin", "https://github.com/acme/rollouts.git")
    commit(folder)
    return folder


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, workspace: Path) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        # What `osmosis eval list` of this version does: the clone is taken from the folder if the origin can't be had.
        platform.ask("GET", "/api/cli/eval-runs", headers={"X-Osmosis-Path": str(workspace)})
        yield platform


@pytest.fixture(scope="module", params=VERSIONS)
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, platform: Platform, workspace: Path
) -> Client:
    folder = tmp_path_factory.mktemp("client")
    (folder / "pyproject.toml").write_text(DECLARATION.format(version=request.param), encoding="utf-8")
    try:
        python = prepare_environment(folder, environ={**os.environ, "UV_PYTHON_DOWNLOADS": "never"})
    except RepositoryError as error:
        pytest.skip(str(error))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OSMOSIS_")}
    environ = {
        **kept,
        "HOME": str(folder),
        "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring",
        "OSMOSIS_PLATFORM_URL": platform.url,
        "OSMOSIS_TOKEN": platform.token,
        "OSMOSIS_TOKEN_PLATFORM_URL": platform.url,
        "THE_VALUE": "abracadabra",
        "NO_PROXY": "*",
    }

    return Client(request.param, python.parent / "osmosis", workspace, environ)


def test_a_released_client_works_with_this_platform(
    client: Client, platform: Platform, workspace: Path, tmp_path: Path
) -> None:
    assert client("auth", "whoami")["data"]["email"].endswith("@localhost")
    uploaded = client("dataset", "upload", "data/sums.jsonl", "--overwrite", "--yes")
    assert uploaded["resource"]["status"] == "uploaded"
    assert [item["file_name"] for item in client("dataset", "list")["items"]] == ["sums"]
    assert client("dataset", "preview", "sums", "--rows", "2")["data"]["rows"][1]["ground_truth"] == "1"
    client("dataset", "download", "sums", "-o", str(tmp_path / "sums.jsonl"))
    assert (tmp_path / "sums.jsonl").read_bytes() == rows(30)
    client("secret", "set", "THE_WORD", "--env", "THE_VALUE")
    assert [item["name"] for item in client("secret", "list")["items"]] == ["THE_WORD"]

    config = workspace / "configs/eval/sums.toml"
    config.write_text(CONFIG.format(model="offline/oracle"), encoding="utf-8")
    submitted = client("eval", "submit", "configs/eval/sums.toml", "--yes")
    name = submitted["resource"]["name"]
    platform.wait(name)
    assert name in [item["name"] for item in client("eval", "list")["items"]]
    shown = client("eval", "info", name)["data"]
    assert shown["eval_run"]["status"] == "finished", platform.log(name)
    assert shown["results"]["reward_stats"]["pass_at_k"] == {"1": 1.0, "2": 1.0}
    assert (shown["results"]["graded"], shown["results"]["total_runs"]) == (6, 6)
    assert client("eval", "list")["items"][0]["name"] == name

    with ScriptedEndpoint(lambda request: text("1").after(gate)).run_in_thread() as endpoint:
        gate = Gate()
        # Released clients know no [advanced] in eval configs, so the endpoint is the model's variable.
        body = {
            "experiment_config": {
                "rollout": "plain", "entrypoint": "main.py", "model_path": "scripted", "dataset": "sums",
            },
            "evaluation_config": {"limit": 3},
            "advanced_config": {"base_url": endpoint.url},
        }  # fmt: skip
        held = platform.ask("POST", "/api/cli/eval-runs", body).body["name"]
        platform.wait(held, "running")
        client("eval", "stop", held, "--yes")
        gate.open()
        assert platform.wait(held)["eval_run"]["status"] == "stopped"
    client("secret", "delete", "THE_WORD", "--yes")
    refused = client("eval", "submit", "configs/eval/sums.toml", "--yes", code=1)
    assert "THE_WORD" in refused["error"]["message"]


def test_a_released_client_reads_logs_and_downloads(client: Client, platform: Platform, tmp_path: Path) -> None:
    if client.version.startswith("0.2"):
        pytest.skip("this version has no `eval logs`")
    name = next(item["name"] for item in client("eval", "list")["items"] if item["status"] == "finished")
    logged = client("eval", "logs", name)["items"]
    assert logged[0]["step"] == "submit"
    client("eval", "download", name, "-o", str(tmp_path), "--yes")
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(file.endswith("trajectories/row_0_run_0.json") for file in files), files


def test_a_released_client_uploads_a_local_run(client: Client, platform: Platform, tmp_path: Path) -> None:
    if client.version.startswith("0.2"):
        pytest.skip("this version has no `eval upload`")
    run, local_id = tmp_path / "local-run", "0123456789abcdef" * 2
    run.mkdir()
    inputs = {
        "rollout": {"name": "plain", "entrypoint": "main.py", "source_digest": "x"},
        "dataset": {"sha256": "y", "selected_source_rows": "0"},
        "model_path": "acme/model",
        "n": 1,
        "versions": {},
    }
    identity = {
        "id": local_id,
        "name": run.name,
        "status": "finished",
        "started_at": "2026-11-22T10:00:00Z",
        "completed_at": "2026-11-22T10:00:09Z",
        "dataset_name": "sums",
        "model_name": "acme/model",
        "rollout_name": "plain",
    }
    files = {
        "manifest.json": {"schema_version": 1, "local_run_id": local_id, "run_name": run.name, "inputs": inputs},
        "progress.json": {"total_runs": 1, "sampled_rows": 1, "total_dataset_rows": 30},
        "metrics.json": {"eval_run": identity, "summary": {"pass_threshold": 1.0}},
        "index.jsonl": {"row_index": 0, "run_index": 0, "rollout_id": "a" * 32, "status": "success", "reward": 1.0},
    }
    for name, content in files.items():
        (run / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
    uploaded = client("eval", "upload", str(run))["resource"]
    assert (uploaded["status"], uploaded["uploaded_files"]) == ("finalized", 2)
    assert client("eval", "info", uploaded["eval_run_name"])["data"]["results"]["pass_rate"] == 1.0
