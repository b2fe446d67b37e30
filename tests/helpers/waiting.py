"""Wait for conditions, never for a clock."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

PATIENCE = 30.0
"""Seconds after which a condition that should come true never will."""


def eventually(condition: Callable[[], Any], failure: Callable[[], str] = lambda: "it never came true") -> Any:
    """Wait until a condition is true and give what it gave.

    Raises:
        AssertionError: It isn't within `PATIENCE` seconds.
    """
    deadline = monotonic() + PATIENCE
    while not (value := condition()):
        assert monotonic() < deadline, failure()
        sleep(0.02)
    return value
