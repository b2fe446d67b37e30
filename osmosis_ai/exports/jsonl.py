"""JSON lines: one object per line, nothing converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING

import msgspec

from osmosis_ai.exports.base import ExportFormat

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["FORMAT"]


def _write(
    rollouts: Iterable[ExportedRollout], functions: Sequence[str], sink: IO[bytes], mask: Callable[[bytes], bytes]
) -> int:
    encoder = msgspec.json.Encoder()
    written = 0
    for rollout in rollouts:
        sink.write(mask(encoder.encode(rollout)) + b"\n")
        written += 1
    return written


FORMAT = ExportFormat(
    name="jsonl",
    suffix=".jsonl",
    text=True,
    description="JSON lines keep everything as it was.",
    read_with=(
        'pandas.read_json("run.jsonl", lines=True, dtype=False)',
        'datasets.load_dataset("json", data_files="run.jsonl")',
    ),
    write=_write,
)
