from server.mcp_server import mcp


@mcp.tool()
def reverse(text: str) -> str:
    """Reverse a text."""
    return text[::-1]
