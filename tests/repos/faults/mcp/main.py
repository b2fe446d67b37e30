"""Tools that misbehave."""

import asyncio
import os
import sys

import anyio
from fastmcp import FastMCP

mcp = FastMCP("faults")


@mcp.tool
def fine() -> str:
    """Behave."""
    return "fine"


@mcp.tool
def raises() -> None:
    """Raise an exception."""
    raise ValueError("the tool is broken")


@mcp.tool
async def exits() -> None:
    """Raise SystemExit."""
    sys.exit(3)


@mcp.tool
async def interrupts() -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


@mcp.tool
def dies() -> None:
    """End the process."""
    os._exit(7)


@mcp.tool
async def hangs() -> None:
    """Never come back, without blocking anybody."""
    await anyio.sleep_forever()


@mcp.tool
async def blocks() -> None:
    """Block the event loop."""
    import time

    time.sleep(3600)


@mcp.tool
def floods() -> str:
    """Return 5 MB."""
    return "x" * 5_000_000


@mcp.tool
def prints() -> str:
    """Write megabytes to stdout."""
    for _ in range(40):
        print("y" * 100_000)
    return "printed"


@mcp.tool
def surrogate() -> str:
    """Return what is no valid text."""
    return "broken \ud800 text"


@mcp.tool
def unserializable() -> object:
    """Return what isn't JSON."""
    return lambda: None


@mcp.tool
async def cancels() -> None:
    """Let a CancelledError escape."""
    raise asyncio.CancelledError
