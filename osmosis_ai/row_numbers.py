"""Row numbers as typed: `3,7,10-20`."""

from __future__ import annotations

import re
from bisect import bisect_right

__all__ = ["RowNumbers", "read_row_numbers"]

PART = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")


class RowNumbers:
    """A set of row numbers, from 0, in ranges that don't touch each other. Raises ValueError if the text isn't one."""

    def __init__(self, text: str) -> None:
        bounds = sorted(map(_bounds, text.split(",")))
        self.ranges: list[range] = []
        for first, last in bounds:
            if self.ranges and first <= self.ranges[-1].stop:
                self.ranges[-1] = range(self.ranges[-1].start, max(self.ranges[-1].stop, last + 1))
            else:
                self.ranges.append(range(first, last + 1))
        self._starts = [each.start for each in self.ranges]

    @property
    def end(self) -> int:
        """The number after the last one."""
        return self.ranges[-1].stop

    def place(self, number: int) -> int:
        """Return the place of one of these numbers in their order, from 0."""
        return sum(min(len(each), max(0, number - each.start)) for each in self.ranges)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number in self.ranges[place]

    def __str__(self) -> str:
        """Return the shortest text for these numbers."""
        return ",".join(str(each.start) if len(each) == 1 else f"{each.start}-{each.stop - 1}" for each in self.ranges)


def read_row_numbers(text: str) -> str:
    """Return the shortest text for the same row numbers; raise ValueError with what to write instead."""
    return str(RowNumbers(text))


def _bounds(part: str) -> tuple[int, int]:
    match = PART.fullmatch(part.strip())
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise ValueError("write row numbers and ranges of them, such as 3,7,10-20")
    return int(match[1]), int(match[2] or match[1])
