"""Arithmetic expressions: what they are, what they are called, and what they come to."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

__all__ = [
    "SYMBOLS",
    "Apply",
    "Node",
    "Number",
    "compute",
    "count_operations",
    "finite",
    "format_number",
    "operation_named",
    "operations_in",
    "to_text",
    "whole",
    "word_set",
]

Number: TypeAlias = int | float


@dataclass(frozen=True)
class Apply:
    """One operation on its operands; `add`, `multiply`, `mean`, `max`, `min`, `gcd` and `lcm` take two or more."""

    operation: str
    operands: tuple[Node, ...]


Node: TypeAlias = int | float | Apply


def word_set(words: str) -> frozenset[str]:
    """Return the words of a text that is written as a list of them."""
    return frozenset(words.split())


SYMBOLS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "modulo": "%",
    "power": "**",
}

# The words that name an operation in a tool's name, its description, an enum value or a prompt.
WORDS: dict[str, frozenset[str]] = {
    "add": word_set("add adds adding added adder addition sum sums summing summation plus total"),
    "subtract": word_set("subtract subtracts subtracting subtraction sub minus difference subtractor"),
    "multiply": word_set("multiply multiplies multiplying multiplication mul mult times product multiplier"),
    "divide": word_set("divide divides dividing division div quotient divided divider"),
    "floor_divide": word_set("floordiv floordivide intdiv"),
    "modulo": word_set("modulo modulus mod remainder rem"),
    "power": word_set("power pow powers exponent exponentiate exponentiation raise raises raised"),
    "sqrt": word_set("sqrt squareroot"),
    "factorial": word_set("factorial factorials"),
    "absolute": word_set("abs absolute"),
    "negate": word_set("negate negates negation neg"),
    "mean": word_set("mean average averages avg"),
    "max": word_set("max maximum largest"),
    "min": word_set("min minimum smallest"),
    "gcd": word_set("gcd hcf"),
    "lcm": word_set("lcm"),
}

_BY_WORD = {word: operation for operation, words in WORDS.items() for word in words}
_BY_SYMBOL = {
    "+": "add",
    "-": "subtract",
    "−": "subtract",
    "*": "multiply",
    "×": "multiply",
    "x": "multiply",
    "/": "divide",
    "÷": "divide",
    "//": "floor_divide",
    "%": "modulo",
    "^": "power",
    "**": "power",
}

# Names of two and more words go first: "square root" is no square, "integer division" no division.
_COMPOUND = (
    (re.compile(r"\b(?:floor|integer|int|whole) (?:div|divide|divides|division|quotient)\b"), "floor_divide"),
    (re.compile(r"\bsquare root\b"), "sqrt"),
    (re.compile(r"\b(?:greatest|highest) common (?:divisor|factor)\b"), "gcd"),
    (re.compile(r"\bleast common multiple\b"), "lcm"),
    (re.compile(r"\babsolute (?:value|difference)\b"), "absolute"),
    (re.compile(r"\bto the power\b"), "power"),
)
_INFIX = re.compile(r"(?<!\w)[a-z_]\w{0,15} ?(\*\*|//|[-+*/%^×÷]) ?[a-z_]\w{0,15}(?!\w)", re.IGNORECASE)

_FLOAT_BITS = 1000  # what still converts to a float
_LARGEST_FACTORIAL = 170
_LARGEST_EXPONENT = 1000


def operations_in(text: str) -> list[str]:
    """Return the different operations a text speaks of, in the order of their first mention.

    Words count first; a formula such as `a + b` only counts in a text without such words.
    """
    lowered = text.lower()
    spaced = " ".join(re.findall(r"[a-z]+", lowered))
    found: list[tuple[int, str]] = []
    for pattern, operation in _COMPOUND:
        for match in pattern.finditer(spaced):
            found.append((match.start(), operation))
        spaced = pattern.sub(lambda match: "." * len(match.group()), spaced)
    for match in re.finditer(r"[a-z]+", spaced):
        if match.group() in _BY_WORD:
            found.append((match.start(), _BY_WORD[match.group()]))
    if not found:
        found = [(match.start(), _BY_SYMBOL[match.group(1)]) for match in _INFIX.finditer(lowered)]
    return list(dict.fromkeys(operation for _, operation in sorted(found)))


def operation_named(name: str) -> str | None:
    """Return the one operation that a short name or symbol such as `ADD`, `plus` or `*` stands for, or None."""
    stripped = name.strip().lower()
    if stripped in _BY_SYMBOL:
        return _BY_SYMBOL[stripped]
    found = operations_in(re.sub(r"[^a-z]+", " ", stripped))
    return found[0] if len(found) == 1 else None


def finite(value: object) -> TypeGuard[Number]:
    """Whether a value is a number that can be computed with: no bool, NaN or infinity, nothing a float can't hold."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return value.bit_length() <= _FLOAT_BITS
    return isinstance(value, float) and math.isfinite(value)


