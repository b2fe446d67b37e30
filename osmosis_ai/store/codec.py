"""Between records and what the database holds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from osmosis_ai.errors import StoreError
from osmosis_ai.masking import Masker
from osmosis_ai.records import (
    AgentReport,
    CallError,
    CallSummary,
    Failure,
    JudgeCall,
    Message,
    Rollout,
    Row,
    Score,
    ToolCall,
    Turn,
    Usage,
)

__all__ = ["Encoder", "decode_calls", "decode_object", "decode_rollout", "decode_row", "decode_score", "pack", "unpack"]

_COMPRESS_FROM = 1024  # bytes


class _Trajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a rollout that lists and statistics don't need."""

    messages: list[Message]
    turns: list[Turn]
    tool_calls: list[ToolCall]
    samples: list[Turn]
    agent: AgentReport | None = None


class _RowContent(msgspec.Struct, frozen=True):
    system_prompt: str
    user_prompt: str
    ground_truth: str | None
    extra: dict[str, Any]


_encoder = msgspec.json.Encoder()
_trajectory = msgspec.json.Decoder(_Trajectory)
_row = msgspec.json.Decoder(_RowContent)
_failure = msgspec.json.Decoder(Failure)
_judge_calls = msgspec.json.Decoder(list[JudgeCall])
_calls = msgspec.json.Decoder(list[tuple[str, float, CallError | None]])
_object = msgspec.json.Decoder(dict[str, Any])


class Encoder:
    """Turns records into what is stored, with every known key value masked.

    Identifiers (a rollout's, a row's, a policy's and a function's) are stored as they are: they are what records are
    found by, and this package makes them up itself.

    Args:
        masker: Knows the key values.
    """

    def __init__(self, masker: Masker) -> None:
        self._masker = masker

    def rollout(self, rollout: Rollout) -> tuple[Any, ...]:
        """The values of the columns from `id` to `requests`, and of `calls`."""
        failure, usage = rollout.failure, rollout.usage
        return (
            rollout.id,
            rollout.row_index,
            rollout.row_id,
            rollout.run_index,
            rollout.policy,
            rollout.finish_reason,
            rollout.duration_ms,
            *((None,) * 6 if failure is None else self._failure(failure)),
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            rollout.cost_usd,
            len(rollout.turns),
            len(rollout.tool_calls),
            sum(turn.attempts for turn in rollout.turns) + sum(turn.attempts for turn in rollout.samples),
            self._json([(call.name, call.duration_ms, call.error) for call in rollout.tool_calls]).decode("utf-8"),
        )

    def trajectory(self, rollout: Rollout) -> bytes:
        """A rollout's trajectory as JSON; to be packed."""
        content = _Trajectory(rollout.messages, rollout.turns, rollout.tool_calls, rollout.samples, rollout.agent)
        return self._json(content)

    def row(self, row: Row) -> bytes:
        """A row without its index and id as JSON; to be packed."""
        return self._json(_RowContent(row.system_prompt, row.user_prompt, row.ground_truth, row.extra))

    def score(self, score: Score) -> tuple[Any, ...]:
        """The values of the columns from `function` to `judge_calls`."""
        failure = None if score.failure is None else self._json(score.failure).decode("utf-8")
        judged = self._json(score.judge_calls).decode("utf-8") if score.judge_calls else None
        return (score.function, score.value, failure, score.duration_ms, self.text(score.explanation), judged)

    def json(self, value: Mapping[str, Any]) -> str:
        """An object as JSON text."""
        return self._json(value).decode("utf-8")

    def text(self, text: str | None) -> str | None:
        """A text column's value."""
        return None if text is None else self._masker.text(text if text.isascii() else _well_formed(text))

    def _failure(self, failure: Failure) -> Sequence[Any]:
        texts = (failure.kind, failure.message, failure.file, failure.detail)
        kind, message, file, detail = (self.text(text) for text in texts)
        return failure.origin, kind, message, file, failure.line, detail

    def _json(self, value: Any) -> bytes:
        try:
            data = _encoder.encode(value)
        except UnicodeEncodeError:
            data = _encoder.encode(_all_well_formed(msgspec.to_builtins(value)))
        except TypeError as error:
            raise StoreError(f"a {type(value).__name__.strip('_')} that isn't JSON can't be stored: {error}") from error
        return self._masker.encoded(data)


def decode_rollout(columns: Sequence[Any], data: bytes | None) -> Rollout:
    """A rollout from its columns from `id` to `cost_usd`, and its trajectory; without one its lists are empty."""
    (id_, row_index, row_id, run_index, policy, finish_reason, duration_ms) = columns[:7]
    (origin, kind, message, file, line, detail) = columns[7:13]
    (prompt_tokens, completion_tokens, total_tokens, cost_usd) = columns[13:17]
    trajectory = _Trajectory([], [], [], []) if data is None else _trajectory.decode(unpack(data))
    return Rollout(
        id=id_,
        row_index=row_index,
        row_id=row_id,
        run_index=run_index,
        policy=policy,
        messages=trajectory.messages,
        finish_reason=finish_reason,
        duration_ms=duration_ms,
        failure=None if origin is None else Failure(origin, message, kind, file, line, detail),
        usage=Usage(prompt_tokens, completion_tokens, total_tokens),
        turns=trajectory.turns,
        tool_calls=trajectory.tool_calls,
        samples=trajectory.samples,
        cost_usd=cost_usd,
        agent=trajectory.agent,
    )


def decode_row(row_index: int, row_id: str, data: bytes) -> Row:
    """A row from its columns."""
    content = _row.decode(unpack(data))
    return Row(row_index, row_id, content.system_prompt, content.user_prompt, content.ground_truth, content.extra)


def decode_score(columns: Sequence[Any]) -> Score:
    """A score from its columns from `function` to `judge_calls`."""
    function, value, failure, duration_ms, explanation, judged = columns
    return Score(
        function,
        value,
        None if failure is None else _failure.decode(failure),
        duration_ms,
        explanation,
        [] if judged is None else _judge_calls.decode(judged),
    )


def decode_calls(text: str) -> list[CallSummary]:
    """A rollout's tool calls from the column `calls`."""
    return [CallSummary(name, duration_ms, error) for name, duration_ms, error in _calls.decode(text)]


def decode_object(text: str) -> dict[str, Any]:
    """An object from its JSON text."""
    return _object.decode(text)


def pack(data: bytes) -> bytes:
    """Encoded JSON as it is stored: large ones compressed, which halves the store for 40 µs of CPU a rollout."""
    # Level 1: higher ones take longer and save little on text of a few kilobytes.
    return data if len(data) < _COMPRESS_FROM else zlib.compress(data, 1)


def unpack(data: bytes) -> bytes:
    """Encoded JSON from what `pack` gave."""
    return data if data[:1] == b"{" else zlib.decompress(data)


def _well_formed(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 can't hold, replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _all_well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return _well_formed(value)
    if isinstance(value, dict):
        return {_all_well_formed(key): _all_well_formed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_all_well_formed(item) for item in value]
    return value
