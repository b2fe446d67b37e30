"""Read the results of vf-eval before verifiers 0.4: results.jsonl, with metadata.json beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from osmosis_ai.bounds import count_of
from osmosis_ai.folders import UnreadableError, read_bounded
from osmosis_ai.importers.base import (
    MAX_DOCUMENT_BYTES,
    Attempt,
    BadSampleError,
    ImportFormat,
    Left,
    Problem,
    RunFile,
    calls_in,
    converted,
    ground_truth,
    json_lines,
    json_object,
    milliseconds,
    moment,
    numbers,
    opening,
    parts_text,
)
from osmosis_ai.records import (
    AgentReport,
    Failure,
    JsonObject,
    Message,
    Record,
    Rollout,
    Score,
    Usage,
)
from osmosis_ai.text import json_text
from osmosis_ai.urls import show_url
from osmosis_ai.wire_json import decode_json

__all__ = ["FORMAT"]

METADATA = "metadata.json"
REWARD = "reward"


class _Message(Record, frozen=True):
    role: str
    content: str | list[JsonObject] | None = None
    reasoning_content: str | None = None
    tool_calls: list[str | JsonObject] | None = None
    tool_call_id: str | None = None


class _Result(Record, frozen=True):
    prompt: str | list[_Message]
    completion: str | list[_Message] | None
    example_id: int | str = 0
    answer: str | None = None
    task: str | None = None
    info: str | JsonObject | None = None
    reward: float | None = None
    error: str | JsonObject | None = None
    timing: JsonObject = {}
    is_truncated: bool = False
    stop_condition: str | None = None
    metrics: dict[str, float | None] = {}
    token_usage: dict[str, float] | None = None
    tool_defs: list[JsonObject] | None = None


class _Build(Record, frozen=True):
    vf_version: str | None = None


class _Metadata(Record, frozen=True):
    env_id: str | None = None
    model: str | None = None
    base_url: str | None = None
    num_examples: int | None = None
    rollouts_per_example: int = 1
    sampling_args: JsonObject = {}
    date: str | None = None
    version_info: _Build = _Build()
    pass_threshold: float | None = None


def _recognises(_: Path, head: bytes) -> bool:
    return head.startswith(b"{") and all(name in head for name in (b'"prompt"', b'"completion"', b'"reward"'))


def _read(path: Path, run: RunFile) -> Iterator[Attempt | Problem | Left]:
    run.tool = "verifiers"
    beside = path.with_name(METADATA)
    if beside.exists():
        try:
            _begin(converted(json_object(read_bounded(beside, MAX_DOCUMENT_BYTES, "too large")), _Metadata, "it"), run)
        except (BadSampleError, UnreadableError) as error:
            yield Problem("", f"{METADATA} beside it can't be read: {error}", final=True)
            return
    else:
        run.models["unknown"] = None
        run.notes[f"there is no {METADATA} beside the file, so its model and settings are unknown"] = None
    run.scorers[REWARD] = None
    run.notes["the file has the total reward alone; the environment's metrics are kept in each rollout's report"] = None
    seen: Counter[str] = Counter()
    yield from json_lines(path, lambda line: [_attempt(converted(line, _Result, "a result of vf-eval"), run, seen)])


def _begin(metadata: _Metadata, run: RunFile) -> None:
    version = metadata.version_info.vf_version
    run.tool = f"verifiers {version}" if version else "verifiers"
    run.task = metadata.env_id
    run.models[metadata.model or "unknown"] = None
    run.base_url = show_url(metadata.base_url) if metadata.base_url else None
    run.params = {name: value for name, value in metadata.sampling_args.items() if value not in (None, {})}
    if metadata.pass_threshold is not None:
        run.pass_threshold = metadata.pass_threshold
    # vf-eval writes -1 for all examples.
    if metadata.num_examples is not None and metadata.num_examples > 0:
        run.planned = metadata.num_examples * metadata.rollouts_per_example
    if metadata.date:
        try:
            run.created_at = moment(datetime.fromisoformat(metadata.date).timestamp())
        except (ValueError, OverflowError):
            run.created_at = None


def _attempt(result: _Result, run: RunFile, seen: Counter[str]) -> Attempt:
    prompt = _messages(result.prompt, "user")
    messages = [*prompt, *_messages(result.completion, "assistant")]
    _name_results(messages)
    for tool in result.tool_defs or ():
        run.offer(tool)
    # The id alone may be missing, or repeat across tasks.
    key = json_text([result.example_id, result.task, [message.get("content") for message in prompt]])
    seen[key] += 1
    system, user = opening(prompt)
    tokens = {name: count_of(int(value)) for name, value in numbers(result.token_usage or {}).items()}
    usage = Usage(tokens.get("input_tokens", 0), tokens.get("output_tokens", 0))
    times = numbers(result.timing)
    # Its versions differ in the unit.
    took = times["total_ms"] / 1000 if "total_ms" in times else times.get("total")
    failure = None if result.error is None else _failure(result.error)
    condition = result.stop_condition or ("length" if result.is_truncated else "stop")
    # vf-eval writes a reward of 0 for a failed rollout, which isn't a score.
    scores = [] if result.reward is None or failure else [Score(REWARD, result.reward)]
    rollout = Rollout(
        id=f"{result.example_id}-{seen[key] - 1}",
        row_index=0,
        row_id="",
        run_index=0,
        policy="policy",
        messages=messages,
        finish_reason="error" if failure else "length" if result.is_truncated else "stop",
        duration_ms=milliseconds(took),
        failure=failure,
        usage=msgspec.structs.replace(usage, total_tokens=usage.prompt_tokens + usage.completion_tokens),
        tool_calls=calls_in(messages),
        agent=AgentReport(run.task or "verifiers", condition, metrics=numbers(result.metrics)),
    )
    extra = {} if result.task is None else {"task": result.task}
    return Attempt(
        key=key,
        system_prompt=system,
        user_prompt=user,
        ground_truth=ground_truth(result.answer),
        extra={**_object(result.info), **extra},
        rollout=rollout,
        scores=scores,
        run_index=seen[key] - 1,
    )


def _messages(given: str | list[_Message] | None, role: str) -> list[Message]:
    if not isinstance(given, list):
        return [{"role": role, "content": given}] if given else []
    found = []
    for message in given:
        kept: Message = {"role": message.role, "content": parts_text(message.content)}
        if message.reasoning_content:
            kept["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            kept["tool_calls"] = [_call(call) for call in message.tool_calls]
        if message.role == "tool":
            kept["tool_call_id"] = message.tool_call_id or ""
        found.append(kept)
    return found


def _call(given: str | JsonObject) -> JsonObject:
    """Parse a tool call, which vf-eval writes as JSON text, with or without `function`."""
    # The text may hold lone surrogates, which UTF-8 can't encode.
    call = json_object(given.encode("utf-8", "replace")) if isinstance(given, str) else given
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    arguments = function.get("arguments") or ""
    arguments = arguments if isinstance(arguments, str) else json_text(arguments)
    named = {"name": str(function.get("name") or ""), "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}


def _name_results(messages: list[Message]) -> None:
    """Add the tool's name, from its call, to each tool result."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool":
            message["name"] = names.get(message["tool_call_id"], "")


def _failure(error: str | JsonObject) -> Failure:
    if isinstance(error, str):
        return Failure("agent", error, kind="error")
    chain = str(error.get("error_chain_str") or error.get("error") or "the rollout failed")
    return Failure("agent", chain, kind="error", detail=str(error.get("error_chain_repr") or "") or None)


def _object(info: str | JsonObject | None) -> JsonObject:
    """Return a row's info as an object; datasets hold it as an object or as JSON text."""
    if isinstance(info, str):
        try:
            info = decode_json(info)
        except ValueError:
            return {"info": info}
    return info if isinstance(info, dict) else {}


FORMAT = ImportFormat(
    name="vf-eval",
    description="results of vf-eval before verifiers 0.4, results.jsonl beside metadata.json",
    recognises=_recognises,
    read_run=_read,
)
