"""What a prompt offers for a tool's arguments: numbers, quoted strings, names, enum values, earlier results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .expressions import Number, word_set
from .parsing import NOT_NUMBERS, NUMBER_WORDS, parse_number

__all__ = ["QUOTED", "Evidence", "mask_quotes", "numbers_in", "quoted_in", "words_in"]

QUOTED = re.compile(
    r"\"([^\"\n]{1,2000})\"|“([^”\n]{1,2000})”|«([^»\n]{1,2000})»|`([^`\n]{1,2000})`|(?<!\w)'([^'\n]{1,2000})'(?!\w)"
)
_NUMBER = re.compile(
    r"(?<![\w.])[-−]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])|[0-9]+(?:\.[0-9]+)?)(?![0-9])|[A-Za-z]+"
)
_SPECIAL = {
    "date": (re.compile(r"\b\d{4}-\d\d-\d\d\b"), "2000-01-01"),
    "datetime": (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)?"), "2000-01-01T00:00:00Z"),
    "time": (re.compile(r"\b\d\d?:\d\d(?::\d\d)?\b"), "00:00:00"),
    "email": (re.compile(r"[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,32}){1,4}"), "user@example.com"),
    "url": (re.compile(r"https?://[^\s\"'<>)]{1,2000}"), "https://example.com"),
    "path": (
        re.compile(r"(?<![\w:/.~-])[\w.~-]{0,80}(?:/[\w.-]{1,80}){1,20}|(?<![\w-])[\w-]{1,80}\.[A-Za-z]\w{0,5}\b"),
        None,
    ),
    "uuid": (
        re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"),
        "00000000-0000-0000-0000-000000000000",
    ),
}
_SPECIAL_NAMES = {"uri": "url", "link": "url", "file": "path", "filename": "path", "filepath": "path", "day": "date"}
_MAX_CHOICES = 200
_OPEN_NAMES = word_set("query q search keyword keywords question prompt input text topic term message content")
_PRONOUNS = re.compile(r"\b(?:it|its|that|this|them|the (?:result|output|answer)|result)\b", re.IGNORECASE)
_OBJECT = re.compile(r"(?:\b(?:for|about|of|on|in|at|named|called|titled|into|from|to)\b|:)\s+([^.?!;\n]{1,200})")
_NAME = re.compile(r"(?<![.?!\n] )(?<![.?!\n])\b[^\W\d_a-z][\w'-]*(?:[ ](?:de|of|the|la)?[ ]?[^\W\d_a-z][\w'-]*){0,4}")


def words_in(text: str) -> list[str]:
    """Return the words of a text or identifier in lower case; snake_case and camelCase are split."""
    return re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower())


def quoted_in(text: str) -> list[str]:
    """Return the quoted strings of a text, in their order."""
    return [next(group for group in match.groups() if group is not None) for match in QUOTED.finditer(text)]


def mask_quotes(text: str) -> str:
    """Return a text of the same length in which quoted strings are blank."""
    return QUOTED.sub(lambda match: " " * len(match.group()), text)


def numbers_in(text: str) -> list[Number]:
    """Return the numbers of a text in their order; words up to ninety count, dates and what is quoted don't."""
    found: list[Number] = []
    for match in _NUMBER.finditer(NOT_NUMBERS.sub(" ; ", mask_quotes(text))):
        raw = match.group()
        number: Number | None = NUMBER_WORDS.get(raw.lower()) if raw[0].isalpha() else parse_number(raw)
        if number is not None:
            found.append(number)
    return found


