"""Let a function explain its score, beside the explanations of judges that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["explain", "explanations"]

_listeners: ContextVar[list[str] | None] = ContextVar("score_explanations", default=None)


def explain(text: str) -> None:
    """Say why the running function scores as it does; outside of scoring, do nothing."""
    listener = _listeners.get()
    if listener is not None:
        listener.append(text)


@contextmanager
def explanations() -> Iterator[list[str]]:
    """Collect what the functions called in the block explain."""
    found: list[str] = []
    token = _listeners.set(found)
    try:
        yield found
    finally:
        _listeners.reset(token)
