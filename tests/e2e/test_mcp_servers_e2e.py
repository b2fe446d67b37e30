"""MCP servers in processes of their own: at a URL, and started from an mcp.json."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import Osmosis, clean_environment
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_call

SERVED = """
import socket
import sys

import uvicorn
from fastmcp import Context, FastMCP

mcp = FastMCP("served")
seen: dict[str, int] = {}


@mcp.tool
def count(ctx: Context) -> int:
    \"\"\"Count this session's calls.\"\"\"
    seen[ctx.session_id] = seen.get(ctx.session_id, 0) + 1
    return seen[ctx.session_id]


if len(sys.argv) > 1:
    # The socket listens already, so that nobody has to wait until this server is up.
    listener = socket.socket(fileno=int(sys.argv[1]))
    uvicorn.Server(uvicorn.Config(mcp.http_app(), log_level="error")).run(sockets=[listener])
else:
    mcp.run(transport="stdio", show_banner=False)
"""


@contextmanager
def served(script: Path) -> Iterator[str]:
    with socket.socket() as listener, tempfile.TemporaryFile() as log:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, str(script), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        finally:
            process.terminate()
            process.wait(timeout=20)


@pytest.mark.skipif(os.name == "nt", reason="a socket is handed to the server's process")
def test_a_server_at_a_url_and_one_of_an_mcp_json(osmosis: Osmosis, tmp_path: Path) -> None:
    script = tmp_path / "served.py"
    script.write_text(SERVED, encoding="utf-8")
    config = {"mcpServers": {"served": {"command": sys.executable, "args": [str(script)]}}}
    (tmp_path / "mcp.json").write_text(json.dumps(config), encoding="utf-8")
    row = {"system_prompt": "s", "user_prompt": "go", "ground_truth": "go"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with (
        served(script) as url,
        ScriptedEndpoint(by_turn(tool_call("count"), tool_call("count"), text("done"))).run_in_thread() as endpoint,
    ):
        for mcp in (url, "mcp.json"):
            model = ["--base-url", endpoint.url, "--model", "scripted"]
            done = osmosis("test", "--mcp", mcp, "-d", "rows.jsonl", *model, "--json")
            assert done.code == 0, done.stderr
            assert done.json["summary"]["tools"]["count"]["calls"] == 2
            assert done.json["summary"]["tools"]["count"]["errors"] == {}
        seen = [
            [message["content"] for message in request.messages if message["role"] == "tool"]
            for request in endpoint.chats
            if request.turn == 2
        ]
    # A rollout's calls share one session, which is not the one that listed the tools.
    assert seen == [["1", "2"], ["1", "2"]]
