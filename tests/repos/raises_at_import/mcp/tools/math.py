from main import mcp


def register(function):
    return mcp.tool(function)


LIMIT = 10


# The name below exists nowhere.
@register
def add(a: int, b: int = DEFAULT) -> int:
    return a + b
