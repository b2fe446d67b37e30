from contextlib import asynccontextmanager

from fastmcp import FastMCP


@asynccontextmanager
async def lifespan(server):
    raise ConnectionError("the database is down")
    yield


mcp = FastMCP("lifespan fails", lifespan=lifespan)
