from fastmcp import FastMCP

calculator = tools = FastMCP("two names")


@calculator.tool
def negate(number: int) -> int:
    """Change a number's sign."""
    return -number
