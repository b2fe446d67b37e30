"""Read verifiers' traces, version 1: JSONL with one episode, which holds its agents' traces, or one trace per line.

A trace is a graph of messages. Each path from a root to a leaf is a conversation; the last one is the rollout's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from osmosis_ai.bounds import count_of
from osmosis_ai.importers.base import (
    Attempt,
    BadSampleError,
    ImportFormat,
    Left,
    Problem,
    RunFile,
    converted,
    ground_truth,
    json_lines,
    milliseconds,
    moment,
    numbers,
    opening,
    parts_text,
    total,
)
from osmosis_ai.records import (
    AgentReport,
    Failure,
    FinishReason,
    JsonObject,
    Logprobs,
    Message,
    Record,
    Rollout,
    Score,
    TokenIds,
    TokenLogprob,
    ToolCall,
    Turn,
    Usage,
)
from osmosis_ai.text import json_text
from osmosis_ai.urls import show_url

__all__ = ["FORMAT"]

VERSION = 1
OF_TASK = {"idx", "id", "name", "description", "prompt", "system_prompt", "answer", "info"}
"""A task's fields that a row stores elsewhere, or doesn't need."""
OF_RUNTIME = {
    *("image", "workdir", "agent_user", "skills", "network_allow", "network_block", "artifacts"),
    *("artifact_max_bytes", "timeout", "resources"),
}
"""A task's fields that configure the machine that runs it."""


class _Call(Record, frozen=True):
    name: str
    id: str = ""
    arguments: str = ""


class _Message(Record, frozen=True):
    role: str
    content: str | list[JsonObject] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Node(Record, frozen=True):
    message: _Message
    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] | None = None


