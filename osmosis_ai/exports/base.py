"""The interface of export formats. Doesn't import the store, because the command line's help lists the formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["Arguments", "ExportFormat", "ExportOptions", "LeftOut", "Write", "Written", "write_lines"]

Arguments: TypeAlias = Literal["text", "object"]
Item = TypeVar("Item")


class ExportOptions(NamedTuple):
    """The options of an export, besides the rollouts.

    Attributes:
        functions: The functions that scored them.
        mask: Masks keys in encoded JSON.
        pass_threshold: The lowest score of a pass.
        arguments: The form of tool calls' arguments: the model's text, or an object.
    """

    functions: Sequence[str]
    mask: Callable[[bytes], bytes]
    pass_threshold: float = 1.0
    arguments: Arguments = "text"


class Written(NamedTuple):
    """How many records were written, and how many rollouts or rows were left out, by reason."""

    records: int
    left_out: Mapping[str, int] = {}


class LeftOut(Exception):  # noqa: N818 - no error: a record that a format has no place for
    """Why a rollout or a row has no record."""


Write: TypeAlias = "Callable[[Iterable[ExportedRollout], IO[bytes], ExportOptions], Written]"
"""Writes rollouts, which come in the order of the dataset's rows."""


class ExportFormat(NamedTuple):
    """An export format.

    `suffix` includes the dot; the first format with a suffix is its default. `text` is True if the format can be
    written to a terminal or a pipe. `description` says what it keeps and how. `read_with` lists calls that read such a
    file. `record` names the unit that a line or row holds.
    """

    name: str
    suffix: str
    text: bool
    description: str
    read_with: tuple[str, ...]
    write: Write
    record: str = "rollout"


def write_lines(
    items: Iterable[Item], sink: IO[bytes], options: ExportOptions, records: Callable[[Item], Iterable[object]]
) -> Written:
    """Write the records of each item as JSON lines, and return how many were written and left out.

    Args:
        items: The items, such as rollouts.
        sink: The file to write to.
        options: The export's options.
        records: Returns the records of an item, or raises `LeftOut` with the reason why it has none.
    """
    encoder = msgspec.json.Encoder()
    written = 0
    left_out: Counter[str] = Counter()
    for item in items:
        try:
            for record in records(item):
                # Masked again, because a key may have become known since the run was stored.
                sink.write(options.mask(encoder.encode(record)) + b"\n")
                written += 1
        except LeftOut as reason:
            left_out[str(reason)] += 1
    return Written(written, left_out)
