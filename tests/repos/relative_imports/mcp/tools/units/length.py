from server_setup import mcp

from ..shared import FEET_PER_METRE


@mcp.tool
def feet(metres: float) -> float:
    """Convert metres to feet."""
    return metres * FEET_PER_METRE
