"""An MCP server over stdio without an SDK: it starts in a fiftieth of the time that importing FastMCP takes.

For programs that tests write, and whose own SDK isn't what they are about.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

PREAMBLE = f"import sys\nsys.path.append({str(__file__.rpartition('/')[0])!r})\nfrom stdio_tools import serve\n"
"""The first lines of such a program; the last one is `serve(a_function, another)`."""


def serve(*tools: Callable[[], object]) -> None:
    """Serve functions without parameters as tools until stdin ends."""
    functions = {tool.__name__: tool for tool in tools}
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            reply = _answer(functions, message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}), flush=True)


def _answer(functions: dict[str, Callable[[], object]], method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"serverInfo": {"name": "stdio", "version": "1"}, "capabilities": {"tools": {}}}
        return {"result": {"protocolVersion": params["protocolVersion"], **about}}
    if method == "ping":
        return {"result": {}}
    if method == "tools/list":
        schema: dict[str, Any] = {"type": "object", "properties": {}}
        return {"result": {"tools": [{"name": name, "inputSchema": schema} for name in functions]}}
    if method == "tools/call":
        result = functions[params["name"]]()
        return {"result": {"content": [{"type": "text", "text": str(result)}], "isError": False}}
    return {"error": {"code": -32601, "message": "no such method"}}
