"""Lay out tables for a terminal's width without ever cutting a figure.

Where space is short, names give way first: functions lose the module that all of them share, then every name its
middle; texts wrap. If that isn't enough, each row becomes a block of its own. Without a width, as in a pipe, every row
is one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile, zip_longest
from typing import Literal, NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.text import Text

from osmosis_ai.text import Shown

__all__ = ["Cell", "Column", "Table"]

GAP = "  "
MAX_LINES = 3
"""Lines of a text that wraps; the rest is cut."""

Kind: TypeAlias = Literal["figure", "score", "label", "function", "name", "list", "text"]
"""How a column is aligned and shrinks. Figures (right-aligned) and labels never shrink; scores shrink their heading, a
function name, but not their cells. Functions and names are cut, lists wrap after a comma, texts wrap at a space."""

_LEAST = {"function": 16, "name": 12, "list": 24, "text": 24}
"""Minimum width by kind of column; other kinds never shrink."""
MIN_HEADING = 8
"""Least width of a score's heading, if its figures need less."""

_BREAKS = re.compile(r"\s*[\n\t]\s*")
"""A line break or a tab in a cell would break the grid."""
_SHARES = (0.5, 0.25, 0.75, 0.0)
"""Shares of a cut name given to its start, tried until all names differ: names may start alike, or end alike."""


class Cell(NamedTuple):
    """A cell's text and style."""

    text: str
    style: str = ""


class Column(NamedTuple):
    """A column's heading and kind."""

    title: str
    kind: Kind = "figure"

    @property
    def fixed(self) -> bool:
        """True if its cells are never cut nor wrapped."""
        return self.kind not in _LEAST

    @property
    def name(self) -> bool:
        """True if its cells are cut."""
        return self.kind in ("function", "name")


_Row: TypeAlias = Sequence[Cell]


