from mcp.server.fastmcp import FastMCP

mcp = FastMCP("sdk 1")


@mcp.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b
