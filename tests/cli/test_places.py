"""Where commands find a repository and its runs: from a subfolder, without mcp/, with --store, on a read-only disk."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from commands import COMMAND, clean_environment, run_osmosis
from repos import write_repo

ORACLE = ("--model", "offline/oracle", "--workers", "1")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = write_repo(tmp_path / "repo")
    (root / "notes").mkdir()
    return root


def test_every_command_finds_the_repository_above_a_subfolder(repo: Path) -> None:
    (repo / "pyproject.toml").write_text(
        '[tool.osmosis]\nmax-turns = 7\ndataset = "test_data.jsonl"\n', encoding="utf-8"
    )
    for folder in ("notes", "mcp", "reward_fn"):
        done = run_osmosis("eval", *ORACLE, "--cache", "-q", cwd=repo / folder)
        assert done.code == 0, done.stderr
    assert len(run_osmosis("runs", "--json", cwd=repo / "notes").json["runs"]) == 3
    assert run_osmosis("runs", "rescore", "latest", cwd=repo / "notes").code == 0
    assert run_osmosis("runs", "export", "latest", cwd=repo / "mcp").stdout.count("\n") == 3
    assert run_osmosis("cache", "--json", cwd=repo / "notes").json["path"] == str(repo / ".osmosis" / "cache.db")
    assert run_osmosis("config", "--json", cwd=repo / "notes").json["max_turns"]["value"] == 7
    names = [
        found["name"] for found in run_osmosis("validate", "--static", "--json", cwd=repo / "mcp").json["components"]
    ]
    assert names == ["add", "exact"]
    assert [path.name for path in repo.rglob(".osmosis")] == [".osmosis"]
    assert [path.parent.name for path in repo.rglob(".osmosis")] == ["repo"]


def test_an_agent_loop_in_the_root_is_found_from_a_subfolder(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    (root / "sub").mkdir()
    (root / "server.py").write_text(LOOP, encoding="utf-8")
    done = run_osmosis("eval", "-m", "server:Echo", *ORACLE, "-q", cwd=root / "sub")
    assert done.code == 0, done.stderr
    assert (root / ".osmosis" / "runs.db").exists()


LOOP = """
from osmosis_ai.rollout import RolloutAgentLoop, RolloutContext, RolloutResult


class Echo(RolloutAgentLoop):
    name = "echo"

    def get_tools(self, request):
        return []

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        result = await ctx.chat(ctx.request.messages)
        return ctx.complete([*ctx.request.messages, result.message])
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_repository_without_mcp_runs_without_tools_and_says_so(workers: str, tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    (root / "mcp" / "main.py").unlink()
    (root / "mcp").rmdir()
    done = run_osmosis("eval", "--model", "offline/oracle", "--workers", workers, cwd=root)
    assert done.code == 0, done.stderr
    assert f"no tools: there is no mcp folder in {root}\n" in done.stderr
    assert "3 of 3 rollouts completed" in done.stdout


def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    done = run_osmosis("test", "--model", "offline/oracle", cwd=tmp_path)
    assert done.code == 2
    assert f"there is no mcp folder in {tmp_path} or above it" in done.stderr
    assert "--mcp DIR" in done.stderr
    assert "`osmosis init DIR`" in done.stderr


def test_a_server_without_tools_and_a_repository_without_functions_say_so(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    (root / "mcp" / "main.py").write_text("from fastmcp import FastMCP\n\nmcp = FastMCP('none')\n", encoding="utf-8")
    shutil.rmtree(root / "reward_fn")
    done = run_osmosis("test", "--model", "offline/oracle", cwd=root)
    assert done.code == 0, done.stderr
    assert "no tools: mcp/main.py has none; decorate its functions with @mcp.tool\n" in done.stderr
    assert "scored with: nothing; write an @osmosis_reward function in reward_fn/\n" in done.stderr


@pytest.mark.parametrize("how", ["option", "variable", "file"])
def test_runs_are_kept_where_store_says(how: str, repo: Path, tmp_path: Path) -> None:
    options: tuple[str, ...] = ()
    environ: dict[str, str] = {}
    if how == "option":
        options = ("--store", str(tmp_path / "kept"))
    elif how == "variable":
        environ = {"OSMOSIS_STORE": "../kept"}
    else:
        (repo / "pyproject.toml").write_text('[tool.osmosis]\nstore = "../kept"\n', encoding="utf-8")
    cwd = repo / "notes" if how == "file" else repo
    for command in (
        ("eval", *ORACLE, "--cache"),
        ("eval", *ORACLE, "--retry-failed"),
        ("runs", "rescore", "latest"),
        ("runs", "show", "latest"),
        ("cache",),
    ):
        done = run_osmosis(*command, *options, cwd=cwd, env=environ)
        assert done.code == 0, done.stderr
    assert len(run_osmosis("runs", "list", *options, "--json", cwd=cwd, env=environ).json["runs"]) == 1
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert {"runs.db", "cache.db", "logs", ".gitignore"} <= kept
    assert not (repo / ".osmosis").exists()


def test_an_existing_folder_for_runs_keeps_its_place_in_git(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert run_osmosis("test", *ORACLE, "--store", "../mine", cwd=repo).code == 0
    assert not (tmp_path / "mine" / ".gitignore").exists()


def test_runs_of_a_read_only_repository_are_kept_in_the_state_directory(repo: Path, tmp_path: Path) -> None:
    before = sorted(repo.rglob("*"))
    for folder in (repo, *(path for path in before if path.is_dir())):
        folder.chmod(0o555)
    environ = clean_environment(XDG_STATE_HOME=str(tmp_path / "state"))

    def osmosis(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(COMMAND), *arguments],
            cwd=repo,
            env=environ,
            capture_output=True,
            encoding="utf-8",
            preexec_fn=without_root_powers,
        )

    try:
        done = osmosis("eval", *ORACLE, "--cache")
        assert done.returncode == 0, done.stderr
        store = next((tmp_path / "state" / "osmosis" / "stores").iterdir())
        assert store.name.startswith("repo-")
        assert f"runs are kept in {store}, because {repo} is read-only\n" in done.stderr
        assert {"runs.db", "cache.db", "logs"} <= {path.name for path in store.iterdir()}
        assert len(json.loads(osmosis("runs", "--json").stdout)["runs"]) == 1
        assert osmosis("eval", *ORACLE, "--retry-failed").returncode == 0
        assert sorted(repo.rglob("*")) == before
    finally:
        for folder in (repo, *(path for path in before if path.is_dir())):
            folder.chmod(0o755)


def without_root_powers() -> None:
    """Give up root's power to write everywhere; it takes effect in the program that this process starts next."""
    if os.geteuid() == 0:
        drop, may_write_everywhere = 24, 1  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
        assert ctypes.CDLL(None).prctl(drop, may_write_everywhere, 0, 0, 0) == 0
