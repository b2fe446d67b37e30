from fastmcp import FastMCP

numbers = FastMCP("numbers")
words = FastMCP("words")


@numbers.tool
def one() -> int:
    """Give 1."""
    return 1


@words.tool
def word() -> str:
    """Give a word."""
    return "one"


def build():
    return FastMCP("never called")
