from fastmcp import FastMCP

mcp = FastMCP("packages")
