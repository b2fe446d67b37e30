"""The repository's tools, as a scripted model sees and calls them through the command."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from fastmcp import Client

from commands import Finished, Osmosis, run_osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, by_turn, text, tool_call, tool_calls
from repos import write_repo

REPOS = Path(__file__).parents[1] / "repos"
SDK_1 = version("mcp").startswith("1.")


def write_rows(folder: Path, *prompts: str) -> Path:
    file = folder / "rows.jsonl"
    lines = [json.dumps({"system_prompt": "s", "user_prompt": prompt, "ground_truth": prompt}) for prompt in prompts]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def tool_messages(request: Request) -> list[str]:
    return [message["content"] for message in request.messages if message["role"] == "tool"]


class Layout(NamedTuple):
    """A value of `--mcp`, the model's tool calls, and their results."""

    mcp: str
    calls: list[tuple[str, dict[str, Any]]]
    results: list[str]


LAYOUTS = [
    Layout(
        "packages/mcp", [("multiply", {"first_val": 3, "second_val": 7}), ("reverse", {"text": "abc"})], ["21.0", "cba"]
    ),
    Layout("relative_imports/mcp", [("feet", {"metres": 2})], ["6.5"]),
    Layout("late_import/mcp", [("price", {"item": "apple"}), ("tax", {})], ["3", "19"]),
    Layout("circular/mcp", [("halve", {"number": 5})], ["2.5"]),
    Layout("mcp_package/mcp", [("note", {"text": "hello"}), ("sdk_client", {})], ["hello", "mcp.client.stdio"]),
    Layout("usual_name/mcp", [("chosen", {})], ["true"]),
    Layout("two_names/mcp/main.py", [("negate", {"number": 5})], ["-5"]),
    Layout("two_servers/mcp/main.py:words", [("word", {})], ["one"]),
    Layout("sdk1/mcp" if SDK_1 else "sdk2/mcp", [("add", {"a": 1, "b": 2})], ["3"]),
]


def run_layout(layout: Layout, folder: Path) -> tuple[Finished, list[str]]:
    shutil.copytree(REPOS / layout.mcp.partition("/")[0], folder / layout.mcp.partition("/")[0])
    script = by_turn(*(tool_calls([call]) for call in layout.calls), text("done"))
    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        rows = write_rows(folder, "go")
        done = run_osmosis("test", "--mcp", layout.mcp, "-d", rows, *model, "--json", cwd=folder)
        return done, tool_messages(endpoint.requests[-1]) if endpoint.chats else []


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.mcp)
def test_layouts(layout: Layout, tmp_path: Path) -> None:
    done, results = run_layout(layout, tmp_path)
    assert done.code == 0, done.stderr
    assert results == layout.results
    assert done.json["results"][0]["finish_reason"] == "stop"


@pytest.mark.skipif(SDK_1, reason="the SDK that still has FastMCP")
def test_the_removed_fastmcp_of_the_sdk_says_what_to_write(osmosis: Osmosis, tmp_path: Path) -> None:
    done = osmosis("test", "--mcp", REPOS / "sdk1" / "mcp", "-d", write_rows(tmp_path, "go"), cwd=tmp_path)
    assert (done.code, done.stdout) == (2, "")
    assert "mcp/main.py:1" in done.stderr
    assert "from fastmcp import FastMCP" in done.stderr


MISTAKES: dict[str, tuple[Reply, str, str]] = {
    "unknown": (tool_call("ad", a=1, b=2), "unknown_tool", "there is no tool 'ad'. Did you mean 'add'?"),
    "bad json": (tool_calls([("add", '{"a": 1, "b": ')]), "bad_json", "not valid JSON"),
    "no object": (tool_calls([("add", "[1, 2]")]), "bad_json", "must be a JSON object"),
    "wrong type": (tool_call("add", a="one", b=2), "schema", "'one' is not of type 'integer'"),
    "missing": (tool_call("add", a=1), "schema", "'b' is a required property"),
    "exception": (tool_call("divide", a=1, b=0), "exception", "division by zero"),
    "exit": (tool_call("leave"), "exception", "SystemExit"),
    "timeout": (tool_call("forever"), "timeout", "did not answer within 1 seconds"),
}

FRAGILE = """
import sys

import anyio
from fastmcp import FastMCP

mcp = FastMCP("fragile")


@mcp.tool
def add(a: int, b: int) -> int:
    return a + b


@mcp.tool
def divide(a: int, b: int) -> float:
    return a / b


@mcp.tool
async def leave() -> None:
    sys.exit(3)


@mcp.tool
async def forever() -> None:
    await anyio.sleep_forever()
"""


