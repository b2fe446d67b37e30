"""A tool that raises: its place in the report, its traceback in record and log, and its rows chosen by options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Finished, Osmosis, documented
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_call
from repos import write_repo

SHOP = """
from fastmcp import FastMCP
from fastmcp.exceptions import ToolError

mcp = FastMCP("shop")
PRICES = {"pen": 2}


def find(item: str) -> int:
    return PRICES[item]


@mcp.tool
def price(item: str) -> int:
    return find(item)


@mcp.tool
def refund(item: str) -> int:
    raise ToolError("no refunds")
"""

FIND = SHOP.splitlines().index("    return PRICES[item]") + 1


def row(prompt: str, truth: str) -> dict[str, Any]:
    return {"system_prompt": "Sell.", "user_prompt": prompt, "ground_truth": truth}


def asked(request: Any) -> Any:
    """Call the tool that the user prompt names, then answer 2."""
    name, _, item = request.messages[1]["content"].partition(" ")
    return by_turn(tool_call(name, item=item), text("2"))(request)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    rows = [row("price pen", "2"), row("price milk", "2"), row("refund pen", "3"), row("price pen", "3")]
    return write_repo(tmp_path / "repo", main=SHOP, rows=rows)


@pytest.fixture
def done(osmosis: Osmosis, repo: Path) -> Finished:
    """Run all rows: the second and third have a tool error, the third and fourth don't pass."""
    with ScriptedEndpoint(asked).run_in_thread() as endpoint:
        return osmosis("test", "--base-url", endpoint.url, "--model", "m", "-o", "results.json", cwd=repo)


def test_the_report_names_tool_file_line_and_message(done: Finished, repo: Path) -> None:
    assert done.code == 0
    errors = done.stdout.partition("tool errors\n")[2]
    assert f"1 × tool at mcp/main.py:{FIND}, for example row 1: price: KeyError: 'milk'" in errors
    assert "1 × tool, for example row 2: refund: no refunds" in errors
    found = documented("test", (repo / "results.json").read_text(encoding="utf-8"))["summary"]["tool_errors"]
    assert [(cause["function"], cause["file"], cause["line"]) for cause in found] == [
        ("price", "mcp/main.py", FIND),
        ("refund", None, None),
    ]


def test_the_traceback_is_in_the_record_and_the_log(osmosis: Osmosis, done: Finished, repo: Path) -> None:
    shown = osmosis("runs", "show", "--row", "1", cwd=repo).stdout
    (log,) = (repo / ".osmosis" / "logs").glob("*.log")
    for place in (f'File "mcp/main.py", line {FIND}, in find', "return PRICES[item]", "KeyError: 'milk'"):
        assert place in shown
        assert place in log.read_text(encoding="utf-8")
    assert "site-packages" not in shown
    (call,) = osmosis("runs", "show", "--row", "1", "--json", cwd=repo).json["rollouts"][0]["tool_calls"]
    assert call["failure"]["detail"].startswith("Traceback (most recent call last, this repository's code only)")
    refused = osmosis("runs", "show", "--row", "2", cwd=repo).stdout
    assert "Error: no refunds" in refused
    assert "Traceback" not in refused


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (["--tool-errors"], [1, 2]),
        (["--not-passed"], [2, 3]),
        (["--below", "0.5"], [2, 3]),
        (["--below", "0"], []),
        (["--failed"], []),
        (["--tool-errors", "--not-passed"], [2]),
    ],
)
def test_options_choose_rows(osmosis: Osmosis, done: Finished, repo: Path, options: list[str], rows: list[int]) -> None:
    listed = osmosis("runs", "show", *options, "--json", cwd=repo).json["rollouts"]
    assert [rollout["row_index"] for rollout in listed] == rows
    exported = osmosis("runs", "export", *options, cwd=repo).stdout.splitlines()
    assert [json.loads(line)["row_index"] for line in exported] == rows
    said = osmosis("runs", "show", *options, cwd=repo).stderr
    assert ("no rollout of the run matches" in said) == (not rows)
