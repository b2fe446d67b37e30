"""Parse a judge's reply into a score and an explanation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Judgement", "UnusableReplyError", "finite_number", "parse_judgement"]

MAX_CHARACTERS = 200_000
MAX_OBJECTS = 500
"""Braces to try: each one that opens no JSON may cost a scan of the whole rest."""
# Some models write their thoughts before the actual reply.
THOUGHTS = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
# float() would also take "nan", "infinity" and "1_0".
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


class Judgement(NamedTuple):
    """A judge's decision; the score is finite and not yet clamped."""

    score: float
    explanation: str


class UnusableReplyError(Exception):
    """The reply contains no judgement; the message tells the judge why."""


def parse_judgement(reply: str) -> Judgement:
    """Read `{"score": number, "explanation": string}` from a judge's reply.

    The object may be in a code fence or in prose, and the number may be a string.

    Raises:
        UnusableReplyError: There is no such object, several differ, or the score isn't a finite number.
    """
    if thoughts := THOUGHTS.match(reply):
        reply = reply[thoughts.end() :]
    if not reply.strip():
        raise UnusableReplyError("it was empty")
    found = list(_objects(reply[:MAX_CHARACTERS]))
    if not found:
        raise UnusableReplyError('it holds no JSON object with a "score"')
    # The judge may have quoted an object out of the solution, so choosing one would let a solution score itself.
    if any(other != found[0] for other in found):
        raise UnusableReplyError(f'it holds {len(found)} different JSON objects with a "score"')
    score, explanation = found[0]["score"], found[0].get("explanation")
    if isinstance(score, str) and NUMBER.fullmatch(score.strip()):
        score = float(score)
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise UnusableReplyError(f'its "score" is {json.dumps(score)[:60]}, which is not a number')
    number = finite_number(score)
    if number is None:
        raise UnusableReplyError('its "score" is not a finite number')
    if not isinstance(explanation, str):
        raise UnusableReplyError('it has no "explanation" that is a string')
    return Judgement(number, explanation.strip())


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects that have a score."""
    decoder = json.JSONDecoder()
    position = 0
    for _ in range(MAX_OBJECTS):
        position = text.find("{", position)
        if position < 0:
            return
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position += 1
            continue
        if "score" in value:
            yield value
            position = end
        else:
            position += 1


def finite_number(value: Any) -> float | None:
    """Return the value as a float; None if it isn't a number (or is a boolean), isn't finite, or overflows a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
