"""Imported once by the fork server: what every worker needs is imported and warm before the first of them is forked.

No thread may be started here, because a fork takes along only the thread that forks.
"""

from __future__ import annotations

import signal

import anyio
import fastmcp

from osmosis_ai.mcp_tools import loading as loading
from osmosis_ai.mcp_tools.host import ToolHost
from osmosis_ai.reward_fn import decorator as decorator
from osmosis_ai.runtime import agents as agents
from osmosis_ai.runtime import process as process  # what a worker runs
from osmosis_ai.runtime.models import cache as cache
from osmosis_ai.runtime.models import openai_compatible as openai_compatible
from osmosis_ai.runtime.orphans import adopt_orphans


async def _warm_up() -> None:
    """Use a throw-away server once: some imports wait for the first session and the first call."""
    server = fastmcp.FastMCP("warm-up")

    async def nothing(value: int) -> int:
        """Do nothing."""
        return value

    server.tool(nothing)
    async with ToolHost(server) as host, host.session() as session:
        await session.call("nothing", '{"value": 1}', timeout=10.0)


signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
adopt_orphans()
anyio.run(_warm_up)