class _Usage(Record, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_input_tokens: int | None = None
    cost: float | None = None


class _Span(Record, frozen=True):
    start: float = 0.0
    end: float = 0.0

    @property
    def milliseconds(self) -> float:
        return milliseconds(self.end - self.start)


class _ModelCall(Record, frozen=True):
    node: int | None = None
    model: str | None = None
    sampling: JsonObject | None = None
    finish_reason: str | None = None
    usage: _Usage | None = None
    time: _Span = _Span()


class _Error(Record, frozen=True):
    type: str = ""
    message: str = ""
    traceback: str | None = None


class _Task(Record, frozen=True):
    data: JsonObject
    type: str = ""
    key: str | None = None
    hash: str | None = None


class _AgentConfig(Record, frozen=True):
    model: str | None = None
    client: JsonObject | None = None
    sampling: JsonObject | None = None


class _Agent(Record, frozen=True):
    config: _AgentConfig = _AgentConfig()
    name: str = "agent"
    trainable: bool = True


class _Reward(Record, frozen=True):
    score: float
    weight: float = 1.0


class _Build(Record, frozen=True):
    version: str = ""


class _Timing(Record, frozen=True):
    start: float = 0.0
    agent: _Span = _Span()
    scoring: _Span = _Span()


class _Trace(Record, frozen=True):
    id: str
    task: _Task
    agent: _Agent = _Agent()
    version: int = VERSION
    verifiers: _Build = _Build()
    tools: list[JsonObject] = []
    nodes: list[_Node] = []
    calls: list[_ModelCall] = []
    rewards: dict[str, _Reward | None] = {}
    metrics: dict[str, float | None] = {}
    stop_condition: str | None = None
    is_timeout: bool = False
    errors: list[_Error] = []
    ok: bool = True
    timing: _Timing = _Timing()


class _Environment(Record, frozen=True):
    id: str = ""


class _Episode(Record, frozen=True):
    traces: list[_Trace]
    env: _Environment = _Environment()
    errors: list[_Error] = []


def _recognises(_: Path, head: bytes) -> bool:
    return head.startswith(b"{") and (b'"traces"' in head or b'"nodes"' in head) and b'"task"' in head


def _read(path: Path, run: RunFile) -> Iterator[Attempt | Problem | Left]:
    run.tool = "verifiers"
    seen: Counter[str] = Counter()

    def attempts(line: JsonObject) -> Iterator[Attempt | Left]:
        if "traces" in line:
            episode = converted(line, _Episode, "an episode of verifiers")
            run.task = run.task or episode.env.id or None
            if not episode.traces:
                why = f": {episode.errors[-1].type}: {episode.errors[-1].message}" if episode.errors else ""
                raise BadSampleError(f"the episode has no trace{why}")
            chosen = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
            for trace in episode.traces:
                if trace not in chosen:
                    yield Left(f"traces of {trace.agent.name}, an agent that isn't trained")
        else:
            chosen = [converted(line, _Trace, "a trace of verifiers")]
        # Convert the whole line before yielding anything, so that a bad line is reported once and imported not at all.
        yield from [_attempt(trace, run, seen) for trace in chosen]

    yield from json_lines(path, attempts)


def _attempt(trace: _Trace, run: RunFile, seen: Counter[str]) -> Attempt:
    if trace.version != VERSION:
        raise BadSampleError(f"a trace of version {trace.version}; only version {VERSION} is supported")
    agent, data = trace.agent, trace.task.data
    paths = _paths(trace.nodes)
    conversations = [[_message(trace.nodes[number].message) for number in path] for path in paths]
    messages = conversations[-1] if conversations else []
    for tool in trace.tools:
        run.offer(tool)
    run.tool = f"verifiers {trace.verifiers.version}".strip()
    run.task = run.task or trace.task.type or None
    run.models[agent.config.model or "unknown"] = None
    base_url = (agent.config.client or {}).get("base_url")
    run.base_url = show_url(base_url) if isinstance(base_url, str) else run.base_url
    # The first trace's parameters stand for the run's.
    run.params = run.params or _given(agent.config.sampling)
    for name, reward in trace.rewards.items():
        if reward is not None and reward.weight != 1.0:
            run.notes[f"verifiers weighs {name} with {reward.weight:g}; here a reward is the mean of the scores"] = None
    if (began := moment(trace.timing.start)) is not None:
        run.created_at = min(run.created_at or began, began)
    turns, calls = _turns(trace, paths[-1] if paths else [])
    costs = [turn.cost_usd for turn in turns if turn.cost_usd is not None]
    key = trace.task.key or trace.task.hash or json_text(data)
    # Traces don't number the attempts at a task.
    seen[key] += 1
    system, user = opening(messages)
    info = data.get("info")
    extra = {name: value for name, value in data.items() if name not in OF_TASK | OF_RUNTIME}
    ended = moment(max(trace.timing.agent.end, trace.timing.scoring.end))
    run.finished_at = max(run.finished_at or 0.0, ended or 0.0) or None
    rollout = Rollout(
        id=trace.id,
        row_index=0,
        row_id="",
        run_index=0,
        policy="policy",
        messages=messages,
        finish_reason=_finish(trace),
        duration_ms=trace.timing.agent.milliseconds,
        failure=_failure(trace),
        usage=total(turns),
        turns=turns,
        tool_calls=calls,
        cost_usd=sum(costs) if costs else None,
        agent=AgentReport(
            agent.name,
            trace.stop_condition or "stop",
            metrics=numbers(trace.metrics),
            conversations=conversations[:-1],
        ),
    )
    return Attempt(
        key=key,
        system_prompt=_text(data.get("system_prompt")) or system,
        user_prompt=_text(data.get("prompt")) or user,
        ground_truth=ground_truth(data.get("answer")),
        extra={**(info if isinstance(info, dict) else {}), **extra},
        rollout=rollout,
        scores=[Score(name, reward.score) for name, reward in trace.rewards.items() if reward is not None],
        run_index=seen[key] - 1,
        finished_at=ended,
    )


def _paths(nodes: Sequence[_Node]) -> list[list[int]]:
    """Return the path to each leaf, in the leaves' order; raise BadSampleError if a node comes before its parent."""
    # Parents come first, so that following them always ends.
    for number, node in enumerate(nodes):
        if node.parent is not None and not 0 <= node.parent < number:
            raise BadSampleError(f"node {number} comes before its parent {node.parent}")
    parents = {node.parent for node in nodes}
    paths = []
    for leaf in range(len(nodes)):
        if leaf not in parents:
            path: list[int] = []
            at: int | None = leaf
            while at is not None:
                path.append(at)
                at = nodes[at].parent
            paths.append(path[::-1])
    return paths


def _message(message: _Message) -> Message:
    kept: Message = {"role": message.role, "content": parts_text(message.content)}
    if message.reasoning_content:
        kept["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        kept["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        kept |= {"tool_call_id": message.tool_call_id or "", "name": message.name or ""}
    return kept


def _turns(trace: _Trace, path: Sequence[int]) -> tuple[list[Turn], list[ToolCall]]:
    asked = {call.node: call for call in trace.calls}
    turns: list[Turn] = []
    calls: list[ToolCall] = []
    open_calls: dict[str, ToolCall] = {}
    context: list[int] = []
    for number in path:
        node = trace.nodes[number]
        # Leading replies that weren't sampled are part of the prompt, such as few-shot examples.
        if node.message.role == "assistant" and (node.sampled or number in asked or turns):
            turns.append(_turn(len(turns), node, asked.get(number), context))
            open_calls = {
                call.id: ToolCall(len(turns) - 1, call.id, call.name, call.arguments, 0.0)
                for call in node.message.tool_calls or ()
            }
        elif node.message.role == "tool" and node.message.tool_call_id in open_calls:
            calls.append(open_calls.pop(node.message.tool_call_id or ""))
        context = [*context, *node.token_ids]
    return turns, calls


def _turn(index: int, node: _Node, call: _ModelCall | None, context: Sequence[int]) -> Turn:
    ids = logprobs = None
    if node.token_ids:
        # The tokens that a message adds to the context precede its sampled tokens.
        sampled = sum(node.mask)
        start = len(node.token_ids) - sampled
        ids = TokenIds([*context, *node.token_ids[:start]], node.token_ids[start:])
        if node.logprobs and len(node.logprobs) == sampled:
            # vLLM's notation for a token given by its id.
            pairs = zip(node.token_ids[start:], node.logprobs, strict=True)
            logprobs = Logprobs([TokenLogprob(f"token_id:{token}", value) for token, value in pairs])
    usage = None if call is None else call.usage
    return Turn(
        index=index,
        finish_reason=(call and call.finish_reason) or "unknown",
        usage=Usage() if usage is None else _usage(usage),
        duration_ms=0.0 if call is None else call.time.milliseconds,
        model=None if call is None else call.model,
        params=_given(None if call is None else call.sampling),
        logprobs=logprobs,
        token_ids=ids,
        cost_usd=None if usage is None else usage.cost,
    )


def _usage(usage: _Usage) -> Usage:
    prompt = count_of(usage.prompt_tokens + (usage.cached_input_tokens or 0))
    completion = count_of(usage.completion_tokens)
    return Usage(prompt, completion, prompt + completion)


def _finish(trace: _Trace) -> FinishReason:
    if trace.is_timeout:
        return "timeout"
    if trace.errors or not trace.ok:
        return "error"
    condition = trace.stop_condition or ""
    if condition in ("length", "max_turns", "max_tokens_total", "removed"):
        return condition  # type: ignore[return-value]
    return "stop"


def _failure(trace: _Trace) -> Failure | None:
    if trace.is_timeout:
        return Failure("timeout", trace.stop_condition or "a deadline of verifiers expired", kind="rollout")
    if not trace.errors:
        return None if trace.ok else Failure("agent", trace.stop_condition or "the rollout failed", kind="error")
    last = trace.errors[-1]
    return Failure("agent", f"{last.type}: {last.message}", kind="error", detail=last.traceback)


def _text(prompt: object) -> str:
    """Return a task's prompt: its text, or the last message of its conversation."""
    if isinstance(prompt, list):
        messages = [each for each in prompt if isinstance(each, dict) and each.get("role") == "user"]
        content = messages[-1].get("content") if messages else None
        return content if isinstance(content, str) else json_text(content) if content else ""
    return prompt if isinstance(prompt, str) else ""


def _given(sampling: Mapping[str, object] | None) -> JsonObject:
    return {name: value for name, value in (sampling or {}).items() if value is not None}


FORMAT = ImportFormat(
    name="verifiers",
    description="traces of verifiers 0.4 and prime-rl, traces.jsonl",
    recognises=_recognises,
    read_run=_read,
)
