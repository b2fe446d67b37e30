from fastmcp import FastMCP

mcp = FastMCP("runs at import")

mcp.run(transport="nonsense", show_banner=False)
