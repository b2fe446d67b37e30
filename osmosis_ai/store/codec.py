"""Convert records to database columns and back."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from osmosis_ai.errors import StoreError
from osmosis_ai.masking import Masker
from osmosis_ai.records import (
    AgentReport,
    CallError,
    CallSummary,
    Failure,
    JudgeCall,
    Message,
    Outcome,
    Rollout,
    Row,
    Score,
    ScoringInput,
    SolutionStep,
    StoredInput,
    ToolCall,
    Turn,
    Usage,
    Verdict,
)
from osmosis_ai.store.tables import (
    JudgePromptColumns,
    RolloutColumns,
    RowColumns,
    RunColumns,
    ScoreColumns,
    VerdictColumns,
)
from osmosis_ai.token_data import from_older_form

__all__ = [
    "Encoder",
    "decode_calls",
    "decode_messages",
    "decode_object",
    "decode_outcome",
    "decode_rollout",
    "decode_row",
    "decode_score",
    "decode_scoring_input",
    "unpack",
]

_COMPRESS_FROM = 1024  # bytes


class _Trajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a rollout that lists and statistics don't read."""

    messages: list[Message]
    turns: list[Turn]
    tool_calls: list[ToolCall]
    samples: list[Turn]
    agent: AgentReport | None = None


class _Conversation(msgspec.Struct):
    """The part of a trajectory that is scored and searched."""

    messages: list[Message]


class _RowContent(msgspec.Struct, frozen=True, omit_defaults=True):
    system_prompt: str
    user_prompt: str
    ground_truth: str | None
    extra: dict[str, Any]
    solution: list[SolutionStep] | None = None


class _Prompts(msgspec.Struct):
    """The prompts of a score's judge calls, each once, and for every call which one was its own."""

    distinct: list[list[Message]]
    calls: list[int]


class _Call(msgspec.Struct, array_like=True):
    """An element of the column `calls`: the fields of a CallSummary."""

    name: str
    duration_ms: float
    error: CallError | None
    failure: Failure | None = None


_encoder = msgspec.json.Encoder()
_trajectory = msgspec.json.Decoder(_Trajectory)
_conversation = msgspec.json.Decoder(_Conversation)
_row = msgspec.json.Decoder(_RowContent)
_failure = msgspec.json.Decoder(Failure)
_judge_calls = msgspec.json.Decoder(list[JudgeCall])
_prompts = msgspec.json.Decoder(_Prompts)
_calls = msgspec.json.Decoder(list[_Call])
_object = msgspec.json.Decoder(dict[str, Any])


