"""Convert a sample's messages to a trajectory: OpenAI's chat messages, its Responses items, and Strands' blocks.

The format, ATIF, is that of Harbor's trajectory files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from osmosis_ai import __version__
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.rollout.trajectory.report import LlmCallMetrics, SampleReport
from osmosis_ai.rollout.types import RolloutSample
from osmosis_ai.wire_json import decode_json

__all__ = ["Trajectory", "convert_sample_to_trajectory"]

PRODUCER = "osmosis-rollout-sdk"
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_TOTALS = {
    "total_prompt_tokens": "prompt_tokens",
    "total_completion_tokens": "completion_tokens",
    "total_cached_tokens": "cached_tokens",
    "total_cost_usd": "cost_usd",
}


class Trajectory(Record, frozen=True, omit_defaults=False):
    """A trajectory document. Steps and metrics are JSON objects with the format's own keys."""

    session_id: str
    trajectory_id: str
    agent: JsonObject
    steps: list[JsonObject]
    final_metrics: JsonObject
    extra: JsonObject
    schema_version: str = "ATIF-v1.7"

    def to_json_dict(self) -> JsonObject:
        """Return the document as plain data."""
        return {"schema_version": self.schema_version, **msgspec.structs.asdict(self)}


def convert_sample_to_trajectory(
    sample: RolloutSample,
    *,
    rollout_id: str,
    request_label: str | None = None,
    request_metadata: JsonObject | None = None,
    request_extra_fields: JsonObject | None = None,
    report: SampleReport | None = None,
    default_model_name: str | None = None,
    unmatched_sample_reports: Mapping[str, SampleReport] | None = None,
) -> Trajectory:
    """Convert a sample to a trajectory.

    Args:
        sample: The sample, with `trajectory_messages`.
        rollout_id: The rollout's id.
        request_label: The label of its request, for a sample without one.
        request_metadata: The metadata of its request.
        request_extra_fields: Further fields of its request.
        report: Measurements of the model calls. They are matched to the agent's steps if the numbers of both agree.
        default_model_name: The model, if the report doesn't name it.
        unmatched_sample_reports: Reports that can't be matched to a sample.

    Raises:
        ValueError: The sample has no `trajectory_messages`.
    """
    if sample.trajectory_messages is None:
        raise ValueError("the sample has no trajectory messages")
    sample = sample.json_safe_copy()
    steps = _steps(sample.trajectory_messages or [])
    unmatched = _add_metrics(steps, report)
    known = {
        "rollout_id": rollout_id,
        "label": request_label if sample.label is None else sample.label,
        "reward": sample.reward,
        "sample_metrics": sample.metrics or None,
        "sample_extra_fields": sample.extra_fields or None,
        "request_metadata": request_metadata,
        "request_extra_fields": request_extra_fields,
        "unmatched_llm_call_metrics": unmatched,
        "unmatched_sample_reports": {
            name: each.model_dump(exclude_none=True) for name, each in (unmatched_sample_reports or {}).items()
        }
        or None,
    }
    model = (report.model_name if report else None) or default_model_name
    return Trajectory(
        session_id=rollout_id,
        trajectory_id=rollout_id,
        agent=_present({"name": PRODUCER, "version": __version__, "model_name": model}),
        steps=steps,
        final_metrics={**_totals(report), "total_steps": len(steps)},
        extra={"osmosis": _present(known)},
    )


def _present(fields: Mapping[str, object]) -> JsonObject:
    return {name: value for name, value in fields.items() if value is not None}


