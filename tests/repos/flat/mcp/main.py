from fastmcp import FastMCP

mcp = FastMCP("flat")


@mcp.tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@mcp.tool
def shout(text: str) -> str:
    """Write a text in capitals."""
    return text.upper()


@mcp.tool
def where() -> dict[str, str]:
    """Say how this module was loaded."""
    import sys

    return {"name": __name__, "file": __file__, "argv": " ".join(sys.argv), "first": sys.path[0], "second": sys.path[1]}


if __name__ == "__main__":
    raise SystemExit("the main block must not run")
