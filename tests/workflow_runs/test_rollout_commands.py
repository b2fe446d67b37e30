"""`osmosis rollout`: what is created runs at once, what is there is listed, checked and served."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from commands import COMMAND, Finished, clean_environment, run_osmosis
from waiting import eventually

PLAIN = Path(__file__).parents[1] / "runtime" / "worker" / "workflows" / "plain_rollout.py"


def rollout(*arguments: str, cwd: Path) -> Finished:
    return run_osmosis("rollout", *arguments, cwd=cwd)


def codes(finished: Finished) -> list[str]:
    return [one["code"] for one in finished.json["findings"]]


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = tmp_path_factory.mktemp("workspace")
    assert rollout("init", "my-rollout", cwd=workspace).code == 0
    return workspace


@pytest.fixture
def workspace(created: Path, tmp_path: Path) -> Path:
    """A copy of a workspace with a new rollout."""
    return shutil.copytree(created, tmp_path / "workspace")


def edit(workspace: Path, before: str, after: str) -> None:
    main = workspace / "rollouts" / "my-rollout" / "main.py"
    source = main.read_text(encoding="utf-8")
    assert before in source
    main.write_text(source.replace(before, after), encoding="utf-8")


def test_a_new_rollout_runs_at_once(workspace: Path) -> None:
    finished = run_osmosis(
        "eval", "run", "configs/eval/my-rollout.toml", "--model", "offline/oracle", "--json", cwd=workspace
    )
    assert finished.code == 0, finished.stderr
    assert [row["runs"][0]["scores"] for row in finished.json["rows"]] == [{"my-rollout": 1.0}] * 3
    assert "not set: OPENAI_API_KEY" in finished.stderr
    valid = run_osmosis("validate", "--json", "--static", cwd=workspace)
    assert [one for one in valid.json["findings"] if (one["file"] or "").startswith("configs/")] == []


def test_nothing_is_overwritten_unless_asked(workspace: Path) -> None:
    main = workspace / "rollouts" / "my-rollout" / "main.py"
    main.write_text("mine", encoding="utf-8")
    # From any folder of the workspace.
    refused = rollout("init", "my-rollout", cwd=workspace / "configs")
    assert refused.code == 2
    assert "overwrites nothing without -f" in refused.stderr
    assert main.read_text(encoding="utf-8") == "mine"
    assert rollout("init", "my-rollout", "-f", cwd=workspace).code == 0
    assert "AgentWorkflow" in main.read_text(encoding="utf-8")
    for name in ("My-rollout", "default", "a/b", "1st"):
        assert rollout("init", name, cwd=workspace).code == 2


def test_rollouts_are_listed_with_their_sdk_and_configs(workspace: Path) -> None:
    (workspace / "rollouts" / "other").mkdir()
    (workspace / "rollouts" / "other" / "main.py").touch()
    declared = '[project]\nname = "other"\ndependencies = ["httpx", "osmosis_ai==0.2.25"]\n'
    (workspace / "rollouts" / "other" / "pyproject.toml").write_text(declared, encoding="utf-8")
    mine, other = rollout("list", "--json", cwd=workspace).json["rollouts"]
    assert mine == {
        "name": "my-rollout",
        "entrypoint": "rollouts/my-rollout/main.py",
        "sdk": "own",
        "requires": "osmosis-ai[server]>=0.3.1,<0.4",
        "configs": ["configs/eval/my-rollout.toml", "configs/training/my-rollout.toml"],
    }
    assert (other["sdk"], other["requires"], other["configs"]) == ("declared", "osmosis_ai==0.2.25", [])
    shown = rollout("list", cwd=workspace).stdout
    assert "osmosis_ai==0.2.25" in shown
    assert "none" in shown


def test_a_rollout_that_works_has_no_findings(workspace: Path) -> None:
    finished = rollout("validate", "my-rollout", cwd=workspace)
    assert finished.code == 0, finished.stdout
    assert finished.stdout == "rollout my-rollout, rollouts/my-rollout/main.py\nno problems found\n"
    assert not (workspace / ".osmosis").exists(), "nothing stays in the workspace"


@pytest.mark.parametrize(
    ("before", "after", "code", "line", "said"),
    [
        (
            "import uvicorn\n",
            "import uvicorn\nimport no_such_module\n",
            "OSM702",
            7,
            "pip install 'no_such_module'",
        ),
        ("reply.raise_for_status()", "raise KeyError('gone')", "OSM703", 21, "KeyError: 'gone'"),
        ("reply.raise_for_status()", "import os; os._exit(9)", "OSM703", 1, "ended with code 9"),
        (
            "rollout = get_rollout_context()",
            "import asyncio; await asyncio.sleep(60)",
            "OSM704",
            1,
            "its 2.0s deadline",
        ),
        ("        rollout = get", "        return ctx.prompt\n        rollout = get", "OSM705", 1, "no model call"),
        (", grader=ExactMatch", "", "OSM706", 1, "has no grader"),
        ("        answer =", "        raise ValueError('odd')\n        answer =", "OSM707", 27, "ValueError: odd"),
        ("ctx.set_reward(float(", "ctx.set_reward(0.5 * float(", "OSM708", 1, "has the reward 0.5"),
        ("ctx.set_reward(", "float(", "OSM707", 1, "no reward after grading"),
    ],
)
def test_each_step_that_fails_is_found(
    workspace: Path, before: str, after: str, code: str, line: int, said: str
) -> None:
    edit(workspace, before, after)
    finished = rollout("validate", "my-rollout", "--json", "--timeout", "2", cwd=workspace)
    found = finished.json["findings"][0]
    assert (found["code"], found["file"]) == (code, "rollouts/my-rollout/main.py"), found
    assert said in found["message"]
    assert finished.code == (1 if found["severity"] == "error" else 0)
    if line != 1:
        assert found["line"] == line


def test_an_environment_that_cannot_be_built_is_found(workspace: Path) -> None:
    declared = '[project]\nname = "x"\nversion = "1"\nrequires-python = ">=9"\ndependencies = []\n'
    (workspace / "rollouts" / "my-rollout" / "pyproject.toml").write_text(declared, encoding="utf-8")
    finished = rollout("validate", "my-rollout", "--json", cwd=workspace)
    assert codes(finished) == ["OSM701"]
    assert rollout("validate", "my-rollout", "--own-sdk", cwd=workspace).code == 0


def test_a_server_without_an_sdk_is_checked_with_a_made_up_row(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts" / "plain"
    folder.mkdir(parents=True)
    shutil.copy(PLAIN, folder / "main.py")
    finished = rollout("validate", "plain", "--json", cwd=tmp_path)
    assert (finished.code, finished.json["findings"]) == (0, [])
    assert finished.json["components"][0]["kind"] == "rollout"


def test_a_missing_rollout_is_reported_with_the_existing_ones(workspace: Path) -> None:
    for command in ("validate", "serve"):
        finished = rollout(command, "mine", cwd=workspace)
        assert finished.code == 2
        assert "The rollouts there: my-rollout" in finished.stderr


def test_a_server_is_served_until_it_is_stopped(workspace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(COMMAND), "rollout", "serve", "my-rollout", "--port", str(port)]
    with subprocess.Popen(command, cwd=workspace, env=clean_environment(), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for said in process.stderr:
            if b"listens on port" in said:
                break
        with urlopen(f"http://127.0.0.1:{port}/health") as answer:
            assert answer.status == 200
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    eventually(lambda: not any(each.is_running() for each in started))
