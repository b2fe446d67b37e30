"""What the documents' sections run against: a model, a server of tools, and a clone."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from fastmcp import FastMCP
from sections import ENDPOINT_URL, ROOT, SERVER_URL

from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call


def answer(request: Request) -> Reply:
    """Calls the first tool with something of each type, then answers; as a judge it likes solutions with a sum."""
    if request.messages[0]["content"].startswith("You are an impartial judge."):
        score = 0.9 if re.search(r"<solution_\w+>\n[^<]*\+", request.messages[1]["content"]) else 0.2
        return text(json.dumps({"explanation": "The steps speak for themselves.", "score": score}))
    if request.turn or not request.tools:
        return text("#### 42")
    function = request.tools[0]["function"]
    properties = function["parameters"]["properties"]
    values = {name: "bread" if schema["type"] == "string" else 2 for name, schema in properties.items()}
    return tool_call(function["name"], **values)


@pytest.fixture(scope="module")
def endpoint_url() -> Iterator[str]:
    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        yield endpoint.url


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    server = FastMCP("remote")

    @server.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with socket.socket() as listener:
        # It listens before the server runs, so nobody has to wait for it.
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(server.http_app(), log_level="error", timeout_graceful_shutdown=1)
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone as after `make demo` and `make test`, with this test's environment as its `.venv`."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".osmosis"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (root / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith("."):
            (root / ".venv" / entry.name).symlink_to(entry)
    for stamp in (".package", ".dev"):
        (root / ".venv" / stamp).touch()
    return root


@pytest.fixture
def servers(endpoint_url: str, server_url: str) -> dict[str, str]:
    return {ENDPOINT_URL: endpoint_url, SERVER_URL: server_url}
