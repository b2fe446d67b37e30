"""Who hears of the requests that judges get. Imports nothing heavy: every scorer uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from osmosis_ai.records import JudgeCall

__all__ = ["judge_call_listeners", "trace_judge_calls"]

_listeners: ContextVar[tuple[list[JudgeCall], ...]] = ContextVar("judge_call_listeners", default=())


@contextmanager
def trace_judge_calls() -> Iterator[list[JudgeCall]]:
    """Collect the requests that `evaluate_rubric` and `aevaluate_rubric` make inside the block, in order of their end.

    Tasks started in the block are heard of too, and threads that run in a copy of its context
    (`contextvars.copy_context`, `asyncio.to_thread`).
    """
    calls: list[JudgeCall] = []
    token = _listeners.set((*_listeners.get(), calls))
    try:
        yield calls
    finally:
        _listeners.reset(token)


def judge_call_listeners() -> tuple[list[JudgeCall], ...]:
    """The lists that want to hear of the judge calls made in this context."""
    return _listeners.get()
