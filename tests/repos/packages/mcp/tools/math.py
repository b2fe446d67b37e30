from server import mcp


@mcp.tool()
def multiply(first_val: float, second_val: float) -> float:
    """Calculate the product of two numbers."""
    return round(first_val * second_val, 4)