def _steps(messages: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    steps: list[JsonObject] = []
    for message in messages:
        kind = message.get("type")
        if message.get("role") in ("tool", "function"):
            _observe(steps, message.get("tool_call_id"), _text(message.get("content")))
        elif isinstance(kind, str) and kind != "message":
            _add_item(steps, kind, message)
        else:
            _add_message(steps, message)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    # The step number comes first, because people read these files.
    return [{"step_id": step["step_id"], **step} for step in steps]


def _add_message(steps: list[JsonObject], message: Mapping[str, Any]) -> None:
    """Add a chat message, or a Strands message, whose content is a list of blocks."""
    role = str(message.get("role", ""))
    source = _SOURCES.get(role)
    content = message.get("content")
    blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    results = [block["toolResult"] for block in blocks if isinstance(block.get("toolResult"), Mapping)]
    for result in results:
        _observe(steps, result.get("toolUseId"), _text(result.get("content")))
    rest = [block for block in blocks if not {"toolUse", "toolResult", "reasoningContent"} & block.keys()]
    # Strands sends tool results as a user's message.
    if results and not rest:
        return
    reasoning = message.get("reasoning_content") or _reasoning(blocks)
    calls = _calls(message, blocks)
    is_agent = source == "agent"
    fields = {"reasoning_content": reasoning, "tool_calls": calls or None}
    usage = _usage(message) if is_agent else None
    # The format has no other sources, so another role is kept beside one of them.
    extra = {} if source else {"original_role": role}
    step = _present(
        {
            "source": source or "user",
            "message": _text(rest if blocks else content),
            "timestamp": _timestamp(message),
            "model_name": message.get("model") or message.get("model_name") if is_agent else None,
            "metrics": usage,
            "llm_call_count": 1 if usage else None,
            # The format has them on agent steps only.
            **(fields if is_agent else {}),
            "extra": {**extra, **({} if is_agent else _present(fields))} or None,
        }
    )
    # In the Responses API, the reasoning of a reply is an item of its own, before its message.
    if is_agent and message.get("type") == "message" and _is_reasoning(steps):
        steps[-1].update(step)
    else:
        steps.append(step)


def _is_reasoning(steps: Sequence[JsonObject]) -> bool:
    """Return True if the last step holds only the reasoning of a reply."""
    return bool(steps) and steps[-1].keys() == {"source", "message", "reasoning_content"} and not steps[-1]["message"]


def _add_item(steps: list[JsonObject], kind: str, item: Mapping[str, Any]) -> None:
    """Add an item of the Responses API that isn't a message."""
    if kind.endswith("_call_output"):
        _observe(steps, item.get("call_id"), _text(item.get("output")))
        return
    last = steps[-1] if steps else None
    # The items of one reply follow each other.
    is_open = last is not None and last["source"] == "agent" and "observation" not in last
    step: JsonObject = last if is_open and last is not None else {"source": "agent", "message": ""}
    if kind == "reasoning":
        # Reasoning comes first in a reply.
        step = {
            "source": "agent",
            "message": "",
            "reasoning_content": _text(item.get("summary") or item.get("content")),
        }
    elif kind == "function_call":
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments"), 0)
        step["tool_calls"] = [*step.get("tool_calls", []), call]
    else:
        step["extra"] = {"items": [*step.get("extra", {}).get("items", []), dict(item)]}
    if step is not last:
        steps.append(step)


def _observe(steps: list[JsonObject], call_id: object, content: str) -> None:
    """Add a tool's result to the agent's step before it."""
    last = steps[-1] if steps and steps[-1]["source"] == "agent" else None
    calls = last.get("tool_calls", []) if last else []
    if any(call["tool_call_id"] == call_id for call in calls):
        result: JsonObject = {"source_call_id": call_id, "content": content}
    else:
        result = {"content": content, "extra": {"tool_call_id": call_id}}
    # The format holds results on steps only, so one without a reply before it gets a step of its own.
    if last is None:
        last = {"source": "system", "message": "", "extra": {"original_role": "tool"}}
        steps.append(last)
    last.setdefault("observation", {"results": []})["results"].append(result)


def _calls(message: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    raw = message.get("tool_calls")
    found = [call for call in raw if isinstance(call, Mapping)] if isinstance(raw, list) else []
    calls = []
    for index, call in enumerate(found):
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        calls.append(_call(call.get("id"), function.get("name"), function.get("arguments"), index))
    uses = [block["toolUse"] for block in blocks if isinstance(block.get("toolUse"), Mapping)]
    return calls + [_call(use.get("toolUseId"), use.get("name"), use.get("input"), i) for i, use in enumerate(uses)]


def _call(call_id: object, name: object, arguments: object, index: int) -> JsonObject:
    if isinstance(arguments, str) and arguments:
        try:
            parsed = decode_json(arguments)
        except ValueError:
            parsed = None
        # The format takes an object only.
        arguments = parsed if isinstance(parsed, dict) else {"_raw": arguments}
    return {
        "tool_call_id": str(call_id or f"call_{index}"),
        "function_name": str(name or "unknown"),
        "arguments": dict(arguments) if isinstance(arguments, Mapping) else {},
    }


def _reasoning(blocks: Sequence[Mapping[str, Any]]) -> str | None:
    found = [block["reasoningContent"] for block in blocks if "reasoningContent" in block]
    texts = [each.get("reasoningText", each) if isinstance(each, Mapping) else each for each in found]
    return "\n".join(_text([each]) for each in texts) or None


def _text(content: object) -> str:
    """Return content as text: its text parts if there are no others, otherwise JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "\n".join(map(str, texts))
    return json.dumps(content, ensure_ascii=False, default=str)


def _timestamp(message: Mapping[str, Any]) -> str | None:
    for name in ("created_at", "timestamp", "completed_at"):
        value = message.get(name)
        try:
            if isinstance(value, str):
                # Python 3.10 doesn't read the Z.
                return datetime.fromisoformat(value.replace("Z", "+00:00")).isoformat()
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return datetime.fromtimestamp(value, tz=timezone.utc).isoformat()
        except (ValueError, OverflowError, OSError):
            continue
    return None


def _usage(message: Mapping[str, Any]) -> JsonObject | None:
    """Return the token counts on a message, in the names of either of OpenAI's APIs."""
    usage = message.get("usage")
    if not isinstance(usage, Mapping):
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    found = {
        "prompt_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "completion_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
        "cached_tokens": usage.get("cached_tokens", cached),
        "cost_usd": usage.get("cost_usd"),
    }
    return {name: value for name, value in found.items() if isinstance(value, (int, float))} or None


def _add_metrics(steps: Sequence[JsonObject], report: SampleReport | None) -> list[JsonObject] | None:
    """Add the measurements of the model calls to the agent's steps; return them if the numbers of both differ."""
    calls = report.llm_call_metrics if report else []
    agent_steps = [step for step in steps if step["source"] == "agent"]
    if len(calls) != len(agent_steps):
        return [call.model_dump(exclude_none=True) for call in calls] or None
    for step, call in zip(agent_steps, calls, strict=True):
        # The controller's measurements win over what the message says.
        metrics = {**step.get("metrics", {}), **call.model_dump(exclude={"model_name"}, exclude_none=True)}
        if metrics:
            step["metrics"] = metrics
        if call.model_name:
            step["model_name"] = call.model_name
        step["llm_call_count"] = 1
    return None


def _totals(report: SampleReport | None) -> JsonObject:
    """Return the controller's totals, or the sums over its calls if it gives none."""
    if report is None:
        return {}
    if report.final_metrics:
        given = {name: report.final_metrics[name] for name in _TOTALS if report.final_metrics.get(name) is not None}
        if given:
            return given
    return _present({total: _sum(report.llm_call_metrics, name) for total, name in _TOTALS.items()})


def _sum(calls: Sequence[LlmCallMetrics], name: str) -> float | None:
    values = [value for call in calls if (value := getattr(call, name)) is not None]
    return sum(values) if values else None
