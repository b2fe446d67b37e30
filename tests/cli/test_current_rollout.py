"""`current_rollout()` in tools, and `@osmosis_setup` functions: what they see, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextvars
from pathlib import Path
from typing import Any

import pytest

from commands import Finished, run_osmosis
from osmosis_ai import current_rollout, osmosis_setup
from osmosis_ai.current import rollout_scope
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_calls
from repos import write_repo

TOOLS = """
import asyncio
import json
import os
import threading
from pathlib import Path

from fastmcp import FastMCP
from osmosis_ai import current_rollout, osmosis_setup

mcp = FastMCP("notes")


@osmosis_setup
def fill() -> None:
    rollout = current_rollout()
    (rollout.scratch / "note").write_text(f"row {rollout.row_index}")


@osmosis_setup
async def fill_more() -> None:
    with (current_rollout().scratch / "note").open("a") as note:
        note.write(f" level {current_rollout().metadata['level']}")


def note() -> str:
    assert threading.current_thread() is not threading.main_thread()
    return (current_rollout().scratch / "note").read_text()


@mcp.tool
async def read() -> str:
    \"\"\"Read the note, in a thread.\"\"\"
    return await asyncio.to_thread(note)


@mcp.tool
async def look() -> str:
    \"\"\"Show everything the rollout knows, on the event loop.\"\"\"
    found = current_rollout()
    with Path("folders").open("a") as seen:
        seen.write(f"{found.scratch}\\n")
    return json.dumps([found.id, found.row_index, dict(found.metadata), repr(found), os.listdir(found.scratch)])
"""


def run_tools(root: Path, *options: str) -> tuple[Finished, list[list[str]]]:
    """Run both tools on three rows; return each rollout's results."""
    script = by_turn(tool_calls([("read", {}), ("look", {})]), text("3"))
    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        arguments = ("--base-url", endpoint.url, "--model", "any", *options)
        done = run_osmosis("test", *arguments, cwd=root, env={"OSMOSIS_API_KEY": "any"})
        ends = [request.messages for request in endpoint.requests if request.turn == 1]
    return done, [[message["content"] for message in messages if message["role"] == "tool"] for messages in ends]


@pytest.mark.parametrize("options", ["--workers 1", "--isolation rollout", "--workers 0"])
def test_every_tool_knows_its_rollout_and_has_a_folder_of_its_own(options: str, tmp_path: Path) -> None:
    import json

    root = write_repo(tmp_path / "repo", main=TOOLS)
    done, results = run_tools(root, *options.split())
    assert done.code == 0, done.stderr
    assert sorted(read for read, _ in results) == ["row 0 level 1", "row 1 level 3", "row 2 level 5"]
    looks = sorted((json.loads(look) for _, look in results), key=lambda look: look[1])
    assert len({look[0] for look in looks}) == 3
    assert [look[1:3] for look in looks] == [[0, {"level": 1}], [1, {"level": 3}], [2, {"level": 5}]]
    assert all(look[4] == ["note"] for look in looks)
    # Neither the ground truth nor the store.
    assert not any("ground" in look[3] or ".osmosis" in look[3] for look in looks)
    folders = [Path(line) for line in (root / "folders").read_text(encoding="utf-8").splitlines()]
    assert len(set(folders)) == 3
    assert not any(folder.exists() for folder in folders)


def test_the_folder_of_a_worker_that_died_is_removed_with_the_run(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=TOOLS.replace("return json.dumps", "os._exit(3)\n    return json.dumps"))
    done, _ = run_tools(root, "--limit", "1", "--workers", "1")
    assert done.code == 1
    folders = [Path(line) for line in (root / "folders").read_text(encoding="utf-8").splitlines()]
    assert folders
    assert not any(folder.exists() or folder.parent.name != folders[0].parent.name for folder in folders)


