"""What an export format is. Imports no store: the command line's help lists the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["ExportFormat", "Write"]


Write: TypeAlias = "Callable[[Iterable[ExportedRollout], Sequence[str], IO[bytes], Callable[[bytes], bytes]], int]"
"""Writes rollouts with scores by these functions, and gives how many; the last argument masks keys in encoded JSON."""


class ExportFormat(NamedTuple):
    """A format: its name, the suffix of its files with the point, what it keeps in which form, and what writes it.

    `text` is True for one that may go to a terminal or a pipe. `read_with` are calls that read a file of it.
    """

    name: str
    suffix: str
    text: bool
    description: str
    read_with: tuple[str, ...]
    write: Write
