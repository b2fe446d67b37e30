from fastmcp import FastMCP

calculator = FastMCP("elsewhere")