SETUPS = {
    "raises": ("raise KeyError('shop.db')", "setup: fill raised KeyError: 'shop.db'", 0),
    "exits": ("import sys; sys.exit(4)", "setup: fill raised SystemExit: 4", 0),
    "waits": ("import time; time.sleep(60)", "timeout: the rollout took longer than 1 s (--timeout)", 0),
    "dies": ("import os; os._exit(5)", "worker: exited with code 5", 0),
}


@pytest.mark.parametrize("name", SETUPS)
def test_a_setup_that_fails_fails_its_rollout_before_the_model_is_called(name: str, tmp_path: Path) -> None:
    statement, error, calls = SETUPS[name]
    main = TOOLS.replace(
        "    rollout = current_rollout()\n",
        f"    if current_rollout().row_index == 1:\n        {statement}\n    rollout = current_rollout()\n",
    )
    root = write_repo(tmp_path / "repo", main=main)
    with ScriptedEndpoint(lambda request: text("3")).run_in_thread() as endpoint:
        arguments = ("--base-url", endpoint.url, "--model", "any", "--workers", "1", "--timeout", "1", "--json")
        done = run_osmosis("test", *arguments, cwd=root, env={"OSMOSIS_API_KEY": "any"})
        prompts = [request.messages[-1]["content"] for request in endpoint.requests]
    assert done.code == 1
    results = {result["row_index"]: result for result in done.json["results"]}
    assert {index: result["success"] for index, result in results.items()} == {0: True, 1: False, 2: True}
    assert results[1]["error"].startswith(error)
    assert prompts.count("What is 3 + 4?") == calls
    if error.startswith("setup"):
        (cause,) = done.json["summary"]["failures"]
        assert (cause["origin"], cause["file"]) == ("setup", "mcp/main.py")
        assert main.splitlines()[cause["line"] - 1].strip() == statement


def test_a_setup_in_a_file_that_the_server_does_not_import_runs(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    (root / "mcp" / "tools").mkdir()
    (root / "mcp" / "tools" / "reset.py").write_text(
        "from pathlib import Path\nfrom osmosis_ai import osmosis_setup\n\n\n"
        "@osmosis_setup\ndef reset():\n    with Path('ran').open('a') as file:\n        file.write('.')\n",
        encoding="utf-8",
    )
    assert run_osmosis("test", "--model", "offline/oracle", "--workers", "1", cwd=root).code == 0
    assert (root / "ran").read_text(encoding="utf-8") == "..."


def test_outside_a_rollout_it_says_where_to_call_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="outside a rollout; call it in a tool or an @osmosis_setup function"):
        current_rollout()
    root = write_repo(
        tmp_path / "repo", main="from osmosis_ai import current_rollout\nHERE = current_rollout().scratch\n"
    )
    done = run_osmosis("test", "--model", "offline/oracle", "--workers", "1", cwd=root)
    assert done.code == 2
    assert "mcp/main.py:2: RuntimeError: current_rollout() was called outside a rollout" in done.stderr


def test_a_scratch_folder_ends_with_its_rollout(tmp_path: Path) -> None:
    with rollout_scope("one", 0, {}, str(tmp_path / "parent")):
        rollout = current_rollout()
        assert not (tmp_path / "parent").exists()
        assert rollout.scratch == rollout.scratch
        assert rollout.scratch.parent == tmp_path / "parent"
    assert list((tmp_path / "parent").iterdir()) == []
    with pytest.raises(RuntimeError, match="over"):
        _ = rollout.scratch


def test_threads_and_tasks_inherit_the_rollout() -> None:
    async def ask() -> list[Any]:
        with rollout_scope("one", 7, {}, None):
            task = asyncio.create_task(asyncio.sleep(0, current_rollout()))
            return [
                await task,
                await asyncio.to_thread(current_rollout),
                contextvars.copy_context().run(current_rollout),
            ]

    assert [rollout.row_index for rollout in asyncio.run(ask())] == [7, 7, 7]


def test_a_setup_that_requires_an_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="@osmosis_setup: reset: parameter `path` has no default"):

        @osmosis_setup  # type: ignore[type-var]
        def reset(path: str) -> None: ...
