"""A guess at a word problem's expression, from cue words only. Nothing is understood: a stand-in's modest attempt."""

from __future__ import annotations

import re

from .evidence import numbers_in, words_in
from .expressions import Apply, Node, word_set

__all__ = ["guess_expression"]

_ASKS = re.compile(r"\bhow (?:many|much|far|long|old|tall)\b|\bwhat is the\b|\bfind the\b|\bcalculate\b", re.IGNORECASE)
_LARGEST = 4
# In the order they are tried: what divides or repeats says so more clearly than what comes or goes.
_CUES = (
    (
        "divide",
        word_set("split splits share shared shares equally evenly divide divides divided apiece among"),
    ),
    ("multiply", word_set("each per every times rows row boxes dozen")),
    (
        "subtract",
        word_set(
            """left remain remains remaining gave gives give lost loses spent spends fewer less sold sells ate eats
            eaten used away change difference broke took dropped"""
        ),
    ),
    ("add", word_set("total altogether more combined both buys bought receives found together sum gets")),
)


def guess_expression(prompt: str) -> Node | None:
    """Return one operation on all the numbers of a question, or None if nothing points to one."""
    numbers = numbers_in(prompt)
    if not 2 <= len(numbers) <= _LARGEST or _ASKS.search(prompt) is None:
        return None
    words = set(words_in(prompt))
    operation = next((operation for operation, cues in _CUES if cues & words), None)
    if operation is None:
        return None
    if operation in {"add", "multiply"}:
        return Apply(operation, tuple(numbers))
    node: Node = numbers[0]
    for number in numbers[1:]:
        node = Apply(operation, (node, number))
    return node