class Encoder:
    """Converts records to columns and masks every known key value.

    Identifiers of rollouts, rows, policies and functions are stored unmasked: queries look records up by them, and this
    package generates them itself.
    """

    def __init__(self, masker: Masker) -> None:
        self._masker = masker

    def run(self, command: str, identity: Mapping[str, Any], config: Mapping[str, Any]) -> RunColumns:
        """Encode a run that this process writes. The caller sets its id and time."""
        return RunColumns(
            pk=0,
            id="",
            status="running",
            created_at=0.0,
            finished_at=None,
            command=self._masker.text(command),
            identity=self.json(identity),
            config=self.json(config),
            summary=None,
            owner_pid=os.getpid(),
            owner_started=None,
            rollouts=0,
            failed=0,
        )

    def rollout(self, rollout: Rollout) -> RolloutColumns:
        """Encode a rollout that has just ended, as its first attempt. The caller sets its run."""
        usage, now = rollout.usage, time.time()
        columns = RolloutColumns(
            pk=0,
            id=rollout.id,
            row_index=rollout.row_index,
            row_id=rollout.row_id,
            run_index=rollout.run_index,
            policy=rollout.policy,
            run=0,
            finish_reason=rollout.finish_reason,
            duration_ms=rollout.duration_ms,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            cost_usd=rollout.cost_usd,
            turns=len(rollout.turns),
            tool_calls=len(rollout.tool_calls),
            requests=sum(turn.attempts for turn in (*rollout.turns, *rollout.samples)),
            attempt=1,
            started_at=now - rollout.duration_ms / 1000,
            finished_at=now,
            calls=self.json([_summary(call) for call in rollout.tool_calls]),
            failure_origin=None,
            failure_kind=None,
            failure_message=None,
            failure_file=None,
            failure_line=None,
            failure_detail=None,
        )
        failure = rollout.failure
        if failure is not None:
            columns.failure_origin = failure.origin
            columns.failure_kind = failure.kind
            columns.failure_message = self._text(failure.message)
            columns.failure_file = self._text(failure.file)
            columns.failure_line = failure.line
            columns.failure_detail = self._text(failure.detail)
        return columns

    def trajectory(self, rollout: Rollout) -> bytes:
        """Encode the `data` of a rollout's trajectory."""
        content = _Trajectory(rollout.messages, rollout.turns, rollout.tool_calls, rollout.samples, rollout.agent)
        return _pack(self._json(content))

    def row(self, row: Row) -> RowColumns:
        """Encode a row. The caller sets its run."""
        content = _RowContent(row.system_prompt, row.user_prompt, row.ground_truth, row.extra, row.solution)
        return RowColumns(run=0, row_id=row.id, row_index=row.index, data=_pack(self._json(content)))

    def scoring_input(self, row: Row, messages: list[Message], run_index: int = 0) -> StoredInput:
        """Encode a conversation that isn't stored, for scoring."""
        return StoredInput(row.index, self.row(row).data, _pack(self._json(_Conversation(messages))), run_index)

    def score(self, score: Score, code_hash: str | None = None, rollout: int = 0) -> ScoreColumns:
        """Encode a score of the rollout with this key, without what its judges were asked."""
        calls = [replace(call, prompt=[]) for call in score.judge_calls]
        return ScoreColumns(
            rollout=rollout,
            function=score.function,
            value=score.value,
            failure=None if score.failure is None else self.json(score.failure),
            duration_ms=score.duration_ms,
            explanation=self._text(score.explanation),
            judge_calls=self.json(calls) if calls else None,
            code_hash=code_hash,
        )

    def judge_prompts(self, score: Score, rollout: int) -> JudgePromptColumns:
        """Encode what the judges of a score were asked."""
        distinct: list[list[Message]] = []
        calls: list[int] = []
        for call in score.judge_calls:
            if call.prompt not in distinct:
                distinct.append(call.prompt)
            calls.append(distinct.index(call.prompt))
        return JudgePromptColumns(rollout, score.function, _pack(self._json(_Prompts(distinct, calls))))

    def verdict(self, verdict: Verdict) -> VerdictColumns:
        """Encode a person's verdict. The caller sets its rollout."""
        return VerdictColumns(0, verdict.value, self._text(verdict.note))

    def json(self, value: object) -> str:
        """Encode a value as JSON text."""
        return self._json(value).decode("utf-8")

    def _text(self, text: str | None) -> str | None:
        # Only text that isn't ASCII can hold lone surrogates.
        return None if text is None else self._masker.text(text if text.isascii() else _well_formed(text))

    def _json(self, value: object) -> bytes:
        try:
            data = _encoder.encode(value)
        except UnicodeEncodeError:
            # A lone surrogate. Repairing walks the whole value, so it is done only after a failure.
            data = _encoder.encode(_all_well_formed(msgspec.to_builtins(value)))
        except TypeError as error:
            raise StoreError(f"a {type(value).__name__.strip('_')} that isn't JSON can't be stored: {error}") from error
        # Masked after encoding, so that one pass finds values at any depth, and in keys.
        return self._masker.encoded(data)


def _summary(call: ToolCall) -> tuple[object, ...]:
    facts = (call.name, call.duration_ms, call.error)
    return facts if call.failure is None else (*facts, msgspec.structs.replace(call.failure, detail=None))


def decode_rollout(columns: RolloutColumns, trajectory: bytes | None) -> Rollout:
    """Decode a rollout from its columns and its trajectory's `data`; without the latter, its lists are empty."""
    content = _Trajectory([], [], [], []) if trajectory is None else _decode_trajectory(unpack(trajectory))
    return Rollout(
        id=columns.id,
        row_index=columns.row_index,
        row_id=columns.row_id,
        run_index=columns.run_index,
        policy=columns.policy,
        messages=content.messages,
        finish_reason=columns.finish_reason,
        duration_ms=columns.duration_ms,
        failure=_failure_of(columns),
        usage=_usage(columns),
        turns=content.turns,
        tool_calls=content.tool_calls,
        samples=content.samples,
        cost_usd=columns.cost_usd,
        agent=content.agent,
    )


