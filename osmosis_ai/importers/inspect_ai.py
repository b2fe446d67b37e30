"""Read inspect_ai's logs: `.eval`, a zip archive with one member per sample, and `.json`, a single document."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import msgspec

from osmosis_ai.bounds import count_of
from osmosis_ai.data.formats.source import MAX_ROW_BYTES, too_large
from osmosis_ai.errors import UsageError
from osmosis_ai.failures import CallError
from osmosis_ai.folders import UnreadableError, read_bounded
from osmosis_ai.importers.base import (
    MAX_DOCUMENT_BYTES,
    Attempt,
    BadSampleError,
    ImportFormat,
    Left,
    Problem,
    RunFile,
    converted,
    finite,
    ground_truth,
    json_object,
    milliseconds,
    moment,
    opening,
    parts_text,
    total,
)
from osmosis_ai.records import (
    AgentReport,
    Failure,
    FinishReason,
    JsonObject,
    Message,
    Record,
    Rollout,
    Score,
    ToolCall,
    Turn,
    Usage,
)
from osmosis_ai.text import json_text
from osmosis_ai.urls import show_url

__all__ = ["FORMAT"]

HEADER, START, SAMPLES = "header.json", "_journal/start.json", "samples/"
ZSTANDARD = 93
"""The number of this compression in zip archives."""
VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""inspect_ai's grades (correct, partially correct, incorrect, no answer) and the values it gives them."""
FINISH: dict[str, FinishReason] = {"max_tokens": "length", "model_length": "length"}
LIMITS: dict[str, FinishReason] = {
    "message": "max_turns",
    "turn": "max_turns",
    "token": "max_tokens_total",
    "time": "timeout",
    "working": "timeout",
    "context": "length",
}
CALL_ERRORS: dict[str, CallError] = {"parsing": "bad_json", "timeout": "timeout"}


class _Config(Record, frozen=True):
    epochs: int | None = None


class _Samples(Record, frozen=True):
    samples: int | None = None
    sample_ids: list[str | int] | None = None


class _Scorer(Record, frozen=True):
    name: str


class _Eval(Record, frozen=True):
    task: str = ""
    model: str = ""
    model_base_url: str | None = None
    model_generate_config: JsonObject = {}
    created: str = ""
    config: _Config = _Config()
    dataset: _Samples = _Samples()
    packages: dict[str, str] = {}
    scorers: list[_Scorer] | None = None


class _Stats(Record, frozen=True):
    started_at: str = ""
    completed_at: str = ""


class _Header(Record, frozen=True):
    eval: _Eval
    status: str = "started"
    stats: _Stats = _Stats()


class _ToolError(Record, frozen=True):
    type: str = "unknown"
    message: str = ""


class _Call(Record, frozen=True):
    id: str
    function: str
    arguments: object = None


class _Message(Record, frozen=True):
    role: str
    content: str | list[JsonObject] = ""
    id: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    function: str | None = None
    error: _ToolError | None = None


class _Usage(Record, frozen=True):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_cache_write: int | None = None
    input_tokens_cache_read: int | None = None
    total_cost: float | None = None

    def tokens(self) -> Usage:
        # inspect_ai counts cached input apart from the rest.
        read = self.input_tokens + (self.input_tokens_cache_write or 0) + (self.input_tokens_cache_read or 0)
        return Usage(count_of(read), count_of(self.output_tokens), count_of(self.total_tokens))


class _Choice(Record, frozen=True):
    message: _Message
    stop_reason: str = "unknown"


class _Output(Record, frozen=True):
    choices: list[_Choice] = []
    model: str | None = None
    usage: _Usage | None = None
    time: float | None = None


class _ModelEvent(Record, frozen=True):
    output: _Output
    config: JsonObject = {}
    tools: list[JsonObject] = []
    working_time: float | None = None


class _ToolEvent(Record, frozen=True):
    id: str
    working_time: float | None = None


class _Score(Record, frozen=True):
    value: object = None
    explanation: str | None = None


class _Error(Record, frozen=True):
    message: str = ""
    traceback: str | None = None


class _Limit(Record, frozen=True):
    type: str = ""


