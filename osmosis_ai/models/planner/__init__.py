"""`offline/planner`: a deterministic rule-based policy that needs no network.

A stand-in for a model, good enough to run a repository's tools without a key: it reads the tools' schemas and the
prompt, calls what fits, and answers in the form that is asked for.
"""

from __future__ import annotations

from typing import Any

from osmosis_ai.records import Completion, Message, Tool

from .policy import plan

__all__ = ["PlannerModel", "plan"]


class PlannerModel:
    """The planner as a `ChatModel`. It counts no tokens: there are none."""

    async def complete(self, messages: list[Message], tools: list[Tool], params: dict[str, Any]) -> Completion:
        """Return the next assistant message.

        Args:
            messages: The conversation so far, in the OpenAI chat format.
            tools: The tools that may be called.
            params: Sampling parameters, which mean nothing here.
        """
        message = plan(messages, tools)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        return Completion(message=message, finish_reason=reason, model="offline/planner", cost_usd=0.0)

    async def aclose(self) -> None:
        """Release nothing: there are no connections."""
