"""Assemble a rollout from its worker's events, and tell what it is waiting for at any moment."""

from __future__ import annotations

from time import monotonic

import msgspec

from osmosis_ai.bounds import MAX_COUNT
from osmosis_ai.records import (
    AgentReport,
    Failure,
    FinishReason,
    Message,
    Record,
    Rollout,
    ToolCall,
    Turn,
    Usage,
    opening_messages,
)
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.worker.deadlines import elapsed_ms

__all__ = ["TrajectoryBuilder", "total_cost", "total_usage"]


def total_usage(turns: list[Turn]) -> Usage:
    """Add up the tokens of these model calls; a cached reply costs none."""
    paid = [turn.usage for turn in turns if not turn.cached]
    # An endpoint may claim any number; the sum must still be a count.
    return Usage(
        min(sum(usage.prompt_tokens for usage in paid), MAX_COUNT),
        min(sum(usage.completion_tokens for usage in paid), MAX_COUNT),
        min(sum(usage.total_tokens for usage in paid), MAX_COUNT),
    )


def total_cost(turns: list[Turn]) -> float | None:
    """Add up the cost of these model calls in USD, None if none has a known price; a cached reply costs nothing."""
    known = [0.0 if turn.cached else turn.cost_usd for turn in turns if turn.cost_usd is not None]
    return sum(known) if known else None


class _Function(Record, frozen=True):
    name: str
    # A conversation that an agent loop made up may lack them.
    arguments: str = ""


class _Call(Record, frozen=True):
    """A tool call in a message."""

    id: str
    function: _Function


class TrajectoryBuilder:
    """One rollout in flight."""

    def __init__(self, job: protocol.RolloutJob) -> None:
        self.job = job
        # `resume` moves it forward by the length of each pause.
        self._started = monotonic()
        self.restart()

    def restart(self) -> None:
        """Forget all events, because the rollout starts over in another worker."""
        self._messages = opening_messages(self.job.row)
        self._results: dict[str, Message] = {}
        self._open_calls: dict[str, _Call] = {}
        self._asked = 0.0
        self._paused: float | None = None
        self._turns: list[Turn] = []
        self._calls: list[ToolCall] = []
        self._samples: list[Turn] = []
        self._acting = False

    @property
    def open_tools(self) -> list[str]:
        """Names of the running tools; while there are any, the rollout is inside user code."""
        return [call.function.name for call in self._open_calls.values()]

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the start, without pauses."""
        return ((self._paused or monotonic()) - self._started) * 1000

    @property
    def waiting_on(self) -> str:
        """The tool, loop or model call that the rollout is waiting for, in words."""
        if self._open_calls:
            return "tool " + ", ".join(sorted(set(self.open_tools)))
        if self._acting:
            return "the agent loop"
        return f"the model (turn {len(self._turns) + 1})"

    def add(self, event: protocol.Progress) -> None:
        """Process an event; raise ValidationError if its tool calls aren't tool calls."""
        if isinstance(event, protocol.TurnDone):
            # Appended only now, because the calls of a turn may end in any order.
            open_calls = msgspec.convert(event.message.get("tool_calls") or [], list[_Call])
            self._flush_results()
            self._turns.append(event.turn)
            self._messages.append(event.message)
            self._asked = monotonic()
            self._open_calls = {call.id: call for call in open_calls}
        elif isinstance(event, protocol.CallDone):
            self._open_calls.pop(event.call.id, None)
            # An edited result replaces the call's first record.
            if event.call.edited:
                edited = (event.call.turn, event.call.id)
                self._calls = [call for call in self._calls if (call.turn, call.id) != edited]
            self._calls.append(event.call)
            self._results[event.call.id] = event.message
        elif isinstance(event, protocol.Asked):
            self._messages[event.kept :] = event.messages
            self._calls.extend(event.calls)
            self._open_calls.clear()
            # The loop's messages include its results.
            self._results.clear()
            self._acting = False
        elif isinstance(event, protocol.Acting):
            self._acting = True
        elif isinstance(event, protocol.SampleDone):
            self._samples.append(event.turn)
        elif isinstance(event, protocol.Reworded):
            self._messages = list(event.messages)
            # The new messages include the last turn's results.
            self._results.clear()
        elif isinstance(event, protocol.Paused):
            self._paused = monotonic()

    def resume(self) -> None:
        """Continue after a pause."""
        if self._paused is not None:
            self._started += monotonic() - self._paused
            self._paused = None

    def finish(self, done: protocol.RolloutDone) -> Rollout:
        """Return the finished rollout."""
        rollout = self._build(done.finish_reason, done.duration_ms, done.failure, done.agent)
        return rollout if done.messages is None else msgspec.structs.replace(rollout, messages=done.messages)

    def abandon(self, failure: Failure) -> Rollout:
        """Return the rollout so far, with a failure, if no worker can finish it."""
        finish_reason: FinishReason = "timeout" if failure.origin == "timeout" else "error"
        return self._build(finish_reason, self.elapsed_ms, failure)

    def _build(
        self, finish_reason: FinishReason, duration_ms: float, failure: Failure | None, agent: AgentReport | None = None
    ) -> Rollout:
        calls = [*self._calls, *self._cut_off(failure)]
        self._flush_results()
        job = self.job
        model_calls = self._turns + self._samples
        return Rollout(
            id=job.id,
            row_index=job.row.index,
            row_id=job.row.id,
            run_index=job.run_index,
            policy=job.policy,
            messages=self._messages,
            finish_reason=finish_reason,
            duration_ms=round(duration_ms, 3),
            failure=failure,
            usage=total_usage(model_calls),
            turns=self._turns,
            tool_calls=calls,
            samples=self._samples,
            cost_usd=total_cost(model_calls),
            agent=agent,
        )

    def _cut_off(self, failure: Failure | None) -> list[ToolCall]:
        """Return the calls that were running when the rollout failed."""
        if failure is None:
            return []
        took = elapsed_ms(self._asked)
        turn = self._turns[-1].index if self._turns else 0
        return [
            ToolCall(turn, call.id, call.function.name, call.function.arguments, took, failure.origin)
            for call in self._open_calls.values()
        ]

    def _flush_results(self) -> None:
        """Append the last turn's results in the order of its calls, whatever order they arrived in."""
        # Without results, don't look at the message: an agent loop's may have any form, and include its results.
        for call in self._messages[-1].get("tool_calls") or () if self._results else ():
            result = self._results.pop(call["id"], None)
            if result is not None:
                self._messages.append(result)
        self._results.clear()
        self._open_calls.clear()
