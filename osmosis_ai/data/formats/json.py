"""Read a JSON list of objects one element at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from osmosis_ai.bounds import MAX_DEPTH
from osmosis_ai.data.formats.source import (
    BYTE_ORDER_MARK,
    CHUNK,
    MAX_ROW_BYTES,
    Item,
    Source,
    UnreadableError,
    decoded,
    too_deep,
    too_large,
)

__all__ = ["read"]


_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb'[^ \t\r\n,"\[\]{}]*')
# Skips text and strings without escapes, up to a bracket or a string with escapes. The repetition is bounded because
# the regex engine keeps state for each round.
_PLAIN = re.compile(rb'[^"\[\]{}]*(?:"[^"\\]*"[^"\[\]{}]*){0,500}')


def read(source: Source) -> Iterator[Item]:
    """Yield the elements of the list."""
    window = JsonWindow(source.file)
    start = window.peek()
    if start != b"[":
        raise UnreadableError(f"line {window.line}", _not_a_list(start))
    window.take(1)
    index = 0
    last = window.peek() == b"]"
    if last:
        window.take(1)
    while not last:
        window.peek()
        where = f"line {window.line}, row {index} (the first is 0)"
        element = window.element(where)
        yield Item(where, decoded(element), source.consumed)
        index += 1
        separator = window.peek()
        if separator not in (b",", b"]"):
            found = f"found {_shown(separator)}" if separator else "the file ends"
            raise UnreadableError(f"line {window.line}", f"a comma or ] is expected after row {index - 1}; {found}")
        window.take(1)
        last = separator == b"]"
    if window.peek():
        raise UnreadableError(f"line {window.line}", "there is more text after the end of the list")


def _not_a_list(start: bytes) -> str:
    kinds = {b"{": "an object", b'"': "a string", b"t": "a boolean", b"f": "a boolean", b"n": "null", b"": "nothing"}
    kind = kinds.get(start, "a number" if start in b"-0123456789" else f"text that begins with {_shown(start)}")
    hint = " (a file with one object per line is called .jsonl)" if start == b"{" else ""
    return f"{kind}, where a list of objects is expected{hint}"


def _shown(byte: bytes) -> str:
    return repr(byte.decode("ascii", "backslashreplace"))


class JsonWindow:
    """A moving window on a JSON list that finds the end of an element without decoding it. It reads each byte a bounded
    number of times."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = file.read(CHUNK).removeprefix(BYTE_ORDER_MARK)
        self._at = 0
        self.line = 1

    def peek(self) -> bytes:
        """Skip whitespace and return the next byte; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._data, self._at)
            assert space is not None
            self.take(space.end() - self._at)
            if self._at < len(self._data) or not self._more():
                return self._data[self._at : self._at + 1]

    def take(self, count: int) -> bytes:
        """Consume `count` bytes of the window."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        self.line += taken.count(b"\n")
        return taken

    def element(self, where: str) -> bytes:
        """Consume one element."""
        start = self.peek()
        if start in (b"{", b"[", b'"'):
            return self.take(self._closed(where))
        length = 0
        while True:
            scalar = _SCALAR.match(self._data, self._at + length)
            assert scalar is not None
            length = scalar.end() - self._at
            if self._at + length < len(self._data) or not self._grow(where):
                break
        if not length:
            found = f"found {_shown(start)}" if start else "the file ends"
            raise UnreadableError(f"line {self.line}", f"an object is expected; {found}")
        return self.take(length)

    def _closed(self, where: str) -> int:
        """Return the length of the string, list or object that begins here."""
        depth = 0
        length = 0
        while True:
            plain = _PLAIN.match(self._data, self._at + length)
            assert plain is not None
            # At depth 0, the next byte opens the element itself, and a string must not be skipped as part of it.
            length = plain.end() - self._at if depth else length
            if self._at + length == len(self._data):
                if not self._grow(where):
                    raise UnreadableError(where, "the file ends inside this row")
                continue
            byte = self._data[self._at + length]
            if byte == 0x22:
                length = self._string(length, where)
            else:
                length += 1
                depth += 1 if byte in b"{[" else -1
            if depth > MAX_DEPTH:
                raise UnreadableError(where, too_deep())
            if depth <= 0:
                return length
            if length > MAX_ROW_BYTES:
                raise UnreadableError(where, too_large())

    def _string(self, start: int, where: str) -> int:
        """Return the offset of the end of the string whose opening quote is `start` bytes from here."""
        at = start + 1
        while True:
            quote = self._data.find(b'"', self._at + at)
            if quote < 0:
                # Continue where the search ended: starting again would take quadratic time for a long string.
                at = len(self._data) - self._at
                if not self._grow(where):
                    raise UnreadableError(where, "the file ends inside a string of this row")
                continue
            # A quote is escaped if an odd number of backslashes precedes it.
            before = quote
            while self._data[before - 1] == 0x5C:
                before -= 1
            at = quote - self._at + 1
            if (quote - before) % 2 == 0:
                return at

    def _grow(self, where: str) -> bool:
        if len(self._data) - self._at > MAX_ROW_BYTES:
            raise UnreadableError(where, too_large())
        return self._more()

    def _more(self) -> bool:
        """Drop consumed bytes and read more. Doubling the window keeps the total copying linear."""
        rest = self._data[self._at :]
        chunk = self._file.read(max(CHUNK, len(rest)))
        self._data = rest + chunk
        self._at = 0
        return bool(chunk)
