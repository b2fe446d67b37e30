"""One tool per operation, so that a rollout shows every step of a calculation."""

from typing import Annotated

from pydantic import Field
from server import mcp


@mcp.tool()
def add(
    a: Annotated[float, Field(description="The first number")],
    b: Annotated[float, Field(description="The second number")],
) -> float:
    """Add two numbers and return their sum."""
    return a + b


@mcp.tool()
def subtract(
    a: Annotated[float, Field(description="The number to subtract from")],
    b: Annotated[float, Field(description="The number to subtract")],
) -> float:
    """Subtract b from a and return the difference."""
    return a - b


@mcp.tool()
def multiply(
    a: Annotated[float, Field(description="The first factor")],
    b: Annotated[float, Field(description="The second factor")],
) -> float:
    """Multiply two numbers and return their product."""
    return a * b


@mcp.tool()
def divide(
    a: Annotated[float, Field(description="The dividend")],
    b: Annotated[float, Field(description="The divisor; not zero")],
) -> float:
    """Divide a by b and return the quotient."""
    if b == 0:
        raise ValueError("the divisor must not be zero")
    return a / b


@mcp.tool()
def modulo(
    a: Annotated[int, Field(description="The dividend")],
    b: Annotated[int, Field(description="The divisor", ge=1)],
) -> int:
    """Return the remainder of a divided by b."""
    return a % b


@mcp.tool()
def power(
    base: Annotated[float, Field(description="The number to raise")],
    exponent: Annotated[int, Field(description="How often the base is multiplied with itself", ge=0, le=20)],
) -> float:
    """Raise a number to a whole power."""
    return base**exponent
