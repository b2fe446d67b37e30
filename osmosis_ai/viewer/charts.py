"""Line charts of a metric over runs or steps, in SVG coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Chart", "Value", "line_chart"]

TOP, BOTTOM = 10, 110


class Value(NamedTuple):
    """A value in a chart: its position from left to right, label, link, and 95 % interval if known."""

    at: float
    value: float
    title: str
    url: str = ""
    interval: tuple[float, float] | None = None


class Point(NamedTuple):
    """A value in the chart's coordinates."""

    x: float
    y: float
    low: float
    high: float
    title: str
    url: str


class Chart(NamedTuple):
    """A line through points. `ticks` holds heights with their labels; the grid starts at `left`."""

    label: str
    width: int
    left: int
    ticks: list[tuple[float, str]]
    points: list[Point]


def line_chart(
    label: str,
    values: Sequence[Value],
    low: float = 0,
    high: float = 1,
    *,
    ends: tuple[float, float] | None = None,
    width: int = 600,
    left: int = 14,
) -> Chart | None:
    """Lay out values on an axis from `low` to `high`; return None without values, or if the axis isn't finite.

    `ends` are the positions at the left and right end, by default those of the first and the last value.
    """
    # A trainer's metrics may be infinite or NaN, which no comparison holds for.
    if not values or not 0 < high - low < math.inf:
        return None
    first, last = ends or (values[0].at, values[-1].at)
    span = last - first

    def height(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    points = []
    for each in values:
        x = left + 4 + (width - left - 16) * ((each.at - first) / span if span else 0)
        ends = each.interval or (each.value, each.value)
        points.append(Point(x, height(each.value), height(ends[0]), height(ends[1]), each.title, each.url))
    ticks = [(height(value), f"{value:.3g}") for value in (high, low + (high - low) / 2, low)]
    return Chart(label, width, left, ticks, points)
