import mcp
import mcp.types
from fastmcp import FastMCP

calculator = FastMCP("mcp package")


@calculator.tool
def note(text: str) -> list[mcp.types.TextContent]:
    """Answer with the SDK's own type."""
    return [mcp.types.TextContent(type="text", text=text)]


@calculator.tool
def sdk_client() -> str:
    """Import a part of the SDK at call time."""
    from mcp.client.stdio import stdio_client

    return stdio_client.__module__
