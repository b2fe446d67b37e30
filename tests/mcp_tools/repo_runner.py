"""Loads repositories, each in a forked process of its own, as a worker does.

Reads one request per line of stdin, {"mcp": DIR, "name": NAME or null, "calls": [[TOOL, ARGUMENTS], …]}, and writes one
line each: {"error"} or {"server", "tools", "outcomes": [[ERROR, TEXT], …]}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from osmosis_ai.errors import RepositoryError
from osmosis_ai.mcp_tools.host import ToolHost
from osmosis_ai.mcp_tools.loading import load_server, prepare_path
from osmosis_ai.runtime.worker import preload as preload  # the first session's imports, before the first fork


async def use(server: Any, root: Path, calls: list[tuple[str, Any]]) -> dict[str, Any]:
    async with ToolHost(server, root=root) as host:
        async with host.session() as session:
            outcomes = [await session.call(name, arguments, timeout=20) for name, arguments in calls]
        return {
            "server": server.name,
            "tools": [tool["function"]["name"] for tool in host.tools],
            "outcomes": [[outcome.error, outcome.text] for outcome in outcomes],
        }


def answer(request: dict[str, Any]) -> dict[str, Any]:
    mcp_dir = Path(request["mcp"])
    os.chdir(mcp_dir.parent)
    try:
        prepare_path(mcp_dir, mcp_dir.parent)
        server = load_server(mcp_dir / "main.py", request["name"])
        return asyncio.run(use(server, mcp_dir.parent, request["calls"]))
    except RepositoryError as exc:
        return {"error": str(exc)}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            replies.write(json.dumps(answer(request)) + "\n")
            replies.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            replies.write(json.dumps({"died": os.waitstatus_to_exitcode(status)}) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
