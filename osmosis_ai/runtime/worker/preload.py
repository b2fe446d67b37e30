"""Imported once by the fork server: what every worker needs is imported and warm before the first of them is forked.

No thread may be started here, because a fork takes along only the thread that forks.
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from osmosis_ai.mcp_tools import loading
from osmosis_ai.mcp_tools.host import ToolHost
from osmosis_ai.models import cache as cache
from osmosis_ai.reward_fn import decorator as decorator
from osmosis_ai.runtime.worker import agents as agents
from osmosis_ai.runtime.worker import main as main  # what a worker runs


async def _warm_up() -> None:
    """Use a throw-away server once: some imports wait for the first session and the first call."""
    import fastmcp

    server = fastmcp.FastMCP("warm-up")

    async def nothing(value: int) -> int:
        """Do nothing."""
        return value

    server.tool(nothing)
    async with ToolHost(server) as host, host.session() as session:
        await session.call("nothing", '{"value": 1}', timeout=10.0)


# fastmcp reads .env too; that it can't be read is for the command to say.
with suppress(UnicodeDecodeError):
    loading.import_fastmcp()
    anyio.run(_warm_up)
