"""The MCP server: `python mcp/main.py` serves it over stdio; Osmosis imports it and finds `mcp`."""

from server import mcp
from tools import arithmetic  # noqa: F401  (importing it registers the tools)

if __name__ == "__main__":
    mcp.run()
