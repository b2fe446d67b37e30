"""Modules that the fork server imports and warms up once, before it forks the first worker.

They must not start a thread, because a fork copies only the calling thread.
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from osmosis_ai.mcp_tools import loading
from osmosis_ai.mcp_tools.host import ToolHost
from osmosis_ai.models import cache as cache
from osmosis_ai.reward_fn import decorator as decorator
from osmosis_ai.runtime.worker import agent_loop as agent_loop  # what the first rollout imports
from osmosis_ai.runtime.worker import main as main  # what a worker runs


async def _warm_up() -> None:
    """Use a throwaway server once, because some imports happen only in the first session and the first call."""
    import fastmcp

    server = fastmcp.FastMCP("warm-up")

    async def nothing(value: int) -> int:
        """Do nothing."""
        return value

    server.tool(nothing)
    async with ToolHost(server) as host, host.session() as session:
        await session.call("nothing", '{"value": 1}', timeout=10.0)


# fastmcp reads .env too; the command itself reports a file that can't be decoded.
with suppress(UnicodeDecodeError):
    loading.import_fastmcp()
    anyio.run(_warm_up)
