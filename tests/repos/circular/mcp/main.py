from fastmcp import FastMCP

mcp = FastMCP("circular")

import tools.registered
