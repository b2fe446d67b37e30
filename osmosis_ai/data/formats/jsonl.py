"""Read JSON Lines: one object per line."""

from __future__ import annotations

from collections.abc import Iterator

from osmosis_ai.data.formats.source import Item, Source, decoded, text_lines, too_large

__all__ = ["read"]


def read(source: Source) -> Iterator[Item]:
    """Yield the non-blank lines."""
    for number, line in enumerate(text_lines(source.file), 1):
        if line is None:
            yield Item(f"line {number}", too_large(), source.consumed)
        elif not line.isspace():
            yield Item(f"line {number}", decoded(line), source.consumed)
