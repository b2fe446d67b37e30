"""The platform as a process of its own: start, stop, kill, backup. Runs that were under way go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from commands import COMMAND, Finished, run_installed
from osmosis_ai.testing import Gate, ScriptedEndpoint, by_turn, text
from platforms import make_workspace, rows
from waiting import PATIENCE, eventually

CONFIG = """\
[experiment]
rollout = "plain"
entrypoint = "main.py"
model_path = "scripted"
dataset = "sums"

[evaluation]
limit = 6
batch_size = 1

[advanced]
base_url = "{url}"

[secrets]
required = []
"""
Run = Callable[..., Finished]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = make_workspace(tmp_path / "workspace")
    (folder / "data/sums.jsonl").write_bytes(rows(10))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "platform"


@pytest.fixture
def osmosis(data: Path, workspace: Path) -> Iterator[Run]:
    def run(*arguments: str) -> Finished:
        env = {"OSMOSIS_PLATFORM_DATA": str(data), "OSMOSIS_CREDENTIALS": str(data / "credentials.json")}
        return run_installed(*arguments, cwd=workspace, env=env)

    yield run
    run("platform", "down")
    left = [each for each in psutil.process_iter(["cmdline"]) if str(data) in " ".join(each.info["cmdline"] or [])]
    assert left == []


def test_a_killed_server_s_runs_go_on_with_the_next_one(
    osmosis: Run, workspace: Path, data: Path, tmp_path: Path
) -> None:
    gate = Gate()
    held = by_turn(text("hm"), text("1"))
    with ScriptedEndpoint(
        lambda request: held(request).after(gate) if len(endpoint.chats) > 5 else held(request)
    ).run_in_thread() as endpoint:
        (workspace / "configs/eval/sums.toml").write_text(CONFIG.format(url=endpoint.url), encoding="utf-8")
        started = osmosis("platform", "up", "--port", "0", "--json")
        assert started.code == 0, started.stderr
        server = started.json["resource"]["pid"]
        assert osmosis("platform", "up", "--json").json["status"] == "noop"
        assert osmosis("dataset", "upload", "data/sums.jsonl").code == 0
        submitted = osmosis("eval", "submit", "configs/eval/sums.toml", "--yes", "--snapshot", "--json")
        assert submitted.code == 0, submitted.stderr
        name = submitted.json["resource"]["name"]
        gate.reached.wait(PATIENCE)
        family = psutil.Process(server).children(recursive=True)
        os.kill(server, signal.SIGKILL)
        # The jobs end with their server, so that the next one can't meet them.
        assert psutil.wait_procs(family, PATIENCE)[1] == []
        assert osmosis("platform", "status", "--json").json["data"]["running"] is False
        refused = osmosis("eval", "list", "--json")
        assert json.loads(refused.stderr)["error"]["code"] == "PLATFORM_ERROR"
        gate.open()
        assert osmosis("platform", "up", "--port", "0").code == 0
        shown: dict = {}

        def ended() -> bool:
            shown.update(osmosis("eval", "info", name, "--json").json["data"])
            return shown["eval_run"]["status"] == "finished"

        eventually(ended, lambda: osmosis("eval", "logs", name).stdout)
        assert (shown["results"]["total_runs"], shown["results"]["graded"]) == (6, 6)
        assert shown["results"]["resumed_count"] > 0
        backup = tmp_path / "backup.tar"
        assert osmosis("platform", "backup", str(backup)).code == 0
    assert backup.stat().st_mode & 0o777 == 0o600
    restored = tmp_path / "restored"
    with tarfile.open(backup) as archive:
        archive.extractall(restored, filter="data")
    status = osmosis("platform", "status", "--data", str(restored), "--json")
    assert status.json["data"]["runs"] == {"finished": 1}
    assert "serving at" in osmosis("platform", "logs").stdout
    assert osmosis("platform", "down", "--json").json["status"] == "success"
    assert osmosis("platform", "down", "--json").json["status"] == "noop"


def test_a_full_disk_loses_nothing_that_was_acknowledged(osmosis: Run, workspace: Path, data: Path) -> None:
    # A limit of a file's size stands for the end of the disk: writes beyond it fail.
    command = f"ulimit -f 600; exec {COMMAND} platform up --foreground --port 0 --data {data}"
    server = subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE, encoding="utf-8")
    try:
        eventually(lambda: (data / "server.json").exists() and "true" in osmosis("platform", "status", "--json").stdout)
        assert osmosis("dataset", "upload", "data/sums.jsonl").code == 0
        (workspace / "data/large.jsonl").write_bytes(rows(200_000))
        refused = osmosis("dataset", "upload", "data/large.jsonl", "--json")
        assert refused.code == 1
        assert "can't be stored" in json.loads(refused.stderr)["error"]["message"]
        listed = osmosis("dataset", "list", "--json").json["items"]
        assert [item["file_name"] for item in listed if item["status"] == "uploaded"] == ["sums"]
        assert [path.name for path in (data / "datasets").glob("*.part")] == []
    finally:
        server.terminate()
        server.communicate()