class Table:
    """Rows of cells under headings. Cells are plain text: nothing in them is markup."""

    def __init__(self, *columns: str | Column, title: str = "") -> None:
        self._columns = [Column(column) if isinstance(column, str) else column for column in columns]
        self._title = title
        self._rows: list[_Row] = []

    def add(self, *cells: str | Cell) -> None:
        """Add a row with a cell for every column."""
        self._rows.append([Cell(cell) if isinstance(cell, str) else cell for cell in cells])

    def lines(self, width: int | None, shown: Callable[[str], Shown]) -> Iterator[Text]:
        """Yield the lines for a terminal of `width` cells; None for no limit. `shown` is applied to every text."""
        table = Table(*(Column(shown(column.title), column.kind) for column in self._columns))
        for row in self._rows:
            table.add(*(Cell(_BREAKS.sub(" ", shown(cell.text)), cell.style) for cell in row))
        if self._title:
            yield Text(shown(self._title), "bold")
        grid = table._grid(table._rows, width)
        yield from grid if grid is not None else table._blocks(table._rows, width or 0)

    def _grid(self, rows: Sequence[_Row], width: int | None) -> Iterator[Text] | None:
        """Return a line per row, or several where texts wrap; None if `width` is too little."""
        titles = [column.title for column in self._columns]
        widths = _widest([titles, *_texts(rows)])
        if width is not None and _total(widths) > width:
            rows = self._without_modules(rows)
            widths = self._squeezed(
                _widest([titles, *_texts(rows)]), _widest([[""] * len(titles), *_texts(rows)]), width
            )
            titles = self._short_titles(widths)
            rows = self._short_names(rows, widths)
            if not titles or not rows or _total(widths) > width:
                return None
        return self._lines([[Cell(title, "bold") for title in titles], *rows], widths)

    def _without_modules(self, rows: Sequence[_Row]) -> list[_Row]:
        """Drop from the names of functions the module that all of them share."""
        shared = [
            len(_shared_module(row[index].text for row in rows)) if column.kind == "function" else 0
            for index, column in enumerate(self._columns)
        ]
        return [[Cell(cell.text[cut:], cell.style) for cell, cut in zip(row, shared, strict=True)] for row in rows]

    def _squeezed(self, natural: Sequence[int], cells: Sequence[int], width: int) -> list[int]:
        """Return widths for which headings, names and texts give way as far as they can and must.

        `natural` are the widths that all would have, `cells` those without the headings.
        """
        widths = list(natural)
        for index, column in enumerate(self._columns):
            if column.kind == "score":
                widths[index] = max(cells[index], min(natural[index], MIN_HEADING))
            elif not column.fixed:
                widths[index] = min(natural[index], max(_LEAST[column.kind], cell_len(column.title)))
        spare = max(width - _total(widths), 0)
        # Serve the column with the smallest shortage first, so that what it doesn't need goes to the others.
        lacking = sorted(range(len(widths)), key=lambda index: natural[index] - widths[index])
        for place, index in enumerate(lacking):
            more = min(natural[index] - widths[index], spare // (len(lacking) - place))
            widths[index] += more
            spare -= more
        return widths

    def _short_titles(self, widths: Sequence[int]) -> list[str]:
        """Cut the headings of scores to their column's width; return nothing if two of them would look the same."""
        for share in _SHARES:
            titles = [
                _cut(column.title, width, share) if column.kind == "score" else column.title
                for column, width in zip(self._columns, widths, strict=True)
            ]
            if len(set(titles)) == len(titles):
                return titles
        return []

    def _short_names(self, rows: Sequence[_Row], widths: Sequence[int]) -> list[_Row]:
        """Cut names to their column's width; return nothing if two of them would look the same."""
        columns: list[Sequence[Cell]] = []
        for cells, column, width in zip(zip(*rows, strict=True), self._columns, widths, strict=True):
            short = _shortened([cell.text for cell in cells], width) if column.name else {}
            if short is None:
                return []
            columns.append([Cell(short.get(cell.text, cell.text), cell.style) for cell in cells])
        return list(zip(*columns, strict=True))

    def _lines(self, rows: Sequence[_Row], widths: Sequence[int]) -> Iterator[Text]:
        for row in rows:
            wrapped = [
                _wrapped(cell.text, width, column)
                for cell, width, column in zip(row, widths, self._columns, strict=True)
            ]
            for texts in zip_longest(*wrapped, fillvalue=""):
                line = Text()
                for index, (text, cell) in enumerate(zip(texts, row, strict=True)):
                    _append(line, GAP if index else "", Cell(text, cell.style), self._columns[index], widths[index])
                line.rstrip()
                yield line

    def _blocks(self, rows: Sequence[_Row], width: int) -> Iterator[Text]:
        """Yield a block per row: the first cell, and below it the others with their headings, as many as fit a line."""
        if not rows:
            return
        rows = self._without_modules(rows)
        widths = _widest(_texts(rows))
        first, *columns = self._columns
        heads = [row[0].text for row in rows]
        short = _shortened(heads, width) or {}
        for (_, *cells), head in zip(rows, heads, strict=True):
            yield Text(f"{first.title} {head}" if first.fixed else short.get(head, head), "bold")
            line = Text()
            for cell, column, wide in zip(cells, columns, widths[1:], strict=True):
                if not cell.text:
                    continue
                *before, pair = _pair(cell, column, wide, width)
                if line and (before or cell_len(line.plain) + cell_len(pair.plain) > width):
                    line.rstrip()
                    yield line
                    line = Text()
                yield from before
                line.append(pair)
            line.rstrip()
            yield line


def _pair(cell: Cell, column: Column, wide: int, width: int) -> list[Text]:
    """Return a cell after its heading, in several lines if it wraps."""
    heading = f"{GAP}{column.title} "
    if column.fixed:
        line = Text().append(heading, "dim")
        _append(line, "", cell, column, wide)
        return [line]
    room = max(width - cell_len(heading), _LEAST[column.kind])
    texts = [_cut(cell.text, room, 0.5)] if column.name else _wrapped(cell.text, room, column)
    return [
        Text().append(" " * cell_len(heading) if number else heading, "dim").append(text, cell.style or None)
        for number, text in enumerate(texts)
    ]


def _append(line: Text, gap: str, cell: Cell, column: Column, width: int) -> None:
    """Append a cell, filled up to its column's width."""
    blank = " " * (width - cell_len(cell.text))
    right = column.kind in ("figure", "score")
    line.append(gap + blank if right else gap)
    line.append(cell.text, cell.style or None)
    line.append("" if right else blank)


def _texts(rows: Sequence[_Row]) -> Iterator[list[str]]:
    return ([cell.text for cell in row] for row in rows)


def _widest(rows: Iterable[Sequence[str]]) -> list[int]:
    """Return the width of every column."""
    return [max(map(cell_len, texts)) for texts in zip(*rows, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _shared_module(names: Iterable[str]) -> str:
    """Return the common prefix of these names, up to a `:` or `.`."""
    names = sorted(names)
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(names[0], names[-1], strict=False)) if names else ()
    found = re.match(r".*[:.]", "".join(character for character, _ in alike))
    return found[0] if found else ""


def _shortened(names: Sequence[str], width: int) -> dict[str, str] | None:
    """Cut names to a width, so that they still differ; None if they can't."""
    for share in _SHARES:
        short = {name: _cut(name, width, share) for name in names}
        if len(set(short.values())) == len(short):
            return short
    return None


def _cut(name: str, width: int, share: float) -> str:
    """Cut a name's middle; `share` of what is left is its beginning."""
    if cell_len(name) <= width:
        return name
    head = _beginning(name, int((width - 1) * share))
    return f"{head}…{_beginning(name[::-1], width - 1 - cell_len(head))[::-1]}"


def _beginning(text: str, width: int) -> str:
    taken = 0
    for index, character in enumerate(text):
        taken += cell_len(character)
        if taken > width:
            return text[:index]
    return text


def _wrapped(text: str, width: int, column: Column) -> list[str]:
    """Wrap a list or a text; at most `MAX_LINES` lines."""
    if column.fixed or cell_len(text) <= width:
        return [text]
    lines = [""]
    for part in re.findall(r".+?(?:, |$)" if column.kind == "list" else r"\S+ ?", text):
        while part:
            if cell_len((lines[-1] + part).rstrip()) <= width:
                lines[-1] += part
                part = ""
            elif lines[-1]:
                lines.append("")
            else:
                lines[-1] = _beginning(part, width)
                part = part[len(lines[-1]) :]
    lines = [line.rstrip() for line in lines]
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], f"{_beginning(lines[MAX_LINES - 1], width - 1)}…"]
    return lines
