"""Load every repository layout in tests/repos, each in its own process."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("loading")

REPOS = Path(__file__).parent.parent / "repos"
SDK = 2 if importlib.util.find_spec("mcp.server.mcpserver") else 1

Load = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("repo_runner.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with process:
        yield process
        process.stdin.close()


@pytest.fixture
def load(runner: subprocess.Popen[str]) -> Load:
    def ask(repo: str | Path, *calls: tuple[str, Any], name: str | None = None, mcp: str = "mcp") -> dict[str, Any]:
        request = {"mcp": str(REPOS / repo / mcp), "name": name, "calls": calls}
        runner.stdin.write(json.dumps(request) + "\n")
        runner.stdin.flush()
        return json.loads(runner.stdout.readline())

    return ask


def test_main_is_loaded_under_its_own_name_and_its_main_block_does_not_run(load: Load) -> None:
    found = load("flat", ("add", {"a": 2, "b": 3}), ("where", ""))
    assert found["tools"] == ["add", "shout", "where"]
    assert found["outcomes"][0] == [None, "5"]
    where = json.loads(found["outcomes"][1][1])
    main = REPOS / "flat" / "mcp" / "main.py"
    assert where == {
        "name": "main",
        "file": str(main),
        "argv": str(main),
        "first": str(main.parent),
        "second": str(main.parent.parent),
    }


@pytest.mark.parametrize(
    ("repo", "tool", "arguments", "answer"),
    [
        ("packages", "multiply", {"first_val": 6, "second_val": 7}, "42.0"),
        ("packages", "reverse", {"text": "abc"}, "cba"),
        ("relative_imports", "feet", {"metres": 2}, "6.5"),
        ("late_import", "price", {"item": "apple"}, "3"),
        ("late_import", "tax", {}, "19"),
        ("circular", "halve", {"number": 3}, "1.5"),
        ("mcp_package", "note", {"text": "hello"}, "hello"),
        ("mcp_package", "sdk_client", {}, "mcp.client.stdio"),
        ("two_names", "negate", {"number": 4}, "-4"),
        ("usual_name", "chosen", {}, "true"),
        ("lifespan", "ready", {}, "true"),
    ],
)
def test_layouts(load: Load, repo: str, tool: str, arguments: dict[str, Any], answer: str) -> None:
    found = load(repo, (tool, arguments))
    assert found["outcomes"] == [[None, answer]]


def test_named_server(load: Load) -> None:
    assert load("two_servers", name="numbers")["tools"] == ["one"]
    assert load("two_servers", name="words")["tools"] == ["word"]


def test_two_servers_are_an_error_naming_both(load: Load) -> None:
    error = load("two_servers")["error"]
    assert error.startswith("mcp/main.py: holds 2 servers: `numbers`, `words`.")
    assert "mcp/main.py:numbers" in error


def test_a_name_that_is_no_server_lists_the_servers(load: Load) -> None:
    assert load("two_servers", name="build")["error"] == (
        "mcp/main.py: `build` is a function, not an MCP server. The servers there: `numbers`, `words`."
    )
    assert load("two_servers", name="other")["error"] == (
        "mcp/main.py: has no `other`. The servers there: `numbers`, `words`."
    )


def test_no_server(load: Load) -> None:
    error = load("no_server")["error"]
    assert error.startswith("mcp/main.py: no MCP server found, in `mcp`, `server`, `app` or any other name")
    assert "`mcp` is a function" in error
    assert "outside of functions" in error


def test_a_server_in_another_module_is_pointed_out(load: Load) -> None:
    assert load("server_elsewhere")["error"].endswith("import it there: `from tools.math import calculator`")


def test_no_main(load: Load, tmp_path: Path) -> None:
    (tmp_path / "mcp").mkdir()
    assert load(tmp_path)["error"].startswith("mcp/main.py: there is no such file")


def test_sdk_1_server(load: Load) -> None:
    found = load("sdk1", ("add", {"a": 1, "b": 2}))
    if SDK == 1:
        assert found["outcomes"] == [[None, "3"]]
    else:
        assert found["error"].startswith("mcp/main.py:1: ModuleNotFoundError: ")
        assert "\n    from mcp.server.fastmcp import FastMCP\n" in found["error"]
        assert found["error"].endswith("Write `from fastmcp import FastMCP` instead, or install `mcp<2`.")


def test_sdk_2_server(load: Load) -> None:
    found = load("sdk2", ("add", {"a": 1, "b": 2}))
    if SDK == 2:
        assert found["outcomes"] == [[None, "3"]]
    else:
        assert found["error"].startswith("mcp/main.py:1: ModuleNotFoundError: ")
        assert found["error"].endswith("Write `from fastmcp import FastMCP` instead, or install `mcp>=2`.")


def test_the_other_spelling_of_a_removed_import(load: Load, tmp_path: Path) -> None:
    (tmp_path / "mcp").mkdir()
    gone = "FastMCP" if SDK == 2 else "MCPServer"
    (tmp_path / "mcp" / "main.py").write_text(f"from mcp.server import {gone}\n", encoding="utf-8")
    assert "Write `from fastmcp import FastMCP` instead" in load(tmp_path)["error"]


@pytest.mark.parametrize(
    ("repo", "first", "source", "hint"),
    [
        ("broken_syntax", "mcp/tools/broken.py:1: SyntaxError: ", "def add(a, b)", None),
        (
            "raises_at_import",
            "mcp/tools/math.py:13: NameError: name 'DEFAULT' is not defined",
            "def add(a: int, b: int = DEFAULT) -> int:",
            None,
        ),
        (
            "missing_package",
            "mcp/tools/frames.py:3: ModuleNotFoundError: No module named 'no_such_package_anywhere'",
            "import no_such_package_anywhere.core as frames",
            "pip install no_such_package_anywhere",
        ),
        (
            "missing_module",
            "mcp/main.py:3: ModuleNotFoundError: No module named 'tools.gone'",
            "from tools.gone import add",
            None,
        ),
        ("exits_at_import", "mcp/main.py:3: SystemExit: no configuration", 'sys.exit("no configuration")', "exited"),
        ("interrupts_at_import", "mcp/main.py:1: KeyboardInterrupt", "raise KeyboardInterrupt", "interrupted"),
        ("runs_at_import", "mcp/main.py:5: ValueError: ", "mcp.run(", '`if __name__ == "__main__":`'),
        (
            "lifespan_fails",
            "mcp/main.py:8: ConnectionError: the database is down",
            "raise ConnectionError",
            "not start",
        ),
    ],
)
def test_broken_repos_name_file_line_and_exception(
    load: Load, repo: str, first: str, source: str, hint: str | None
) -> None:
    lines = load(repo)["error"].splitlines()
    assert lines[0].startswith(first)
    assert lines[1].startswith(f"    {source}")
    assert len(lines) == (2 if hint is None else 3)
    if hint is not None:
        assert hint in lines[2]


def test_a_file_that_is_no_text(load: Load, tmp_path: Path) -> None:
    (tmp_path / "mcp").mkdir()
    (tmp_path / "mcp" / "main.py").write_bytes(b"x = 1\0")
    assert load(tmp_path)["error"].startswith("mcp/main.py: ")


def test_a_second_save_within_the_same_second_is_seen(load: Load, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(REPOS / "packages", repo)
    tool = repo / "mcp" / "tools" / "math.py"
    times = tool.stat().st_atime, tool.stat().st_mtime
    arguments = {"first_val": 6, "second_val": 7}
    assert load(repo, ("multiply", arguments))["outcomes"] == [[None, "42.0"]]
    # Same size and same modification time: what Python's own cache can't tell from the old file.
    tool.write_text(
        tool.read_text(encoding="utf-8").replace("first_val * second", "first_val + second"), encoding="utf-8"
    )
    os.utime(tool, times)
    assert load(repo, ("multiply", arguments))["outcomes"] == [[None, "13.0"]]
    assert not list(repo.rglob("__pycache__"))


def test_a_stale_cache_is_not_read(load: Load, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(REPOS / "packages", repo)
    tool = repo / "mcp" / "tools" / "math.py"
    times = tool.stat().st_atime, tool.stat().st_mtime
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(repo)], check=True)
    tool.write_text(
        tool.read_text(encoding="utf-8").replace("first_val * second", "first_val + second"), encoding="utf-8"
    )
    os.utime(tool, times)
    assert load(repo, ("multiply", {"first_val": 6, "second_val": 7}))["outcomes"] == [[None, "13.0"]]


def test_a_folder_of_another_name(load: Load, tmp_path: Path) -> None:
    shutil.copytree(REPOS / "packages" / "mcp", tmp_path / "my tools")
    found = load(tmp_path, ("reverse", {"text": "ab"}), mcp="my tools")
    assert found["outcomes"] == [[None, "ba"]]


def test_a_main_py_in_the_root_is_not_taken_for_the_servers(load: Load, tmp_path: Path) -> None:
    shutil.copytree(REPOS / "circular", tmp_path / "repo")
    (tmp_path / "repo" / "main.py").write_text("raise RuntimeError('the wrong one')\n", encoding="utf-8")
    assert load(tmp_path / "repo", ("halve", {"number": 8}))["outcomes"] == [[None, "4.0"]]


def test_exits_in_tools_are_contained(load: Load) -> None:
    found = load("faults", ("exits", ""), ("interrupts", ""), ("fine", ""))
    assert [error for error, _ in found["outcomes"]] == ["exception", "exception", None]
    assert "SystemExit: 3" in found["outcomes"][0][1]


def test_a_tool_that_ends_the_process_ends_only_its_own(load: Load) -> None:
    assert load("faults", ("dies", "")) == {"died": 7}
    assert load("faults", ("fine", ""))["outcomes"] == [[None, "fine"]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 can't tell whose cancellation it is")
def test_a_cancellation_that_nobody_asked_for_is_the_tools_failure(load: Load) -> None:
    found = load("faults", ("cancels", ""), ("fine", ""))
    assert found["outcomes"] == [["exception", "Error: the tool raised CancelledError"], [None, "fine"]]


def test_tools_whose_output_is_no_text(load: Load) -> None:
    found = load("faults", ("floods", ""), ("prints", ""), ("surrogate", ""), ("unserializable", ""), ("fine", ""))
    flood, printed, surrogate, unserializable, fine = found["outcomes"]
    assert flood == [None, "x" * 5_000_000]
    assert printed == [None, "printed"]
    assert surrogate == [None, "broken \ufffd text"]
    assert unserializable[0] == "exception"
    assert fine == [None, "fine"]