class _Sample(Record, frozen=True):
    id: str | int
    epoch: int = 1
    input: str | list[_Message] = ""
    target: object = None
    choices: list[str] | None = None
    messages: list[_Message] = []
    output: _Output = _Output()
    scores: dict[str, _Score] | None = None
    metadata: JsonObject = {}
    events: list[JsonObject] = []
    model_usage: dict[str, _Usage] = {}
    attachments: dict[str, str] = {}
    started_at: str | None = None
    completed_at: str | None = None
    total_time: float | None = None
    error: _Error | None = None
    limit: _Limit | None = None


def _recognises(path: Path, head: bytes) -> bool:
    if head.startswith(b"PK"):
        return path.suffix == ".eval"
    # inspect_ai writes these keys first; anything may follow.
    start = head.lstrip()[:2000]
    return path.suffix == ".json" and start.startswith(b"{") and b'"version"' in start and b'"eval"' in start


def _read(path: Path, run: RunFile) -> Iterator[Attempt | Problem | Left]:
    try:
        if path.suffix == ".eval":
            yield from _archive(path, run)
        else:
            yield from _document(path, run)
    except (BadSampleError, UnreadableError) as error:
        yield Problem("", str(error), final=True)
    except (OSError, zipfile.BadZipFile) as error:
        yield Problem("", f"can't be read: {error}", final=True)


def _document(path: Path, run: RunFile) -> Iterator[Attempt | Problem]:
    limit = f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB; convert it to an archive with `inspect log convert --to eval`"
    log = json_object(read_bounded(path, MAX_DOCUMENT_BYTES, limit))
    header = _begin(log, run)
    samples = log.get("samples") or []
    if not isinstance(samples, list):
        raise BadSampleError("`samples` isn't a list")
    for number, sample in enumerate(samples):
        yield _sample(f"sample {number}", sample, header, run)


def _archive(path: Path, run: RunFile) -> Iterator[Attempt | Problem]:
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {member.filename: member for member in archive.infolist()}
        # The header is written at the end, so the log of an interrupted run has only its start.
        top = members.get(HEADER) or members.get(START)
        if top is None:
            raise BadSampleError(f"the archive has neither {HEADER} nor {START}")
        header = _begin(json_object(_content(archive, file, top)), run)
        names = [name for name in members if name.startswith(SAMPLES) and name.endswith(".json")]
        order = {str(each): number for number, each in enumerate(header.eval.dataset.sample_ids or ())}
        for name in sorted(names, key=lambda name: _place(name, order)):
            try:
                value: object = json_object(_content(archive, file, members[name]))
            except BadSampleError as error:
                yield Problem(name, str(error))
            # One damaged member leaves the others readable.
            except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
                yield Problem(name, f"damaged: {error}")
            else:
                yield _sample(name, value, header, run)


def _place(name: str, order: dict[str, int]) -> tuple[int, int]:
    """Return a sample's sort key from its member's name, `samples/ID_epoch_N.json`; unknown samples come last."""
    identity, _, epoch = name.removeprefix(SAMPLES).removesuffix(".json").rpartition("_epoch_")
    return order.get(identity, len(order)), int(epoch) if epoch.isdecimal() else 0


