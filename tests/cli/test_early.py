"""The modules that the fork server imports before workers start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from osmosis_ai.cli.early import LOOPS, preloads, words_after
from osmosis_ai.runtime.pool.forkserver import TOOLS, WORKFLOWS

ENDPOINTS = "osmosis_ai.models.endpoint"
OFFLINE = "osmosis_ai.models.offline.engine"
LITELLM = "osmosis_ai.models.preload_litellm"

ENDPOINT = ["--base-url", "http://localhost:8000/v1"]


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["test", "--model", "openai/gpt-5-mini"], {}),
        (["test", "--model=anthropic/claude-sonnet-4-5", "--watch"], {}),
        (["test"], {"OPENAI_API_KEY": "a key"}),
        (["eval"], {"OSMOSIS_MODEL": "gpt-5-mini"}),
        (["eval", "--model", "served", *ENDPOINT, "--baseline-model", "openai/gpt-5-mini"], {}),
        (["eval", "--model", "served", *ENDPOINT, "--rubric", "all"], {}),
    ],
)
def test_litellm_is_imported_ahead(arguments: list[str], environ: dict[str, str]) -> None:
    assert LITELLM in preloads(words_after(arguments), environ)


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["test"], {}),
        (["test", "--model", "offline/oracle"], {"OPENAI_API_KEY": "a key"}),
        (["test", "--model", "served", *ENDPOINT], {"OPENAI_API_KEY": "a key"}),
        (["test", "--base-url=http://localhost:8000/v1", "--model=served"], {}),
        (["eval", "--model", "offline/smoke", "--baseline-model", "offline/empty"], {}),
        (["eval", "--model", "a", *ENDPOINT, "--baseline-model", "b", "--baseline-base-url", ENDPOINT[1]], {}),
        (["eval"], {"OSMOSIS_MODEL": "offline/smoke"}),
    ],
)
def test_litellm_is_left_alone(arguments: list[str], environ: dict[str, str]) -> None:
    assert LITELLM not in preloads(words_after(arguments), environ)


def test_what_calls_the_models_is_imported_ahead() -> None:
    assert preloads(words_after(["test", "--model", "served", *ENDPOINT]), {}) == [ENDPOINTS, TOOLS]
    assert preloads(words_after(["eval", "--model", "offline/oracle", "--baseline-base-url=http://x"]), {}) == [
        OFFLINE,
        ENDPOINTS,
        TOOLS,
    ]
    assert preloads(words_after(["test", "--model", "offline/smoke"]), {}) == [OFFLINE, TOOLS]


@pytest.mark.parametrize("words", [["test", "-m", "server:loop"], ["serve", "--module=server:loop"]])
def test_what_an_agent_loop_needs_is_imported_ahead_only_for_one(words: list[str]) -> None:
    assert preloads(words_after(words), {}) == [LOOPS, TOOLS]
    assert preloads(words_after(["test"]), {"OSMOSIS_MODULE": "server:loop"}) == [LOOPS, TOOLS]


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["test", "--rollout", "rollouts/one"], {}),
        (["eval", "--rollout=rollouts/one"], {}),
        (["eval", "run", "configs/eval/one.toml"], {}),
        (["eval"], {"OSMOSIS_ROLLOUT": "rollouts/one"}),
    ],
)
def test_rollout_servers_are_preloaded_instead_of_tools(words: list[str], environ: dict[str, str]) -> None:
    assert preloads(words_after(words), environ) == [WORKFLOWS]


def test_a_bare_command_has_no_words() -> None:
    assert words_after([]) == {}
    assert words_after(["test", "--limit=3", "-q"]) == {"test": "--limit", "--limit": "3", "3": "-q", "-q": ""}


PROGRAM = """
import psutil
from osmosis_ai.cli.early import start_early

WITHOUT = [[], ["--help"], ["runs"], ["validate"], ["test", "--help"], ["eval", "-h"], ["eval", "rubric"]]
for arguments in [*WITHOUT, ["test", "--workers", "0"], ["eval", "--workers=0"]]:
    start_early(arguments)
    assert psutil.Process().children() == [], arguments
start_early(["test", "--workers", "10", "--model", "offline/oracle"])
(server,) = psutil.Process().children()
start_early(["eval"])
assert psutil.Process().children() == [server]
"""


def test_the_fork_server_is_started_once_and_only_for_commands_that_need_workers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
