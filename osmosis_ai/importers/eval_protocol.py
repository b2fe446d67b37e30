"""Read eval-protocol's datasets: JSONL of evaluation rows, each a conversation whose prompts become a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from osmosis_ai.importers.base import (
    BadSampleError,
    ImportedRow,
    ImportFormat,
    Problem,
    converted,
    json_lines,
    opening,
    parts_text,
)
from osmosis_ai.records import JsonObject, Record

__all__ = ["FORMAT"]


class _Message(Record, frozen=True):
    role: str
    content: str | list[JsonObject] | None = None


class _Metadata(Record, frozen=True):
    row_id: str | None = None
    dataset_info: JsonObject | None = None


class _Row(Record, frozen=True):
    messages: list[_Message]
    tools: list[JsonObject] | None = None
    input_metadata: _Metadata = _Metadata()
    ground_truth: object = None


def _recognises(_: Path, head: bytes) -> bool:
    # A line with a `user_prompt` is a row already.
    return head.startswith(b"{") and b'"messages"' in head and b'"user_prompt"' not in head


def _read(path: Path) -> Iterator[ImportedRow | Problem]:
    yield from json_lines(path, lambda line: [_row(converted(line, _Row, "an evaluation row of eval-protocol"))])


def _row(row: _Row) -> ImportedRow:
    messages = [{"role": each.role, "content": parts_text(each.content)} for each in row.messages]
    replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if replies and any(message["role"] == "user" for message in messages[replies[0] :]):
        raise BadSampleError("a conversation with several user messages; a row has a system prompt and a user prompt")
    system, user = opening(messages)
    if not user.strip():
        raise BadSampleError("no user message")
    extra: JsonObject = dict(row.input_metadata.dataset_info or {})
    if row.input_metadata.row_id is not None:
        extra.setdefault("id", row.input_metadata.row_id)
    if row.tools:
        extra["tools"] = row.tools
    return ImportedRow(system, user, row.ground_truth, extra)


FORMAT = ImportFormat(
    name="eval-protocol",
    description="eval-protocol's datasets, lines of evaluation rows",
    recognises=_recognises,
    read_rows=_read,
)
