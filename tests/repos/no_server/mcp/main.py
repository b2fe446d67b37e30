from fastmcp import FastMCP


def mcp():
    return FastMCP("made too late")


if __name__ == "__main__":
    server = mcp()
