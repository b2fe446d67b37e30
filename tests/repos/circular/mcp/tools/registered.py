from main import mcp


@mcp.tool
def halve(number: float) -> float:
    """Halve a number."""
    return number / 2
