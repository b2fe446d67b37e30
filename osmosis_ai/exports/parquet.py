"""Parquet: one row per rollout, with a schema that depends only on the functions' names.

Messages, turns and rewards are nested columns. Data without a fixed form is JSON text: `tools`, `metadata`, log
probabilities, request parameters, and message fields outside the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

import msgspec

from osmosis_ai.errors import UsageError
from osmosis_ai.exports.base import ExportFormat, ExportOptions, Written
from osmosis_ai.records import JsonObject, JsonValue, Message
from osmosis_ai.text import json_text

if TYPE_CHECKING:
    import pyarrow

    from osmosis_ai.exports.rollouts import ExportedRollout

__all__ = ["FORMAT"]

BATCH_BYTES = 8 << 20
BATCH_ROLLOUTS = 1000
"""A row group holds at most this many rollouts, or about this many bytes."""


def _write(rollouts: Iterable[ExportedRollout], sink: IO[bytes], options: ExportOptions) -> Written:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError("writing Parquet needs pyarrow: pip install 'osmosis-ai[parquet]'") from None
    encoder, decoder = msgspec.json.Encoder(), msgspec.json.Decoder(JsonObject)
    schema = _schema(options.functions)
    written = size = 0
    batch: list[JsonObject] = []
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            batch.clear()

        for rollout in rollouts:
            # Masked as JSON and decoded again, because the masker works on encoded strings.
            data = options.mask(encoder.encode(rollout))
            batch.append(_row(decoder.decode(data), options.functions))
            written += 1
            size += len(data)
            if size >= BATCH_BYTES or len(batch) >= BATCH_ROLLOUTS:
                flush()
                size = 0
        if batch:
            flush()
    return Written(written)


_MESSAGE_TEXTS = ("role", "content", "name", "tool_call_id", "reasoning_content")


def _schema(functions: Sequence[str]) -> pyarrow.Schema:
    import pyarrow as pa

    text, number, whole = pa.string(), pa.float64(), pa.int64()
    call = pa.struct([("id", text), ("type", text), ("function", pa.struct([("name", text), ("arguments", text)]))])
    message = pa.struct([*((name, text) for name in _MESSAGE_TEXTS), ("tool_calls", pa.list_(call)), ("extra", text)])
    turn = pa.struct(
        [
            ("finish_reason", text),
            ("model", text),
            ("params", text),
            ("prompt_tokens", whole),
            ("completion_tokens", whole),
            ("duration_ms", number),
            ("attempts", whole),
            ("logprobs", text),
            ("prompt_token_ids", pa.list_(whole)),
            ("token_ids", pa.list_(whole)),
        ]
    )
    by_function = [
        ("rewards", pa.struct([(name, number) for name in functions])),
        ("scoring_errors", pa.struct([(name, text) for name in functions])),
    ]
    return pa.schema(
        [
            *((name, text) for name in ("id", "run_id", "row_id")),
            ("row_index", whole),
            ("run_index", whole),
            ("policy", text),
            ("model", text),
            ("messages", pa.list_(message)),
            ("tools", text),
            ("reward", number),
            # Parquet can't hold a struct without fields.
            *(by_function if functions else ()),
            ("finish_reason", text),
            ("error", text),
            ("human", whole),
            ("human_note", text),
            ("ground_truth", text),
            ("metadata", text),
            ("prompt_tokens", whole),
            ("completion_tokens", whole),
            ("total_tokens", whole),
            ("cost_usd", number),
            ("duration_ms", number),
            ("turns", pa.list_(turn)),
        ]
    )


def _row(item: JsonObject, functions: Sequence[str]) -> JsonObject:
    # pyarrow ignores keys that the schema lacks, so the originals of flattened ones may stay.
    usage = item["token_usage"]
    return {
        **item,
        **usage,
        "messages": [_message(message) for message in item["messages"]],
        "tools": _json(item["tools"]),
        "rewards": {name: item["rewards"].get(name) for name in functions},
        "scoring_errors": {name: item["scoring_errors"].get(name) for name in functions},
        "metadata": _json(item["metadata"]),
        "turns": [
            {**turn, "params": _json(turn["params"]), "logprobs": _json(turn["logprobs"])} for turn in item["turns"]
        ],
    }


def _message(message: Message) -> JsonObject:
    row: JsonObject = {name: _text(message.get(name)) for name in _MESSAGE_TEXTS}
    extra = {name: value for name, value in message.items() if name not in row and name != "tool_calls"}
    calls = message.get("tool_calls")
    if calls is not None:
        row["tool_calls"] = [_call(call) for call in calls]
        # The schema can't hold all of these calls' fields, so keep the originals too.
        if row["tool_calls"] != calls:
            extra["tool_calls"] = calls
    row["extra"] = _json(extra or None)
    return row


def _call(call: JsonObject) -> JsonObject:
    function = call.get("function") or {}
    return {
        "id": _text(call.get("id")),
        "type": _text(call.get("type")),
        "function": {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))},
    }


def _text(value: JsonValue) -> str | None:
    return value if value is None or isinstance(value, str) else _json(value)


def _json(value: JsonValue) -> str | None:
    return None if value is None else json_text(value)


FORMAT = ExportFormat(
    name="parquet",
    suffix=".parquet",
    text=False,
    description="Parquet has one schema for all runs of the same functions. messages is a list of {role, content, "
    "name, tool_call_id, reasoning_content, tool_calls, extra}. tools, metadata, a turn's params and logprobs, and a "
    "message's extra, which holds its other fields, are JSON text (json.loads).",
    read_with=('pandas.read_parquet("run.parquet")', 'datasets.load_dataset("parquet", data_files="run.parquet")'),
    write=_write,
)
