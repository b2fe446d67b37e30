import anyio
from fastmcp import FastMCP

mcp = FastMCP("slow")


@mcp.tool
async def forever() -> None:
    """Never come back."""
    await anyio.sleep_forever()


@mcp.tool
def quick() -> str:
    """Answer at once."""
    return "done"
