"""What an export format is. Imports no store: the command line's help lists the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["ExportFormat", "Write"]


class Write(Protocol):
    """Writes rollouts in one format."""

    def __call__(
        self,
        rollouts: Iterable[ExportedRollout],
        functions: Sequence[str],
        sink: IO[bytes],
        mask: Callable[[bytes], bytes],
    ) -> int:
        """Write rollouts; gives how many. `functions` may have scores; `mask` removes key values from encoded JSON."""
        ...


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
