"""Arithmetic found in a text: symbols (`3 × (4 - 1)`) and plain phrases (`the sum of 3 and 4`, `then divide it by 2`).

A tokenizer and a precedence parser of their own; nothing is ever evaluated as code. Length, number of tokens, depth and
number of operations are bounded, so that no prompt takes long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .expressions import Apply, Node, Number, count_operations, finite, word_set

__all__ = ["NOT_NUMBERS", "NUMBER_WORDS", "find_expression", "parse_number"]

_MAX_TOKENS = 2000
_MAX_DEPTH = 40
_MAX_OPERATIONS = 64
_MAX_DIGITS = 40

_UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_TEENS = ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NUMBER_WORDS: dict[str, int] = {word: value for value, word in enumerate([*_UNITS, *_TEENS])}
NUMBER_WORDS |= {word: 10 * value for value, word in enumerate(_TENS, start=2)}

# Dates, times, versions and telephone numbers look like arithmetic and aren't.
# So does a list whose items begin with a dash.
NOT_NUMBERS = re.compile(
    r"\n\s{0,8}[-*•]\s|\b\d{4}-\d\d?-\d\d?\b|\b\d\d?/\d\d?/\d{2,4}\b|\b\d+(?:\.\d+){2,}\b|\b\d\d?:\d\d(?::\d\d)?\b|\b\d{3}-\d{3}-\d{4}\b"
)
_TOKEN = re.compile(
    r"""
    (?P<skip>[\s$€£`_\\]+)
  | (?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+(?![\w]))?|\.[0-9]+)
  | (?P<cross>(?<![A-Za-z])[xX](?=\s*-?[0-9(.]))
  | (?P<wordop>(?:multiplied\s{1,3}by|times|divided\s{1,3}by|plus|minus|modulo|mod|cdot|div
      |(?:raised\s{1,3})?to\s{1,3}the\s{1,3}power(?:\s{1,3}of)?)(?![A-Za-z]))
  | (?P<postfix>²|³|!(?!=)|(?:squared|cubed)(?![A-Za-z]))
  | (?P<percent>%|percent(?![A-Za-z]))
  | (?P<symbol>\*\*|//|[-+*/^−–×✕÷·∙∕])
  | (?P<open>[(\[])
  | (?P<close>[)\]])
  | (?P<root>√|square\s{1,3}root(?![A-Za-z]))
  | (?P<word>[^\W\d_][\w']*)
  | (?P<comma>,)
  | (?P<stop>.)
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)

_OPERATORS = {
    "+": "add", "plus": "add",
    "-": "subtract", "−": "subtract", "–": "subtract", "minus": "subtract",
    "*": "multiply", "×": "multiply", "✕": "multiply", "·": "multiply", "∙": "multiply", "x": "multiply",
    "times": "multiply", "cdot": "multiply", "multiplied by": "multiply",
    "/": "divide", "÷": "divide", "∕": "divide", "div": "divide", "divided by": "divide",
    "//": "floor_divide", "%": "modulo", "mod": "modulo", "modulo": "modulo",
    "^": "power", "**": "power",
}  # fmt: skip
_PRECEDENCE = {"add": 1, "subtract": 1, "multiply": 2, "divide": 2, "floor_divide": 2, "modulo": 2}
_POWER = 3
_POSTFIX = {"²": 2, "squared": 2, "³": 3, "cubed": 3}

# "the sum of 3 and 4", "max(3, 4)": the operation, and how many operands it takes.
_NAMED = {
    "sum": ("add", None), "total": ("add", None), "product": ("multiply", None), "average": ("mean", None),
    "mean": ("mean", None), "max": ("max", None), "maximum": ("max", None), "largest": ("max", None),
    "min": ("min", None), "minimum": ("min", None), "smallest": ("min", None), "gcd": ("gcd", None),
    "lcm": ("lcm", None), "difference": ("subtract", 2), "quotient": ("divide", 2), "remainder": ("modulo", 2),
    "pow": ("power", 2), "sqrt": ("sqrt", 1), "abs": ("absolute", 1), "factorial": ("factorial", 1),
}  # fmt: skip
_SCALED = {"double": 2, "twice": 2, "triple": 3}
_VERBS = {
    "add": ("add", {"to", "and", "with", ","}),
    "subtract": ("subtract", {"from"}),
    "multiply": ("multiply", {"by", "and", "with"}),
    "divide": ("divide", {"by"}),
    "raise": ("power", {"to"}),
    "increase": ("add", {"by"}),
    "decrease": ("subtract", {"by"}),
    "reduce": ("subtract", {"by"}),
}
_FILLERS = word_set("the a an of number numbers value values between when integer integers")
_LINKS = word_set("and then next finally after afterwards that now , .")
_PREVIOUS = word_set("it result that this answer sum total product difference quotient outcome")


class _NotArithmeticError(ValueError):
    """What follows isn't arithmetic; the parser goes back and tries elsewhere."""


class _TooLongError(ValueError):
    """An expression with more operations than anyone would work through."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    value: Number = 0


def parse_number(text: str) -> Number | None:
    """Return the number a numeral stands for (thousands separators allowed), or None if it isn't one."""
    plain = text.replace(",", "").strip()
    if not re.fullmatch(r"[-+−]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", plain):
        return None
    if len(plain) > _MAX_DIGITS:
        return None
    plain = plain.replace("−", "-")
    value: Number = float(plain) if re.search(r"[.eE]", plain) else int(plain)
    return value if finite(value) else None


def find_expression(text: str) -> Node | None:
    """Return the arithmetic in a text that has the most operations (the first of equals), or None.

    Args:
        text: A prompt; the caller cuts it to a sensible length.
    """
    tokens = _tokenize(NOT_NUMBERS.sub(" ; ", text))
    best: tuple[int, Node] | None = None
    position = 0
    while position < len(tokens):
        parser = _Parser(tokens, position)
        try:
            node = parser.statement()
        except _NotArithmeticError:
            position += 1
            continue
        except _TooLongError:
            while position < len(tokens) and tokens[position].kind not in {"stop", "word"}:
                position += 1
            position += 1
            continue
        operations = count_operations(node)
        if operations > (best[0] if best else 0):
            best = (operations, node)
        position = max(parser.position, position + 1)
    return best[1] if best else None


def _tokenize(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text):
        kind, raw = match.lastgroup or "stop", match.group()
        if kind == "skip":
            continue
        lowered = " ".join(raw.lower().split())
        value: Number = 0
        if kind == "number":
            number = parse_number(raw)
            kind, value = ("stop", 0) if number is None else ("number", number)
        elif kind == "word" and lowered in NUMBER_WORDS:
            kind, value = "number", NUMBER_WORDS[lowered]
            joined = tokens[-2:] if tokens and tokens[-1].text == "-" else tokens[-1:]
            # "twenty-five" and "twenty five" are one number.
            if value < 10 and joined and joined[0].text in _TENS:
                value += joined[0].value
                del tokens[-len(joined) :]
        elif kind == "wordop" and "power" in lowered:
            lowered = "**"
        elif kind == "cross":
            kind = "symbol"
        tokens.append(_Token(kind, lowered, match.start(), value))
        if len(tokens) == _MAX_TOKENS:
            break
    return tokens


class _Parser:
    """A recursive parser from one position of the tokens on. Every method raises if its construct isn't there."""

    def __init__(self, tokens: list[_Token], position: int) -> None:
        self.tokens = tokens
        self.position = position
        self.operations = 0

    def statement(self) -> Node:
        """An expression, and the sentences that go on with its result ("then multiply it by 3")."""
        node = self._verb(None) if self._text() in _VERBS else self._binary(0, 0, words=True)
        while True:
            start = self.position
            if not isinstance(node, Apply):
                return node
            while self._text() in _LINKS:
                self.position += 1
            try:
                if self._text() not in _VERBS:
                    raise _NotArithmeticError
                node = self._verb(node)
            except _NotArithmeticError:
                self.position = start
                return node

    def _verb(self, previous: Node | None) -> Node:
        operation, links = _VERBS[self._text()]
        word = self._text()
        self.position += 1
        first = previous if previous is not None and self._text() in links else self._operand(previous)
        if self._text() not in links:
            if previous is None or first is previous:
                raise _NotArithmeticError
            return self._apply(operation, [previous, first])  # "then add 3"
        operands = [first]
        while self._text() in links or (operation == "add" and len(operands) > 1 and self._text() in {"and", ","}):
            start = self.position
            while self._text() in {*links, "and", ",", "power"}:
                self.position += 1
            try:
                operands.append(self._operand(previous))
            except _NotArithmeticError:
                self.position = start
                break
            if operation != "add" and operation != "multiply":
                break
        if len(operands) < 2:
            if previous is None or first is previous:
                raise _NotArithmeticError
            return self._apply(operation, [previous, first])
        if word == "subtract":
            operands.reverse()
        return self._apply(operation, operands)

    def _operand(self, previous: Node | None) -> Node:
        self._fill()
        if previous is not None and self._text() in _PREVIOUS:
            following = self.tokens[self.position + 1].text if self.position + 1 < len(self.tokens) else ""
            if following not in {"of", "("}:
                self.position += 1
                return previous
        return self._binary(0, 0, words=False)

    def _binary(self, minimum: int, depth: int, *, words: bool) -> Node:
        left = self._unary(depth, words=words)
        while True:
            start = self.position
            operation = self._operator(words=words)
            level = _POWER if operation == "power" else _PRECEDENCE.get(operation, 0)
            if level == 0 or level < minimum:
                self.position = start
                return left
            try:
                # A power groups to the right, the others to the left.
                right = self._binary(level if operation == "power" else level + 1, depth + 1, words=words)
            except _NotArithmeticError:
                self.position = start
                return left
            left = self._apply(operation, [left, right])

    def _operator(self, *, words: bool) -> str:
        token = self._token()
        if token is None:
            return ""
        self.position += 1
        if token.kind == "percent" and token.text == "%":
            return "modulo" if self._starts_operand() else ""
        if token.kind == "symbol" or (token.kind == "wordop" and words):
            return _OPERATORS.get(token.text, "")
        if token.kind == "open":  # "2(3 + 4)"
            before = self.tokens[self.position - 2]
            touching = before.start + len(before.text) == token.start
            self.position -= 1
            return "multiply" if touching and before.kind in {"number", "close"} else ""
        return ""

    def _starts_operand(self) -> bool:
        """Whether a number or a parenthesis follows, with its sign close to it: "15% - 3" is a percentage."""
        ahead = self.tokens[self.position : self.position + 2]
        if len(ahead) == 2 and ahead[0].text in {"-", "−"} and ahead[0].start + 1 == ahead[1].start:
            del ahead[0]
        return bool(ahead) and ahead[0].kind in {"number", "open"}

    def _unary(self, depth: int, *, words: bool) -> Node:
        if depth > _MAX_DEPTH:
            raise _NotArithmeticError
        negative, start = False, self.position
        while self.position - start < _MAX_DEPTH and self._text() in {"-", "−", "+", "minus", "negative"}:
            negative ^= self._text() != "+"
            self.position += 1
        if not negative:
            return self._postfix(depth, words=words)
        operand = self._binary(_POWER, depth + 1, words=words)  # -2^2 is -(2^2)
        return Apply("negate", (operand,)) if isinstance(operand, Apply) else -operand

    def _postfix(self, depth: int, *, words: bool) -> Node:
        node = self._atom(depth, words=words)
        for _ in range(_MAX_DEPTH):
            token = self._token()
            if token is None or token.kind not in {"postfix", "percent"}:
                break
            if token.kind == "percent":
                following = self.tokens[self.position + 1 : self.position + 2]
                if not following or following[0].text != "of":
                    break
                self.position += 2
                part = [node, self._unary(depth + 1, words=words)]
                return self._apply("divide", [self._apply("multiply", part), 100])
            if token.text == "!":
                after = self.tokens[self.position + 1 : self.position + 2]
                if after and after[0].kind not in {"symbol", "wordop", "close", "comma", "stop"}:
                    break  # the end of a sentence
            self.position += 1
            exponent = _POSTFIX.get(token.text)
            node = self._apply("factorial", [node]) if exponent is None else self._apply("power", [node, exponent])
        return node

    def _atom(self, depth: int, *, words: bool) -> Node:
        if depth > _MAX_DEPTH:
            raise _NotArithmeticError
        if self._text() in {"the", "a", "an"}:
            self.position += 1
        token = self._token()
        if token is None:
            raise _NotArithmeticError
        self.position += 1
        if token.kind == "number":
            return token.value
        if token.kind == "open":
            node = self._binary(0, depth + 1, words=True)
            self._close()
            return node
        if token.kind == "root":
            return self._apply("sqrt", self._operands(depth, 1))
        if token.text in _SCALED:
            return self._apply("multiply", [_SCALED[token.text], *self._operands(depth, 1)])
        if token.text == "half":
            return self._apply("divide", [*self._operands(depth, 1), 2])
        if token.text in _NAMED:
            operation, arity = _NAMED[token.text]
            operands = self._operands(depth, arity)
            if len(operands) != arity and (arity is not None or len(operands) < 2):
                raise _NotArithmeticError
            return self._apply(operation, operands)
        raise _NotArithmeticError

    def _operands(self, depth: int, arity: int | None) -> list[Node]:
        """What a named operation applies to: `of 3, 4 and 5`, `(3, 4)`, `[3, 4]`, `when 17 is divided by 5`."""
        phrase = self._fill()
        token = self._token()
        # "the sum of (3 + 4) and 5" opens a parenthesis of its own, "sum(3, 4)" one around its operands.
        enclosed = token is not None and token.kind == "open" and (not phrase or token.text == "[")
        nested = 0
        while enclosed and nested < 2 and self._kind() == "open" and (nested == 0 or self._text() == "["):
            self.position += 1
            nested += 1
        operands: list[Node] = []
        while arity is None or len(operands) < arity:
            start = self.position
            if operands:
                if self._text() == "is":
                    self.position += 1
                if self._text() not in {",", "and", "divided by", "to"}:
                    self.position = start
                    break
                self.position += 1
                if self._text() == "and":
                    self.position += 1
            try:
                self._fill()
                operands.append(self._binary(0, depth + 1, words=enclosed))
            except _NotArithmeticError:
                self.position = start
                if not operands:
                    raise
                break
        for _ in range(nested):
            self._close()
        return operands

    def _fill(self) -> bool:
        start = self.position
        while self._text() in _FILLERS:
            self.position += 1
        return self.position > start

    def _close(self) -> None:
        if self._kind() != "close":
            raise _NotArithmeticError
        self.position += 1

    def _token(self) -> _Token | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def _text(self) -> str:
        token = self._token()
        return token.text if token is not None else ""

    def _kind(self) -> str:
        token = self._token()
        return token.kind if token is not None else ""

    def _apply(self, operation: str, operands: list[Node]) -> Node:
        """Build an operation; the sum of a sum and a number becomes one sum, so that its parts can run side by side."""
        self.operations += 1
        if self.operations > _MAX_OPERATIONS:
            raise _TooLongError
        first = operands[0]
        if operation in {"add", "multiply"} and isinstance(first, Apply) and first.operation == operation:
            operands = [*first.operands, *operands[1:]]
        return Apply(operation, tuple(operands))
