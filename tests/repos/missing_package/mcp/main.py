from fastmcp import FastMCP

from tools import frames

mcp = FastMCP("missing package")