def _content(archive: zipfile.ZipFile, file: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """Return an archive member's bytes; raise BadSampleError if it is too large."""
    if member.compress_type != ZSTANDARD:
        try:
            with archive.open(member) as opened:
                data = opened.read(MAX_ROW_BYTES + 1)
        except RuntimeError as error:
            # It is encrypted, or its compression is unknown (NotImplementedError).
            raise BadSampleError(f"can't be read: {error}") from None
    elif member.compress_size > MAX_ROW_BYTES:
        raise BadSampleError(too_large())
    else:
        try:
            import pyarrow
        except ImportError:
            needed = "this log is compressed with Zstandard, which needs Python 3.14 or pyarrow"
            raise UsageError(f"{needed}: pip install 'osmosis-ai[parquet]'") from None
        # Zipfile knows this compression from Python 3.14 on. The data follows a header of 30 bytes and two texts, whose
        # lengths are at its end.
        file.seek(member.header_offset)
        start = file.read(30)
        file.seek(int.from_bytes(start[26:28], "little") + int.from_bytes(start[28:30], "little"), 1)
        source = pyarrow.BufferReader(file.read(member.compress_size))
        data = pyarrow.CompressedInputStream(source, "zstd").read(MAX_ROW_BYTES + 1)
    if len(data) > MAX_ROW_BYTES:
        raise BadSampleError(too_large())
    return data


def _begin(log: JsonObject, run: RunFile) -> _Header:
    header = converted(log, _Header, "a log of inspect_ai")
    known = header.eval
    version = known.packages.get("inspect_ai")
    run.tool = f"inspect_ai {version}" if version else "inspect_ai"
    run.task = known.task or None
    run.models[known.model] = None
    # inspect_ai's own stand-in for a model.
    run.stand_in = known.model.startswith("mockllm/")
    # Without a password or key that the address may contain.
    run.base_url = show_url(known.model_base_url) if known.model_base_url else None
    run.params = {name: value for name, value in known.model_generate_config.items() if value is not None}
    run.scorers |= dict.fromkeys(scorer.name for scorer in known.scorers or ())
    run.ended = header.status == "success"
    run.created_at = _seconds(header.stats.started_at or known.created)
    run.finished_at = _seconds(header.stats.completed_at)
    ids = known.dataset.sample_ids
    samples = known.dataset.samples if ids is None else len(ids)
    if samples is not None:
        run.planned = samples * (known.config.epochs or 1)
    return header


def _sample(where: str, value: object, header: _Header, run: RunFile) -> Attempt | Problem:
    try:
        sample = converted(value, _Sample, "a sample of inspect_ai")
    except BadSampleError as error:
        return Problem(where, str(error))
    messages = [_message(message, sample.attachments) for message in sample.messages]
    prompt = [] if isinstance(sample.input, str) else [_message(each, sample.attachments) for each in sample.input]
    turns, calls = _turns(sample, run)
    system, user = opening(messages)
    # Leave out inspect's id, so that rows with equal content are the same row whichever tool ran them.
    extra = {**sample.metadata, **({"choices": sample.choices} if sample.choices else {})}
    scores = [score for name, given in (sample.scores or {}).items() for score in _scores(name, given)]
    # Of this model only: graders are models, too.
    usage = sample.model_usage.get(header.eval.model)
    stop = sample.output.choices[0].stop_reason if sample.output.choices else "unknown"
    limit = None if sample.limit is None else sample.limit.type
    rollout = Rollout(
        id=f"{sample.id}-{sample.epoch}",
        row_index=0,
        row_id="",
        run_index=0,
        policy="policy",
        messages=messages,
        finish_reason="error" if sample.error else LIMITS.get(limit or "") or FINISH.get(stop, "stop"),
        duration_ms=milliseconds(sample.total_time),
        failure=None if sample.error is None else _failure(sample.error),
        usage=total(turns) if usage is None else usage.tokens(),
        turns=turns,
        tool_calls=calls,
        cost_usd=None if usage is None else usage.total_cost,
        agent=AgentReport(header.eval.task or "inspect_ai", f"{limit} limit" if limit else stop),
    )
    # The dataset's own prompt: solvers may have rewritten the one in the conversation.
    user = sample.input if isinstance(sample.input, str) else opening(prompt)[1] or user
    return Attempt(
        # As JSON, because the ids 1 and "1" are different samples.
        key=json_text(sample.id),
        system_prompt=system,
        user_prompt=user,
        ground_truth=ground_truth(sample.target),
        extra=extra,
        rollout=rollout,
        scores=scores,
        run_index=max(sample.epoch - 1, 0),
        finished_at=_seconds(sample.completed_at),
    )


def _message(message: _Message, attachments: dict[str, str]) -> Message:
    kept: Message = {"role": message.role}
    content = message.content
    if isinstance(content, list):
        reasoning = [str(part.get("reasoning") or "") for part in content if part.get("type") == "reasoning"]
        content = [_part(part, attachments) for part in content if part.get("type") != "reasoning"]
        if any(reasoning):
            kept["reasoning_content"] = "\n".join(reasoning)
    else:
        content = _attached(content, attachments)
    kept["content"] = parts_text(content)
    if message.tool_calls:
        kept["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        kept |= {"tool_call_id": message.tool_call_id or "", "name": message.function or ""}
        # The model saw the error's message then.
        if message.error is not None and not kept["content"]:
            kept["content"] = message.error.message
    return kept


def _part(part: JsonObject, attachments: dict[str, str]) -> JsonObject:
    if part.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": _attached(str(part.get("image")), attachments)}}
    return {name: _attached(value, attachments) if isinstance(value, str) else value for name, value in part.items()}


def _attached(text: str, attachments: dict[str, str]) -> str:
    """Return a text, or the attachment of the sample that it refers to."""
    scheme = "attachment://"
    return attachments.get(text.removeprefix(scheme), text) if text.startswith(scheme) else text


def _arguments(call: _Call) -> str:
    return call.arguments if isinstance(call.arguments, str) else json_text(call.arguments or {})


def _turns(sample: _Sample, run: RunFile) -> tuple[list[Turn], list[ToolCall]]:
    """Return the model calls and tool calls of the conversation, with the details of the log's events where present."""
    asked: dict[str, _ModelEvent] = {}
    took: dict[str, float] = {}
    for event in sample.events:
        try:
            if event.get("event") == "model":
                model = msgspec.convert(event, _ModelEvent, strict=False)
                for tool in model.tools:
                    run.offer(tool)
                for choice in model.output.choices:
                    asked[choice.message.id or ""] = model
            elif event.get("event") == "tool":
                tool_event = msgspec.convert(event, _ToolEvent, strict=False)
                took[tool_event.id] = milliseconds(tool_event.working_time)
        except msgspec.ValidationError:
            # Without the event, this call's tokens and times are unknown, but the conversation has its text.
            continue
    turns: list[Turn] = []
    calls: list[ToolCall] = []
    open_calls: dict[str, ToolCall] = {}
    for message in sample.messages:
        if message.role == "assistant":
            found = asked.get(message.id or "")
            # Leading replies without a model call are part of the prompt, such as few-shot examples.
            if found is not None or turns:
                turns.append(_turn(len(turns), found))
                # Of this reply only, because models reuse ids in later turns.
                open_calls = {
                    call.id: ToolCall(len(turns) - 1, call.id, call.function, _arguments(call), took.get(call.id, 0.0))
                    for call in message.tool_calls or ()
                }
        elif message.role == "tool" and message.tool_call_id in open_calls:
            call = open_calls.pop(message.tool_call_id or "")
            calls.append(call if message.error is None else _failed(call, message.error))
    return turns, calls


def _turn(index: int, event: _ModelEvent | None) -> Turn:
    if event is None:
        return Turn(index, "unknown", Usage(), 0.0)
    output = event.output
    return Turn(
        index=index,
        finish_reason=output.choices[0].stop_reason,
        usage=Usage() if output.usage is None else output.usage.tokens(),
        duration_ms=milliseconds(event.working_time if event.working_time is not None else output.time),
        model=output.model,
        params={name: value for name, value in event.config.items() if value is not None},
        cost_usd=None if output.usage is None else output.usage.total_cost,
    )


def _failed(call: ToolCall, error: _ToolError) -> ToolCall:
    kind = CALL_ERRORS.get(error.type, "exception")
    failure = Failure("tool", error.message, kind=kind)  # type: ignore[arg-type]
    return msgspec.structs.replace(call, error=kind, failure=failure)


def _scores(name: str, given: _Score) -> Iterator[Score]:
    if isinstance(given.value, dict):
        for key, value in given.value.items():
            yield _score(f"{name}.{key}", value, given.explanation)
    elif given.value is not None:
        yield _score(name, given.value, given.explanation)


def _score(name: str, value: object, explanation: str | None) -> Score:
    if isinstance(value, str):
        value = VALUES.get(value, value)
    if (found := finite(value)) is not None:
        return Score(name, found, explanation=explanation)
    message = f"inspect_ai recorded {json_text(value)[:100]}, which isn't a number"
    return Score(name, failure=Failure("reward", message, kind="wrong_type"), explanation=explanation)


def _failure(error: _Error) -> Failure:
    return Failure("agent", error.message or "the sample ended with an error", kind="error", detail=error.traceback)


def _seconds(text: str | None) -> float | None:
    try:
        # Python 3.10 doesn't read the Z.
        return moment(datetime.fromisoformat((text or "").replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError):
        return None


FORMAT = ImportFormat(
    name="inspect",
    description="inspect_ai's logs, .eval and .json",
    recognises=_recognises,
    read_run=_read,
)
