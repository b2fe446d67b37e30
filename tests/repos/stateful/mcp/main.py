from fastmcp import Context, FastMCP

mcp = FastMCP("stateful")
baskets: dict[str, list[str]] = {}


@mcp.tool
def put(item: str, ctx: Context) -> list[str]:
    """Put an item into this session's basket."""
    basket = baskets.setdefault(ctx.session_id, [])
    basket.append(item)
    return basket
