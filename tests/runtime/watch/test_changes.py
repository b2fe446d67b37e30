"""The file changes that count, and the code and data they make stale."""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio
import pytest

from osmosis_ai.git_ignore import GitIgnore
from osmosis_ai.runtime.watch.changes import (
    Stale,
    Watched,
    classify,
    counts,
    from_root,
    repository_files,
)
from osmosis_ai.runtime.watch.follow import CLOCK_SECONDS, FileHashes, Follower, Save
from waiting import PATIENCE, eventually

RULES = "*.log\n/build/\n!kept.log\n.env\n"
WATCHED = Watched(
    dataset="data/rows.jsonl",
    agent_dir="mcp",
    tool_sources=frozenset({"mcp/main.py", "shared/table.py", "reward_fn/rules.py"}),
    function_sources=frozenset({"reward_fn/rewards.py", "shared/table.py", "shared/words.py"}),
)


@pytest.mark.parametrize(
    "path",
    ["mcp/main.py", "test_data.jsonl", ".env", "sub/.env", "kept.log", "mcp/build/x.py", "mcp/data.json", "a b/ü.py"],
)
def test_a_change_that_counts(path: str, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text(RULES, encoding="utf-8")
    assert counts(path, GitIgnore(tmp_path))


@pytest.mark.parametrize(
    "path",
    [
        "run.log",
        "mcp/run.log",
        "build/x.py",
        ".osmosis/runs.db-wal",
        "mcp/__pycache__/main.cpython-312.pyc",
        ".venv/lib/python3.12/site.py",
        "mcp/venv/x.py",
        "node_modules/x.js",
        ".git/index",
        "mcp/.main.py.swp",
        "mcp/main.py~",
        "mcp/4913",
        "mcp/.#main.py",
        "mcp/#main.py#",
        "mcp/main.py.tmp",
        "mcp/.DS_Store",
        ".gitignore",
    ],
)
def test_a_change_that_does_not_count(path: str, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text(RULES, encoding="utf-8")
    assert not counts(path, GitIgnore(tmp_path))


@pytest.mark.parametrize(
    ("path", "stale"),
    [
        ("mcp/main.py", Stale(tools=True)),
        ("mcp/new/prices.json", Stale(tools=True)),
        ("mcp_other/main.py", Stale()),
        ("reward_fn/rewards.py", Stale(functions=True)),
        ("reward_fn/new.py", Stale(functions=True)),
        ("reward_rubric/judge.py", Stale(functions=True)),
        ("reward_fn/rules.py", Stale(tools=True, functions=True)),
        ("shared/table.py", Stale(tools=True, functions=True)),
        ("shared/words.py", Stale(functions=True)),
        ("shared/nobody.py", Stale()),
        ("data/rows.jsonl", Stale(dataset=True)),
        ("data/other.jsonl", Stale()),
        (".env", Stale(everything=True)),
        ("../.env", Stale(everything=True)),
        ("configs/eval/run.toml", Stale(everything=True)),
        ("README.md", Stale()),
    ],
)
def test_what_a_change_makes_stale(path: str, stale: Stale) -> None:
    assert classify(path, WATCHED) == stale
    assert bool(stale) == (stale != Stale())


def test_without_a_folder_of_tools_there_are_none_to_reload() -> None:
    assert classify("mcp/main.py", Watched("rows.jsonl", None, frozenset(), frozenset())) == Stale()


def test_what_is_stale_adds_up() -> None:
    both = Stale(tools=True) | Stale(dataset=True)
    assert both == Stale(tools=True, dataset=True)
    assert both | Stale(functions=True, everything=True) == Stale(True, True, True, True)


def test_a_save_without_a_change_is_none(tmp_path: Path) -> None:
    hashes = FileHashes(tmp_path)
    file = tmp_path / "a.py"
    file.write_text("1", encoding="utf-8")
    hashes.learn(["a.py", "missing.py"])
    file.write_text("1", encoding="utf-8")
    assert hashes.changed(["a.py", "missing.py"]) == []
    file.write_text("2", encoding="utf-8")
    # Learning again doesn't swallow a change that nobody has asked about.
    hashes.learn(["a.py"])
    assert hashes.changed(["a.py", "a.py"]) == ["a.py"]
    assert hashes.changed(["a.py"]) == []
    file.unlink()
    assert hashes.changed(["a.py"]) == ["a.py"]
    (tmp_path / "b.py").write_text("", encoding="utf-8")
    assert hashes.changed(["b.py", "a.py"]) == ["b.py"]


def test_a_save_while_results_were_made_is_not_taken_for_what_was_loaded(tmp_path: Path) -> None:
    """The files on which results depend are known only with the results; some may have changed by then."""
    hashes = FileHashes(tmp_path)
    hashes.learn([])
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    for file in (old, new):
        file.write_text("1", encoding="utf-8")
    os.utime(old, (1_000_000_000, 1_000_000_000))
    hashes.learn(["old.py", "new.py"])
    assert hashes.changed(["old.py"]) == []
    assert hashes.changed(["new.py"]) == ["new.py"]


def test_a_renamed_folder_is_a_change_of_its_files(tmp_path: Path) -> None:
    """Only the two folders are reported."""
    hashes = FileHashes(tmp_path)
    (tmp_path / "old" / "deep").mkdir(parents=True)
    (tmp_path / "old" / "deep" / "a.py").write_text("1", encoding="utf-8")
    hashes.learn(["old/deep/a.py"])
    (tmp_path / "old").rename(tmp_path / "new")
    assert hashes.changed(["old", "new"]) == ["new/deep/a.py", "old/deep/a.py"]
    assert hashes.changed(["old", "new"]) == []


def test_the_rules_of_gitignore(tmp_path: Path) -> None:
    rules = GitIgnore(tmp_path)
    assert not rules.ignores("a.log")
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n# a comment\n/mcp/out/\n", encoding="utf-8")
    found = [path for path in ("a.log", "x/a.log", "keep.log", "mcp/out/a", "out/a") if rules.ignores(path)]
    assert found == ["a.log", "x/a.log", "mcp/out/a"]
    # Each folder has rules of its own, and they are those of now.
    (tmp_path / "mcp").mkdir()
    (tmp_path / "mcp" / ".gitignore").write_text("/cache/\n!a.log\n", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("*.log\n", encoding="utf-8")
    paths = ("a.log", "mcp/a.log", "mcp/b.log", "mcp/cache/x", "cache/x", "mcp/deep/cache/x", "mcp/out/a")
    assert [path for path in paths if rules.ignores(path)] == ["a.log", "mcp/b.log", "mcp/cache/x"]


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in (
        "mcp/main.py",
        "mcp/tools/a.py",
        "mcp/data.json",
        "mcp/out.log",
        "mcp/.hidden",
        "mcp/environment/pyvenv.cfg",
        "mcp/environment/lib/module.py",
        "mcp/node_modules/x.js",
        "other/b.py",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("*.log\n", encoding="utf-8")
    assert sorted(repository_files(tmp_path, "mcp")) == ["mcp/data.json", "mcp/main.py", "mcp/tools/a.py"]
    assert list(repository_files(tmp_path, "missing")) == []


def test_paths_lead_out_of_the_root_too(tmp_path: Path) -> None:
    assert from_root(tmp_path / "repo", tmp_path / "repo" / "mcp" / "main.py") == "mcp/main.py"
    assert from_root(tmp_path / "repo", tmp_path / "rows.jsonl") == "../rows.jsonl"


def test_saves_are_noticed(tmp_path: Path) -> None:
    async def notice() -> set[str]:
        send, receive = anyio.create_memory_object_stream[Save](100)
        stop = anyio.Event()
        seen: set[str] = set()
        for folder in ("mcp", "reward_fn"):
            (tmp_path / folder).mkdir()
        follower = Follower(tmp_path, lambda: Watched("rows.jsonl", "mcp", frozenset(), frozenset()))
        follower.learn()
        async with anyio.create_task_group() as group:
            await group.start(follower.follow, send, stop)
            # One look may find some of the files, the next one the others.
            while seen != {"mcp/main.py", "reward_fn/b.py", "rows.jsonl"}:
                for name in ("mcp/main.py", "reward_fn/b.py", "rows.jsonl", "unwanted.py", "mcp/run.tmp"):
                    (tmp_path / name).write_text(str(anyio.current_time()), encoding="utf-8")
                with anyio.move_on_after(0.2):
                    save = await receive.receive()
                    seen.update(save.paths)
                    assert save.stale
            stop.set()
        return seen

    assert anyio.run(notice) == {"mcp/main.py", "reward_fn/b.py", "rows.jsonl"}


def test_a_tool_saved_while_results_were_made_is_noticed(tmp_path: Path) -> None:
    """Its module becomes known with the results, after every folder that is watched from the start."""

    async def notice() -> list[str]:
        send, receive = anyio.create_memory_object_stream[Save](100)
        stop = anyio.Event()
        sources: set[str] = set()
        for folder in ("lib", "mcp", "reward_fn"):
            (tmp_path / folder).mkdir()
        follower = Follower(tmp_path, lambda: Watched("rows.jsonl", "mcp", frozenset(sources), frozenset()))
        follower.learn()
        tool = tmp_path / "lib" / "tool.py"
        tool.write_text("1", encoding="utf-8")
        eventually(lambda: time.time() - tool.stat().st_mtime > 2 * CLOCK_SECONDS)
        sources.add("lib/tool.py")
        follower.learn()
        async with anyio.create_task_group() as group:
            await group.start(follower.follow, send, stop)
            tool.write_text("1", encoding="utf-8")
            with anyio.fail_after(PATIENCE):
                save = await receive.receive()
            stop.set()
        return save.paths

    assert anyio.run(notice) == ["lib/tool.py"]
