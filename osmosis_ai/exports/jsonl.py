"""JSON lines: one object per line, nothing converted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

from osmosis_ai.exports.base import ExportFormat, ExportOptions, Written, write_lines

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["FORMAT"]


def _write(rollouts: Iterable[ExportedRollout], sink: IO[bytes], options: ExportOptions) -> Written:
    return write_lines(rollouts, sink, options, lambda rollout: [rollout])


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
