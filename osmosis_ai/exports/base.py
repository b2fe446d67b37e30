"""The interface of export formats. Doesn't import the store, because the command line's help lists the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["ExportFormat", "Write"]


Write: TypeAlias = "Callable[[Iterable[ExportedRollout], Sequence[str], IO[bytes], Callable[[bytes], bytes]], int]"
"""Write rollouts scored by these functions, and return how many; the last argument masks keys in encoded JSON."""


class ExportFormat(NamedTuple):
    """An export format.

    `suffix` includes the dot. `text` is True if the format may go to a terminal or a pipe. `description` says what it
    keeps and how. `read_with` lists calls that read such a file.
    """

    name: str
    suffix: str
    text: bool
    description: str
    read_with: tuple[str, ...]
    write: Write
