"""Wait for conditions instead of sleeping."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

PATIENCE = 30.0
"""Seconds after which a condition counts as never becoming true."""


def eventually(
    condition: Callable[[], Any], failure: Callable[[], str] = lambda: "it never came true", patience: float = PATIENCE
) -> Any:
    """Wait until a condition is true and return its value.

    Raises:
        AssertionError: It didn't become true within so many seconds.
    """
    deadline = monotonic() + patience
    while not (value := condition()):
        assert monotonic() < deadline, failure()
        sleep(0.02)
    return value