class Evidence:
    """What one tool call can be filled from; numbers and quoted strings are used up as they are taken.

    Args:
        segment: The part of the prompt that speaks of this call.
        prompt: The whole prompt.
        previous: The text of the last tool result, if there is one.
        known: Named values from earlier results, such as a session id.
        attempt: 0 for the first guess; with 1 strings are the second best guess.
    """

    def __init__(
        self,
        segment: str,
        prompt: str,
        previous: str | None = None,
        known: dict[str, Any] | None = None,
        attempt: int = 0,
    ) -> None:
        self.segment = segment
        self.prompt = prompt
        self.previous = previous
        self.known = known or {}
        self.attempt = attempt
        self._numbers = numbers_in(segment)
        self._quoted = quoted_in(segment)
        self._masked = mask_quotes(segment)
        self._more_numbers = [] if self._numbers else numbers_in(prompt)
        self._more_quoted = [text for text in quoted_in(prompt) if text not in self._quoted]

    def number(self, name: str, accept: Callable[[Number], bool], *, explicit: bool = False) -> Number | None:
        """Take a number named by the parameter ("limit 5", "limit=5") or, unless `explicit`, the next that fits."""
        match = self._after_name(name, r"([-−]?[0-9][0-9,.]*)")
        if match is not None:
            value = parse_number(match.rstrip(".,"))
            if value is not None and accept(value):
                if value in self._numbers:
                    self._numbers.remove(value)
                return value
        if explicit:
            return None
        for pool in (self._numbers, self._more_numbers):
            for position, value in enumerate(pool):
                if accept(value):
                    return pool.pop(position)
        quoted = (parse_number(text) for text in [*self._quoted, *self._more_quoted])
        return next((value for value in quoted if value is not None and accept(value)), None)

    def names(self, name: str) -> bool:
        """Whether the segment gives a parameter's value right after its name."""
        return self._given(name) is not None or self._after_name(name, r"([-−]?[0-9])") is not None

    def all_numbers(self) -> list[Number]:
        """Take every number that is left in the segment, or in the prompt if the segment has none."""
        taken = self._numbers or self._more_numbers
        self._numbers, self._more_numbers = [], []
        return taken

    def all_strings(self) -> list[str]:
        """Take every quoted string, or else the items of a list after a colon."""
        taken = self._quoted or self._more_quoted
        self._quoted, self._more_quoted = [], []
        if taken:
            return taken
        match = re.search(r":\s*([^.?!\n]{1,1000})", self._masked) or _OBJECT.search(self._masked)
        items = re.split(r",\s*(?:and\s+)?|\s+and\s+", match.group(1)) if match else []
        return [item.strip() for item in items if item.strip()]

    def mentioned(self, values: list[Any]) -> list[Any]:
        """Return the enum values the segment names, in the order of their mention; words count, not parts of words."""
        found: list[tuple[int, Any]] = []
        for value in values[:_MAX_CHOICES]:
            if not isinstance(value, str) or not 0 < len(value) <= 100:
                continue
            spelled = r"[\s_-]?".join(re.escape(word) for word in re.split(r"[\s_-]+", value) if word)
            match = re.search(rf"(?<!\w){spelled}(?!\w)", self.segment, re.IGNORECASE) if spelled else None
            if match is not None:
                found.append((match.start(), value))
        found.sort(key=lambda item: item[0])
        return [value for _, value in found] or [value for value in self._numbers if value in values]

    def flag(self, name: str) -> bool | None:
        """Return what the segment says of a yes-or-no parameter, None if it says nothing."""
        words = [re.escape(word) for word in words_in(name) if len(word) > 2][:6]
        if not words:
            return None
        match = re.search(
            rf"\b(?:(no|not|without|disable|don't)\s+)?(?:{'|'.join(words)})\w{{0,4}}\b(?:\s*[=:]\s*(\w+))?",
            self._masked,
            re.IGNORECASE,
        )
        if match is None:
            return None
        return match.group(1) is None and (match.group(2) or "true").lower() not in {"false", "no", "off", "0"}

    def string(self, name: str, form: str, accept: Callable[[str], bool], *, explicit: bool = False) -> str | None:
        """Take a string for a parameter, the best guess first.

        Args:
            name: The parameter's name.
            form: Its JSON Schema `format`, or an empty string.
            accept: Whether a string fits.
            explicit: Only what the segment gives this parameter by its name or format.
        """
        found = [text for text in self._strings(name, form, explicit=explicit) if text and accept(text)]
        found = list(dict.fromkeys(found))
        if not found:
            return None
        chosen = found[min(self.attempt, len(found) - 1)]
        for pool in (self._quoted, self._more_quoted):
            if chosen in pool:
                pool.remove(chosen)
        return chosen

    def _strings(self, name: str, form: str, *, explicit: bool) -> list[str]:
        found: list[str] = []
        given = self._given(name)
        if given:
            found.append(given.strip("\"'`").rstrip(".?!") or given)
        special = self._special(name, form)
        if special is not None:
            found += special[0].findall(self.segment) or special[0].findall(self.prompt)
        if explicit:
            return found
        found += self._quoted
        if self.previous is not None and _PRONOUNS.search(self._masked):
            found.append(self.previous)
        names = [match.group() for match in _NAME.finditer(self._masked) if match.start() > 0]
        names = [text for text in names if not text[0].islower()]
        objects = [re.split(r",\s*\w+\s+\d", match.group(1))[0].strip() for match in _OBJECT.finditer(self._masked)]
        open_ended = bool(_OPEN_NAMES & set(words_in(name)))
        found += [*objects[:1], *names] if open_ended else [*names, *objects[-1:]]
        if self.previous is not None:
            found.append(self.previous)
        found += [*self._more_quoted, *objects, self.segment.strip()[:500], self.prompt.strip()[:500]]
        if special is not None and special[1] is not None and form:
            found.insert(len(special[0].findall(self.prompt)), special[1])
        return found

    def _given(self, name: str) -> str | None:
        bare = self._after_name(name, r"((?<=[=:\s])[^\s,;\"'`]+)", sign=True)
        return bare or self._after_name(name, r"(\"[^\"\n]{1,500}\"|'[^'\n]{1,500}'|`[^`\n]{1,500}`)")

    def _special(self, name: str, form: str) -> tuple[re.Pattern[str], str | None] | None:
        for word in [form.replace("-", ""), *reversed(words_in(name))]:
            special = _SPECIAL.get(_SPECIAL_NAMES.get(word, word))
            if special is not None:
                return special
        return None

    def _after_name(self, name: str, value: str, *, sign: bool = False) -> str | None:
        """Return what follows a parameter's name in the segment; with `sign` only after `=` or `:`."""
        words = [re.escape(word) for word in re.findall(r"[^\W_]+", name)][:6]
        if not words or len(name) > 60:
            return None
        spelled = r"[\s_-]?".join(words)
        joint = r"\s{0,2}[=:]\s{0,2}" if sign else r"\"?(?:\s{0,2}[=:]|\s{1,2}(?:is|of|to|as|at))?\s{0,2}"
        match = re.search(rf'(?<!\w){spelled}"?{joint}{value}', self.segment, re.IGNORECASE)
        return match.group(1) if match else None