def whole(value: Number) -> Number:
    """Return a whole float as an int, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def count_operations(node: Node) -> int:
    """Return how many two-operand steps an expression has."""
    if not isinstance(node, Apply):
        return 0
    return max(1, len(node.operands) - 1) + sum(count_operations(operand) for operand in node.operands)


def compute(operation: str, values: Sequence[Number]) -> Number | None:
    """Return what an operation comes to, or None where it has no finite value."""
    try:
        result = _compute(operation, values)
    except (ArithmeticError, ValueError):
        return None
    return whole(result) if result is not None and finite(result) else None


def _compute(operation: str, values: Sequence[Number]) -> Number | None:
    first, *rest = values
    if operation == "add":
        return sum(values)
    if operation == "multiply":
        return math.prod(values)
    if operation == "mean":
        return sum(values) / len(values)
    if operation == "max":
        return max(values)
    if operation == "min":
        return min(values)
    if operation in ("gcd", "lcm"):
        whole_values = [whole(value) for value in values]
        integers = [value for value in whole_values if isinstance(value, int)]
        if len(integers) < len(values):
            return None
        return math.gcd(*integers) if operation == "gcd" else math.lcm(*integers)
    if operation == "negate":
        return -first
    if operation == "absolute":
        return abs(first)
    if operation == "sqrt":
        return math.sqrt(first)
    if operation == "factorial":
        number = whole(first)
        return math.factorial(number) if isinstance(number, int) and 0 <= number <= _LARGEST_FACTORIAL else None
    return _compute_pair(operation, first, rest[0]) if len(rest) == 1 else None


def _compute_pair(operation: str, left: Number, right: Number) -> Number | None:
    if operation == "subtract":
        return left - right
    if operation == "divide":
        exact = isinstance(left, int) and isinstance(right, int) and right and left % right == 0
        return left // right if exact else left / right
    if operation == "floor_divide":
        return left // right
    if operation == "modulo":
        return left % right
    if operation == "power":
        left, right = whole(left), whole(right)
        if abs(right) > _LARGEST_EXPONENT:
            return None
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _FLOAT_BITS:
            return None
        result = left**right
        return result if isinstance(result, int | float) else None
    return None


def to_text(node: Node, power: str = "**") -> str:
    """Write an expression out in plain characters, with the parentheses it needs and `power` for exponents."""
    if not isinstance(node, Apply):
        return format_number(node)
    operands = [to_text(operand, power) for operand in node.operands]
    symbol = power if node.operation == "power" else SYMBOLS.get(node.operation)
    if symbol is None:
        if node.operation == "mean":
            return f"(({' + '.join(operands)}) / {len(operands)})"
        if node.operation == "negate":
            return f"-({operands[0]})"
        return f"{'abs' if node.operation == 'absolute' else node.operation}({', '.join(operands)})"
    parts = []
    for position, (operand, text) in enumerate(zip(node.operands, operands, strict=True)):
        bare = isinstance(operand, Apply) and operand.operation not in SYMBOLS
        positive = not isinstance(operand, Apply) and operand >= 0
        looser = isinstance(operand, Apply) and _binds(operand, node, first=position == 0)
        negative_first = not isinstance(operand, Apply) and position == 0 and node.operation != "power"
        parts.append(text if bare or positive or looser or negative_first else f"({text})")
    return f" {symbol} ".join(parts)


_PRECEDENCE = {"add": 1, "subtract": 1, "multiply": 2, "divide": 2, "floor_divide": 2, "modulo": 2, "power": 3}


def _binds(inner: Apply, outer: Apply, *, first: bool) -> bool:
    """Whether an operand keeps its meaning without parentheses."""
    if inner.operation not in _PRECEDENCE:
        return True
    inside, outside = _PRECEDENCE[inner.operation], _PRECEDENCE[outer.operation]
    return inside > outside or (inside == outside and first and outer.operation != "power")


def format_number(value: Number, decimals: int | None = None) -> str:
    """Write a number as people do: whole ones without `.0`, others without the noise of binary floats.

    Args:
        value: A finite number.
        decimals: Digits after the point, if so many were asked for.
    """
    if decimals is not None and abs(value) < 10**15:
        return f"{value:.{decimals}f}"
    value = whole(value)
    if isinstance(value, int):
        return str(value)
    if not 1e-9 < abs(value) < 1e15:
        return f"{value:.12g}"
    places = max(0, 11 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}".rstrip("0").rstrip(".")
