"""What counts as a number in rubrics, records and replies."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["finite_number"]


def finite_number(value: Any) -> float | None:
    """The value as a float; None when it is no number (a boolean isn't one), not finite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
