"""The garbage collector of a process that has hundreds of rollouts under way."""

from __future__ import annotations

import gc

__all__ = ["calm_collector"]

NEW_OBJECTS_PER_ROLLOUT = 100
"""With so many new objects for each rollout under way the collector looks for garbage among them."""


def calm_collector(rollouts: int = 0) -> None:
    """Have the collector leave what exists now alone, and look at all the rest less often.

    What is loaded stays to the end, and of rollouts under way hardly anything is garbage: with Python's own thresholds
    a worker spends a fifth of its time, and more the more rollouts it has at a time, on looking through them.
    """
    gc.freeze()
    gc.set_threshold(max(10_000, NEW_OBJECTS_PER_ROLLOUT * rollouts), 20, 50)
