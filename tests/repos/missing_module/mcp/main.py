from fastmcp import FastMCP

from tools.gone import add

mcp = FastMCP("missing module")
