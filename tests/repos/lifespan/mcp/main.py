"""Appends "start" and "stop" to the file named by LIFESPAN_LOG."""

import os
from contextlib import asynccontextmanager
from pathlib import Path

from fastmcp import FastMCP


def note(word):
    if log := os.environ.get("LIFESPAN_LOG"):
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{word}\n")


@asynccontextmanager
async def lifespan(server):
    note("start")
    yield {}
    note("stop")


mcp = FastMCP("lifespan", lifespan=lifespan)


@mcp.tool
def ready() -> bool:
    """Say that the server is up."""
    return True
