"""Imported once by the fork server: what every worker needs is imported and warm before the first of them is forked.

No thread may be started here, because a fork takes along only the thread that forks.
"""

from __future__ import annotations

import anyio
import fastmcp

from osmosis_ai.runtime import process as process  # what a worker runs
from osmosis_ai.runtime.models import cache as cache
from osmosis_ai.runtime.orphans import adopt_orphans


async def _warm_up() -> None:
    """Use a throw-away server once: some of fastmcp's imports wait for the first session and the first call."""
    server = fastmcp.FastMCP("warm-up")

    async def nothing() -> None:
        """Do nothing."""

    server.tool(nothing)
    async with fastmcp.Client(server) as client:
        await client.list_tools()
        await client.call_tool("nothing", {})


adopt_orphans()
anyio.run(_warm_up)
