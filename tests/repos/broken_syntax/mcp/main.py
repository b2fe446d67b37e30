from fastmcp import FastMCP

import tools.broken

mcp = FastMCP("broken syntax")