def test_mistakes_go_back_to_the_model_and_the_rollout_goes_on(osmosis: Osmosis, tmp_path: Path) -> None:
    rows = [{"system_prompt": "s", "user_prompt": name, "ground_truth": "3"} for name in MISTAKES]
    repo = write_repo(tmp_path / "repo", main=FRAGILE, rows=rows)

    def script(request: Request) -> Reply:
        turns = [MISTAKES[request.messages[1]["content"]][0], tool_call("add", a=1, b=2), text("3")]
        return turns[request.turn]

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--tool-timeout", "1"]
        done = osmosis("test", *model, "-o", "results.json", cwd=repo)
        assert done.code == 0, done.stderr
        seen = {
            request.messages[1]["content"]: tool_messages(request) for request in endpoint.chats if request.turn == 2
        }
    for name, (_, _, message) in MISTAKES.items():
        first, second = seen[name]
        assert first.startswith("Error")
        assert message in first
        assert second == "3"
    result = json.loads((repo / "results.json").read_text(encoding="utf-8"))
    assert [row["reward"] for row in result["results"]] == [1.0] * len(MISTAKES)
    tools = result["summary"]["tools"]
    assert tools["add"]["calls"] == len(MISTAKES) + 4
    assert tools["add"]["errors"] == {"bad_json": 2, "schema": 2}
    assert tools["ad"]["errors"] == {"unknown_tool": 1}
    assert tools["divide"]["errors"] == {"exception": 1}
    assert tools["forever"]["errors"] == {"timeout": 1}
    assert tools["forever"]["median_ms"] >= 1000
    table = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "tool calls errors median p95" in table
    assert any(line.startswith(f"add {len(MISTAKES) + 4} bad_json 2, schema 2 ") for line in table)


SCHEMAS = """
from enum import Enum
from typing import Annotated, Literal

from fastmcp import FastMCP
from pydantic import BaseModel, Field

mcp = FastMCP("schemas")


class Unit(Enum):
    metre = "m"
    foot = "ft"


class Line(BaseModel):
    item: str = Field(description="What is bought", min_length=1)
    count: int = Field(default=1, ge=1, le=99)
    tags: list[Literal[1, 2, "three"]] = []


class Order(BaseModel):
    lines: list[Line]
    parent: "Order | None" = None


@mcp.tool(name="place_order", description="Place an order — née “bestellen”.")
def place(order: Order, unit: Unit = Unit.metre, ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5) -> str:
    return "placed"


@mcp.tool
def nothing() -> None:
    \"\"\"Take nothing.\"\"\"
"""


def test_schemas_reach_the_model_verbatim(osmosis: Osmosis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = write_repo(tmp_path / "repo", main=SCHEMAS)
    listed = anyio.run(list_tools, repo / "mcp" / "main.py", monkeypatch)
    with ScriptedEndpoint(by_turn(text("3"))).run_in_thread() as endpoint:
        done = osmosis("test", "--base-url", endpoint.url, "--model", "m", "--limit", "1", "-q", cwd=repo)
        assert done.code == 0, done.stderr
        (request,) = endpoint.chats
    sent = [tool["function"] for tool in request.tools]
    assert [function["name"] for function in sent] == ["place_order", "nothing"]
    assert [function["description"] for function in sent] == [tool.description for tool in listed]
    plain = [tool.model_dump(mode="json", by_alias=True)["inputSchema"] for tool in listed]
    assert [function["parameters"] for function in sent] == plain
    assert "$defs" in plain[0]


async def list_tools(main: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List the tools by asking the server itself."""
    spec = spec_from_file_location("served_schemas", main)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "served_schemas", module)
    spec.loader.exec_module(module)
    async with Client(module.mcp) as client:
        return list(await client.list_tools())


MEETING = """
import anyio
from fastmcp import Context, FastMCP

mcp = FastMCP("meeting")
guests: dict[str, list[str]] = {}
complete: dict[str, anyio.Event] = {}


@mcp.tool
async def meet(name: str, ctx: Context) -> str:
    \"\"\"Wait until three are there.\"\"\"
    everyone = complete.setdefault(ctx.session_id, anyio.Event())
    there = guests.setdefault(ctx.session_id, [])
    there.append(name)
    if len(there) == 3:
        everyone.set()
    await everyone.wait()
    return name


@mcp.tool
async def who(ctx: Context) -> str:
    \"\"\"Say who has come.\"\"\"
    return " ".join(sorted(guests.get(ctx.session_id, [])))
"""


def test_calls_of_a_turn_run_together_in_the_rollouts_own_session(osmosis: Osmosis, tmp_path: Path) -> None:
    """Three calls of one turn wait for each other; a later call of the same rollout sees only them."""
    repo = write_repo(tmp_path / "repo", main=MEETING)

    def script(request: Request) -> Reply:
        row = request.messages[1]["content"][8]
        meeting = tool_calls([("meet", {"name": f"{name}{row}"}) for name in ("c", "a", "b")])
        return [meeting, tool_call("who"), text("done")][request.turn]

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--tool-timeout", "20"]
        done = osmosis("test", *model, "--json", cwd=repo)
        assert done.code == 0, done.stderr
        seen = sorted(tool_messages(request) for request in endpoint.chats if request.turn == 2)
    assert done.json["summary"]["tools"]["meet"]["errors"] == {}
    assert seen == [[f"c{row}", f"a{row}", f"b{row}", f"a{row} b{row} c{row}"] for row in (1, 3, 5)]


@pytest.mark.parametrize("isolation", ["session", "rollout"])
def test_an_mcp_package_in_the_root_does_not_hide_the_sdk(osmosis: Osmosis, repo: Path, isolation: str) -> None:
    """Many repositories have an `__init__.py` in `mcp/`; run from the root, `import mcp` must still mean the SDK."""
    (repo / "mcp" / "__init__.py").write_text("", encoding="utf-8")
    done = osmosis("test", "--model", "offline/oracle", "--isolation", isolation, "--json", cwd=repo)
    assert done.code == 0, done.stderr
    assert [row["reward"] for row in done.json["results"]] == [1.0, 1.0, 1.0]
