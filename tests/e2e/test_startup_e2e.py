"""The imports of a command, which determine its startup time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commands import COMMAND, Osmosis, clean_environment
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_call

HEAVY = ["aiohttp", "anyio", "fastmcp", "litellm", "mcp", "openai", "pyarrow", "uvicorn", "watchfiles", "yaml"]

WATCHED = """
import sys


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "litellm":
            raise SystemExit("litellm was imported")


sys.meta_path.insert(0, Watch())
"""


def imported(*arguments: str, cwd: Path, **env: str) -> set[str]:
    """The top-level packages that a command imports in its own process."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(COMMAND), *arguments],
        cwd=cwd,
        env=clean_environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout or done.stdout[0].isdigit() or env
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert len(lines) > 50
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("arguments", [["--help"], ["test", "--help"], ["eval", "--help"], ["--version"], []])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    # To read options, new versions of typer import pydantic.
    heavy = {*HEAVY, "pydantic", "rich"} if arguments == ["--help"] else set(HEAVY)
    assert imported(*arguments, cwd=tmp_path) & heavy == set()


@pytest.mark.parametrize("words", ["osmosis te", "osmosis test --mod"])
def test_completion_imports_nothing_heavy(words: str, tmp_path: Path) -> None:
    asked = {"_OSMOSIS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert imported(cwd=tmp_path, **asked) & {*HEAVY, "rich"} == set()


def test_help_lists_every_option(osmosis: Osmosis) -> None:
    shared = (
        "--mcp --dataset --data --model --base-url --api-key --max-turns --temperature --max-tokens --param --limit"
    )
    shared += " --offset --batch-size --timeout --tool-timeout --request-timeout --output --quiet --debug --json"
    scoring = "--eval-fn --n --pass-threshold --baseline-model --baseline-base-url --baseline-api-key --reward-timeout"
    scoring += " --fail-under"
    for command, options in (("test", shared), ("eval", f"{shared} {scoring}")):
        done = osmosis(command, "--help", env={"TERMINAL_WIDTH": "200"})
        assert (done.code, done.stderr) == (0, "")
        words = set(done.stdout.replace(",", " ").split())
        assert set(options.split()) - words == set()
        assert {"-d", "-o", "-q", "-h"} - words == set()


@pytest.mark.parametrize("name", ["osmosis-ai", "osmosis_ai"])
def test_the_aliases_are_the_same_command(name: str) -> None:
    done = subprocess.run(
        [str(COMMAND.with_name(name)), "--version"], capture_output=True, encoding="utf-8", timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout.strip()
        == subprocess.run(
            [sys.executable, "-m", "osmosis_ai", "--version"], capture_output=True, encoding="utf-8", timeout=60
        ).stdout.strip()
    )


def test_litellm_is_not_imported_when_it_is_not_used(osmosis: Osmosis, repo: Path) -> None:
    """Neither the command nor a worker imports it: a hook would make both fail."""
    hooks = repo.parent / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(WATCHED, encoding="utf-8")
    env = {"PYTHONPATH": str(hooks)}
    refused = subprocess.run(
        [sys.executable, "-c", "import litellm"],
        env=clean_environment(**env),
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert (refused.returncode, refused.stderr) == (1, "litellm was imported\n")
    with ScriptedEndpoint(by_turn(tool_call("add", a=1, b=2), text("3"))).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "openai/scripted", "--baseline-model", "offline/oracle"]
        done = osmosis("eval", *model, "--json", cwd=repo, env=env)
    assert done.code == 0, done.stderr
    assert done.json["summary"]["tools"]["add"]["calls"] == 3


def test_completion_can_be_shown_for_the_shell_that_asks(tmp_path: Path) -> None:
    """Whose name the command finds among its parents: bash stays one, because it has more to do."""
    line = f"{COMMAND} --show-completion; true"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=clean_environment(), capture_output=True, encoding="utf-8", timeout=60
    )
    assert "complete -o default -F _osmosis_completion osmosis" in done.stdout, done.stderr
