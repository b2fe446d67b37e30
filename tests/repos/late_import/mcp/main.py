from fastmcp import FastMCP

mcp = FastMCP("late import")


@mcp.tool
def price(item: str) -> int:
    """Look up a price."""
    from data.prices import PRICES

    return PRICES[item]


@mcp.tool
def tax() -> int:
    """Look up the tax rate, which is kept beside mcp/."""
    import rates

    return rates.TAX
