from mcp.server.mcpserver import MCPServer

mcp = MCPServer("sdk 2")


@mcp.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b
