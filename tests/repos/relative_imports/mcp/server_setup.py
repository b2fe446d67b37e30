from fastmcp import FastMCP

mcp = FastMCP("relative imports")
