"""Format numbers, times, failures and contents for reports and messages."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any, NewType

import msgspec

from osmosis_ai.records import Failure, Score

__all__ = [
    "Shown",
    "content_text",
    "cost",
    "counted",
    "cut",
    "duration",
    "excerpt",
    "failure_line",
    "failure_text",
    "indented",
    "json_text",
    "score_number",
    "score_text",
    "visible",
    "visible_in_ci",
    "visible_json",
]

Shown = NewType("Shown", str)
"""A text that a terminal shows and never obeys. Only these are printed, and only the functions below make them."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_CI_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#\[)", re.MULTILINE)
"""Where GitHub's runner sees a workflow command: `::` at the start of a line, `##[` anywhere."""


def counted(number: int, noun: str) -> str:
    """Format a count: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(milliseconds: float) -> str:
    """Format a duration: `12.5 ms`, `1.2 s`, `2 min 5 s`, `1 h 2 min`; `–` for 0, which stands for an unknown one."""
    if not milliseconds:
        return "–"
    if milliseconds < 999.95:
        return f"{milliseconds:.1f} ms"
    seconds = milliseconds / 1000
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def iso_time(seconds: float) -> str:
    """Format seconds since the epoch in ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def cost(dollars: float) -> str:
    """Format a cost: `$0.0123`, `$1,234.50`."""
    return f"${dollars:.4f}" if dollars < 1 else f"${dollars:,.2f}"


def score_number(value: float | None, sign: str = "") -> str:
    """Format a score or a difference of scores: `0.750`, `1.00e+300`, `–` for none.

    `sign` is as in a format specification.
    """
    if value is None:
        return "–"
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(value, 3) + 0.0:{sign}.3f}" if abs(value) < 1e6 else f"{value:{sign}.2e}"


def excerpt(text: str, length: int) -> str:
    """Return a text's beginning on one line."""
    return cut(" ".join(text.split()), length)


def cut(text: str, length: int) -> str:
    """Return a text cut to `length` characters, with … if it was longer."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def failure_line(failure: Failure) -> str:
    """Format a failure in short: its origin and message."""
    return f"{failure.origin}: {failure.message}"


def failure_text(failure: Failure) -> str:
    """Format a failure in full: its origin, message and location, and the traceback if there is one."""
    where = f"\n  at {failure.file}" + (f":{failure.line}" if failure.line else "") if failure.file else ""
    detail = f"\n{indented(failure.detail.rstrip())}" if failure.detail else ""
    return f"{failure_line(failure)}{where}{detail}"


def score_text(score: Score) -> str:
    """Format a score with its explanation, or the reason why it is missing."""
    if score.failure is not None:
        return f"{score.function}: no score\n{indented(failure_text(score.failure))}"
    line = f"{score.function}: {score_number(score.value)}"
    return line if score.explanation is None else f"{line}\n{indented(score.explanation)}"


def content_text(content: Any) -> str:
    """Return a message's content, of any form, as text."""
    if content is None:
        return ""
    return content if isinstance(content, str) else json_text(content)


def json_text(value: Any) -> str:
    """Encode a value as JSON on one line."""
    return msgspec.json.encode(value).decode("utf-8")


def indented(text: str) -> str:
    """Indent every line of a text by two spaces."""
    return "\n".join(f"  {line}" for line in text.split("\n"))


def visible(text: str) -> Shown:
    """Escape the control characters that a terminal would obey, all but tab and newline."""
    text = text.replace("\r\n", "\n")
    return Shown(_CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text))


def visible_in_ci(text: str) -> Shown:
    """Escape also what a CI run would obey, such as `::error::` at the start of a line."""
    return Shown(_CI_COMMAND.sub(lambda match: f"{match[1] or ''}\\x{ord(match[0][-1]):02x}", visible(text)))


def visible_json(encoded: str) -> Shown:
    """Escape the control characters in encoded JSON, which stays the same JSON."""
    return Shown(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", encoded))
