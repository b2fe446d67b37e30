from fastmcp import FastMCP

mcp = FastMCP("calculator")
