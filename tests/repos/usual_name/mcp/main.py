from fastmcp import FastMCP

helper = FastMCP("helper")
app = FastMCP("app")


@app.tool
def chosen() -> bool:
    """Say that this is the right server."""
    return True
