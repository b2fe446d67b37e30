"""Stored rollouts as training data: one object per rollout, as JSON lines or Parquet."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import msgspec

from osmosis_ai.records import Failure, Message, Record, Turn
from osmosis_ai.store import Queries, RunInfo, ScoredRollout
from osmosis_ai.text import json_text

__all__ = ["ExportFormat", "Selection", "export_objects", "replaced_file", "write_jsonl", "write_parquet"]

ExportFormat: TypeAlias = Literal["jsonl", "parquet"]

BATCH_BYTES = 8 << 20
BATCH_ROLLOUTS = 1000
"""A Parquet file is written in groups of at most this many rollouts, or about this many bytes of them."""


class Selection(Record, frozen=True):
    """Which rollouts of a run to export.

    `policy` is `policy`, `baseline` or `all`. With `min_score` every function's score must be at least that, with
    `min_reward` their mean; either leaves out rollouts that failed or lack a score.
    """

    policy: str = "policy"
    min_score: float | None = None
    min_reward: float | None = None

    def wants(self, scored: ScoredRollout) -> bool:
        """Whether a rollout is to be exported."""
        rollout = scored.stored.rollout
        if self.policy not in ("all", rollout.policy):
            return False
        if self.min_score is None and self.min_reward is None:
            return True
        reward = _reward(scored)
        if rollout.failure is not None or reward is None:
            return False
        values = [score.value for score in scored.scores.values() if score.value is not None]
        return (self.min_score is None or min(values) >= self.min_score) and (
            self.min_reward is None or reward >= self.min_reward
        )


def export_objects(store: Queries, run: RunInfo, selection: Selection) -> Iterator[dict[str, Any]]:
    """The selected rollouts of a run, in the order of rows, run indices and policies; streamed.

    Args:
        store: Where the run is.
        run: The run.
        selection: Which of its rollouts.

    Raises:
        StoreError: The store can't be read.
    """
    for scored in store.scored(run.id, with_trajectory=True):
        if selection.wants(scored):
            yield _object(run, scored)


def write_jsonl(objects: Iterable[dict[str, Any]], sink: IO[bytes], mask: Callable[[bytes], bytes]) -> int:
    """Write one JSON object per line.

    Args:
        objects: What to write.
        sink: Where to.
        mask: Removes key values from encoded JSON.

    Returns:
        How many were written.
    """
    encoder = msgspec.json.Encoder()
    written = 0
    for item in objects:
        sink.write(mask(encoder.encode(item)) + b"\n")
        written += 1
    return written


def write_parquet(
    objects: Iterable[dict[str, Any]], functions: list[str], sink: IO[bytes], mask: Callable[[bytes], bytes]
) -> int:
    """Write one Parquet row per object, under a schema that depends on the functions' names only.

    Messages, turns and rewards are nested columns; what has no fixed form (`tools`, `metadata`, log probabilities,
    request parameters, fields of messages that aren't in the schema) is JSON text.

    Args:
        objects: What to write.
        functions: The functions that may have scores.
        sink: Where to.
        mask: Removes key values from encoded JSON.

    Returns:
        How many were written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    encoder, decoder = msgspec.json.Encoder(), msgspec.json.Decoder()
    schema = _schema(functions)
    written = size = 0
    batch: list[dict[str, Any]] = []
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            batch.clear()

        for item in objects:
            data = encoder.encode(item)
            masked = mask(data)
            batch.append(_parquet_row(item if masked is data else decoder.decode(masked), functions))
            written += 1
            size += len(data)
            if size >= BATCH_BYTES or len(batch) >= BATCH_ROLLOUTS:
                flush()
                size = 0
        if batch:
            flush()
    return written


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when the block ends, and leaves nothing when it fails.

    What isn't a regular file (a pipe, `/dev/stdout`) is written to directly.

    Args:
        path: Where the result goes; its folder exists.

    Raises:
        OSError: It can't be written.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as direct:
            yield direct
        return
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _object(run: RunInfo, scored: ScoredRollout) -> dict[str, Any]:
    rollout, row = scored.stored.rollout, scored.row
    own = rollout.policy == "policy"
    usage = rollout.usage
    return {
        "id": rollout.id,
        "run_id": run.id,
        "row_id": rollout.row_id,
        "row_index": rollout.row_index,
        "run_index": rollout.run_index,
        "policy": rollout.policy,
        "model": run.config.get("model" if own else "baseline_model"),
        "messages": rollout.messages,
        "tools": run.config.get("tools"),
        "reward": _reward(scored),
        "rewards": {name: score.value for name, score in scored.scores.items()},
        "scoring_errors": {name: _error(score.failure) for name, score in scored.scores.items() if score.failure},
        "finish_reason": rollout.finish_reason,
        "error": _error(rollout.failure),
        "ground_truth": row.ground_truth,
        "metadata": row.extra,
        "token_usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
        "cost_usd": rollout.cost_usd,
        "duration_ms": rollout.duration_ms,
        "turns": [_turn(turn) for turn in rollout.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    # Token ids arrive under the names that endpoints give them.
    ids = turn.token_ids if isinstance(turn.token_ids, dict) else {"token_ids": turn.token_ids}
    return {
        "finish_reason": turn.finish_reason,
        "model": turn.model,
        "params": turn.params,
        "prompt_tokens": turn.usage.prompt_tokens,
        "completion_tokens": turn.usage.completion_tokens,
        "duration_ms": turn.duration_ms,
        "attempts": turn.attempts,
        "logprobs": turn.logprobs,
        "prompt_token_ids": ids.get("prompt_token_ids"),
        "token_ids": ids.get("token_ids"),
    }


def _reward(scored: ScoredRollout) -> float | None:
    """As `Outcome.reward`: the only function's score, else the mean of them; None when one is missing."""
    values = [score.value for score in scored.scores.values() if score.value is not None]
    return sum(values) / len(values) if values and len(values) == len(scored.scores) else None


def _error(failure: Failure | None) -> str | None:
    return None if failure is None else f"{failure.origin}: {failure.message}"


_MESSAGE_TEXTS = ("role", "content", "name", "tool_call_id", "reasoning_content")


def _schema(functions: list[str]) -> Any:
    import pyarrow as pa

    text, number, whole = pa.string(), pa.float64(), pa.int64()
    call = pa.struct(
        [("id", text), ("type", text), ("function", pa.struct([("name", text), ("arguments", text)]))],
    )
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


def _parquet_row(item: dict[str, Any], functions: list[str]) -> dict[str, Any]:
    usage = item["token_usage"]
    return {
        **item,
        **usage,
        "messages": [_parquet_message(message) for message in item["messages"]],
        "tools": _json(item["tools"]),
        "rewards": {name: item["rewards"].get(name) for name in functions},
        "scoring_errors": {name: item["scoring_errors"].get(name) for name in functions},
        "metadata": _json(item["metadata"]),
        "turns": [
            {
                **turn,
                "params": _json(turn["params"]),
                "logprobs": _json(turn["logprobs"]),
                "prompt_token_ids": _whole_numbers(turn["prompt_token_ids"]),
                "token_ids": _whole_numbers(turn["token_ids"]),
            }
            for turn in item["turns"]
        ],
    }


def _parquet_message(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {name: _text(message.get(name)) for name in _MESSAGE_TEXTS}
    extra = {name: value for name, value in message.items() if name not in row and name != "tool_calls"}
    calls = message.get("tool_calls")
    if calls is not None:
        row["tool_calls"] = [_parquet_call(call) for call in calls]
        if row["tool_calls"] != calls:
            extra["tool_calls"] = calls
    row["extra"] = _json(extra or None)
    return row


def _parquet_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "id": _text(call.get("id")),
        "type": _text(call.get("type")),
        "function": {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))},
    }


def _whole_numbers(value: Any) -> list[int] | None:
    """Token ids as numbers; what an endpoint gave in another form has no place in the column."""
    whole = isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
    return value if whole else None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _json(value)


def _json(value: Any) -> str | None:
    return None if value is None else json_text(value)
