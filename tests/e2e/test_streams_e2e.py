"""Standard streams that are closed, full, unread or of another encoding: the run is stored, and never a traceback."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from commands import COMMAND, Finished, clean_environment, run_osmosis
from repos import ROWS, write_repo

TEST = ["test", "--model", "offline/oracle"]


def in_shell(arguments: list[str], redirected: str, cwd: Path, **variables: str) -> Finished:
    """Run the installed command with its streams redirected."""
    line = f"exec {shlex.join([str(COMMAND), *arguments])} {redirected}"
    done = subprocess.run(
        ["sh", "-c", line], cwd=cwd, env=clean_environment(**variables), capture_output=True, timeout=120
    )
    return Finished(done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1"))


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{**ROWS[0], "user_prompt": "Wie groß ist π — 😀?"}]
    return write_repo(tmp_path_factory.mktemp("streams") / "repo", rows=rows)


@pytest.mark.parametrize(
    ("redirected", "code"),
    [(">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 1), ("2>/dev/full", 0)],
)
def test_a_run_is_stored_whatever_its_streams_are(repo: Path, redirected: str, code: int) -> None:
    before = len(run_osmosis("runs", "--json", cwd=repo).json["runs"]) if (repo / ".osmosis").exists() else 0
    done = in_shell(TEST, redirected, repo)
    assert done.code == code, done
    assert "Traceback" not in done.stderr
    full = "error: stdout can't be written: No space left on device"
    assert (full in done.stderr) == (redirected == ">/dev/full")
    runs = run_osmosis("runs", "--json", cwd=repo).json["runs"]
    assert (len(runs), runs[0]["status"], runs[0]["rollouts"]) == (before + 1, "finished", 1)


def test_help_on_a_full_device_is_one_line(repo: Path) -> None:
    done = in_shell(["test", "--help"], ">/dev/full", repo)
    assert (done.code, done.stderr) == (2, "error: stdout can't be written: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("nonsense", 2), ("test --nonsense", 2), ("runs", 1), ("runs export latest", 1), ("--version", 2)],
)
def test_every_command_has_its_exit_code_where_nothing_can_be_written(repo: Path, arguments: str, code: int) -> None:
    assert run_osmosis(*TEST, cwd=repo).code == 0
    assert in_shell(arguments.split(), ">/dev/full 2>/dev/full", repo) == Finished(code, "", "")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_characters_that_an_encoding_lacks_are_escaped(repo: Path, encoding: str) -> None:
    done = in_shell([*TEST, "-q", "--json"], "", repo, PYTHONIOENCODING=encoding)
    assert (done.code, done.stderr) == (0, "")
    run_id = json.loads(done.stdout)["config"]["run_id"]
    shown = in_shell(["runs", "show", run_id, "--row", "0", "--json"], "", repo, PYTHONIOENCODING=encoding)
    (rollout,) = json.loads(shown.stdout)["rollouts"]
    assert rollout["row"]["user_prompt"] == "Wie groß ist π — 😀?"
    listed = in_shell(["runs"], "", repo, PYTHONIOENCODING=encoding)
    assert (listed.code, listed.stderr) == (0, "")


def test_a_reader_that_goes_away_is_no_error(repo: Path) -> None:
    assert run_osmosis(*TEST, cwd=repo).code == 0
    for arguments in (["export"], ["show"], ["--json"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = subprocess.run(
            [str(COMMAND), "runs", *arguments], cwd=repo, stdout=write_end, stderr=subprocess.PIPE, encoding="utf-8"
        )
        os.close(write_end)
        assert done.returncode == 0, done.stderr
        assert "Error" not in done.stderr
