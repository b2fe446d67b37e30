"""Measure a rollout's model calls, for the trajectory files that rollout servers write.

Only the host of the model knows the tokens and times. Servers since 0.3.0 read them from the answers to their
callbacks.
"""

from __future__ import annotations

import math

from osmosis_ai.records import Completion, JsonObject

__all__ = ["CallFigures"]


class CallFigures:
    """One rollout's model calls by sample, in order. `name` is used for a rollout's only sample."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._samples: dict[str, list[JsonObject]] = {}

    def add(self, sample: str | None, completion: Completion) -> None:
        """Add a call."""
        self._samples.setdefault(sample or self._name, []).append(_figures(completion))

    def acknowledgement(self) -> JsonObject:
        """Return the answer to a callback, which `rollout.trajectory.report_from_response` reads."""
        if not self._samples:
            return {}
        return {"trajectory": {"samples": {name: {"llm_call_metrics": calls} for name, calls in self._samples.items()}}}


def _figures(completion: Completion) -> JsonObject:
    usage, ids, logprobs = completion.usage, completion.token_ids, completion.logprobs
    chosen = [each.logprob for each in (logprobs.content if logprobs else None) or ()]
    figures: JsonObject = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost_usd": 0.0 if completion.cached else completion.cost_usd,
        "model_name": completion.model,
        "prompt_token_ids": ids.prompt_token_ids if ids else None,
        "completion_token_ids": ids.token_ids if ids else None,
        # JSON has no infinity, and dropping a single value would shift the others to the wrong tokens.
        "logprobs": chosen if chosen and all(map(math.isfinite, chosen)) else None,
    }
    return {name: value for name, value in figures.items() if value is not None}
