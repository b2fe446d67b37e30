from fastmcp import FastMCP

mcp = FastMCP("raises at import")

import tools.math
