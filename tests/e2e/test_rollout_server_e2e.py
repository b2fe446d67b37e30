"""A rollout server ends with its command, however that ends."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from commands import COMMAND, clean_environment
from waiting import eventually

SERVER = Path(__file__).parents[1] / "runtime" / "worker" / "workflows" / "plain_rollout.py"


def servers(workspace: Path) -> list[int]:
    main = str(workspace / "rollouts" / "plain" / "main.py")
    return [each.pid for each in psutil.process_iter(["cmdline"]) if main in (each.info["cmdline"] or [])]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_stays_behind(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "rollouts" / "plain"
    folder.mkdir(parents=True)
    shutil.copy(SERVER, folder / "main.py")
    row = {"system_prompt": "Compute.", "user_prompt": "hang", "ground_truth": "42"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    given = ["--rollout", "rollouts/plain", "-d", "rows.jsonl", "--model", "offline/oracle", "--workers", "1"]
    with subprocess.Popen(
        [COMMAND, "test", *given], cwd=tmp_path, env=clean_environment(), stdout=-3, stderr=-3
    ) as command:
        logs = tmp_path / ".osmosis" / "logs"
        eventually(lambda: any("running hang" in log.read_text(encoding="utf-8") for log in logs.glob("*.log")))
        assert servers(tmp_path)
        command.send_signal(number)
        if number == signal.SIGINT:
            command.send_signal(number)
    eventually(lambda: not servers(tmp_path))