def decode_outcome(columns: RolloutColumns, scores: dict[str, Score]) -> Outcome:
    """Decode a rollout's outcome from its columns and its scores."""
    return Outcome(
        id=columns.id,
        row_index=columns.row_index,
        row_id=columns.row_id,
        run_index=columns.run_index,
        policy=columns.policy,
        finish_reason=columns.finish_reason,
        duration_ms=columns.duration_ms,
        failure=_failure_of(columns),
        usage=_usage(columns),
        cost_usd=columns.cost_usd,
        calls=decode_calls(columns),
        scores=scores,
    )


def decode_calls(columns: RolloutColumns) -> list[CallSummary]:
    """Decode a rollout's tool calls, without their texts."""
    return [CallSummary(*msgspec.structs.astuple(call)) for call in _calls.decode(columns.calls)]


def decode_row(row_index: int, row_id: str, data: bytes) -> Row:
    """Decode a row from its columns."""
    content = _row.decode(unpack(data))
    values = (content.system_prompt, content.user_prompt, content.ground_truth, content.extra, content.solution)
    return Row(row_index, row_id, *values)


def decode_messages(trajectory: bytes) -> list[Message]:
    """Decode the messages of an unpacked trajectory, and nothing else of it."""
    return _conversation.decode(trajectory).messages


def decode_scoring_input(stored: StoredInput) -> ScoringInput:
    """Decode what functions score; raise StoreError if it is damaged."""
    try:
        row = _row.decode(unpack(stored.row))
        messages = decode_messages(unpack(stored.trajectory))
    except (zlib.error, msgspec.DecodeError) as error:
        raise StoreError(f"the record of row {stored.row_index} is damaged: {error}") from error
    return ScoringInput(messages, row.ground_truth, stored.row_index, row.extra, stored.run_index)


def decode_score(columns: ScoreColumns, prompts: bytes | None = None) -> Score:
    """Decode a score from its columns, and what its judges were asked from its `data`."""
    calls = [] if columns.judge_calls is None else _judge_calls.decode(columns.judge_calls)
    if prompts is not None:
        asked = _prompts.decode(unpack(prompts))
        calls = [replace(call, prompt=asked.distinct[own]) for call, own in zip(calls, asked.calls, strict=False)]
    return Score(
        columns.function,
        columns.value,
        None if columns.failure is None else _failure.decode(columns.failure),
        columns.duration_ms,
        columns.explanation,
        calls,
    )


def decode_object(text: str) -> dict[str, Any]:
    """Decode an object from its JSON text."""
    return _object.decode(text)


def _pack(data: bytes) -> bytes:
    """Compress large encoded JSON, which halves the store for 40 µs of CPU per rollout."""
    # Level 1: higher levels take longer and save little on a few kilobytes of text.
    return data if len(data) < _COMPRESS_FROM else zlib.compress(data, 1)


def unpack(data: bytes) -> bytes:
    """Return encoded JSON from the `data` of a row or a trajectory."""
    # Zlib data never begins with "{".
    return data if data[:1] == b"{" else zlib.decompress(data)


def _decode_trajectory(data: bytes) -> _Trajectory:
    try:
        return _trajectory.decode(data)
    except msgspec.ValidationError:
        # Earlier versions stored token data in the endpoint's form.
        stored = _object.decode(data)
        turns, samples = ([from_older_form(turn, Turn) for turn in stored.pop(name)] for name in ("turns", "samples"))
        content = msgspec.convert({**stored, "turns": [], "samples": []}, _Trajectory)
        return msgspec.structs.replace(content, turns=turns, samples=samples)


def _failure_of(columns: RolloutColumns) -> Failure | None:
    if columns.failure_origin is None:
        return None
    return Failure(
        columns.failure_origin,
        columns.failure_message or "",
        columns.failure_kind or "",
        columns.failure_file,
        columns.failure_line,
        columns.failure_detail,
    )


def _usage(columns: RolloutColumns) -> Usage:
    return Usage(columns.prompt_tokens, columns.completion_tokens, columns.total_tokens)


def _well_formed(text: str) -> str:
    """Replace lone surrogates, which UTF-8 can't hold, with U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _all_well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return _well_formed(value)
    if isinstance(value, dict):
        return {_all_well_formed(key): _all_well_formed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_all_well_formed(item) for item in value]
    return value
