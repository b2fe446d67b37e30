"""A training run's page: its state, and its metrics over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from osmosis_ai.training.record import MetricsLine, evaluation_run, step_run
from osmosis_ai.viewer.addresses import Address, number, run_path, training_path, training_runs
from osmosis_ai.viewer.charts import Chart, Value, line_chart
from osmosis_ai.viewer.site import Site

__all__ = ["training_page"]

PAGE_STEPS = 50
MAX_POINTS = 300
MAX_SERIES = 100
"""A trainer may report any number of metrics."""
SHOWN_ROWS = 200
TITLES = {
    ("rollouts", "reward"): "reward",
    ("evaluation", "reward"): "reward on held-out rows",
    ("rollouts", "groups_with_variance"): "share of groups with variance",
    ("trainer", "loss"): "loss",
}
"""The metrics to show first."""
KINDS = ("rollouts", "trainer", "evaluation")
"""The order of the other metrics."""
SHARES = ("reward", "groups_with_variance", "frac_groups_trained", "sampled_share")
"""Metrics charted on an axis from 0 to 1, unless a value is outside it."""


class Series(NamedTuple):
    """A metric over the steps."""

    kind: str
    name: str
    title: str
    values: dict[int, float]
    chart: Chart | None

    @property
    def latest(self) -> float:
        """The value of the last step that has one."""
        return next(reversed(self.values.values()))


def training_page(site: Site, repository: str, name: str, query: Mapping[str, str]) -> str:
    """Render a training run: its state, its metrics over the steps, and its checkpoints."""
    live = site.stores.version()
    record = site.stores.get(repository).training(name)
    state, lines = record.read(), record.metrics()
    urls: dict[tuple[str, int], str] = {
        (line.kind, line.step): _run_url(repository, name, line) for line in lines if line.kind != "trainer"
    }
    steps = sorted({line.step for line in lines}, reverse=True)
    ends = (steps[-1], steps[0]) if steps else (0, 0)
    series = _series(lines, urls, ends)
    offset = min(number(query.get("offset")), max(len(steps) - 1, 0))
    return site.render(
        "training.html",
        name=name,
        state=state,
        main=[each for each in series if (each.kind, each.name) in TITLES],
        more=[each for each in series if (each.kind, each.name) not in TITLES],
        series=series,
        urls=urls,
        steps=steps[offset : offset + PAGE_STEPS],
        count=len(steps),
        ends=ends,
        offset=offset,
        page_steps=PAGE_STEPS,
        shown_rows=SHOWN_ROWS,
        here=Address(training_path(repository, name), query),
        runs=training_runs(name),
        live=live,
    )


def _run_url(repository: str, name: str, line: MetricsLine) -> str:
    named = evaluation_run if line.kind == "evaluation" else step_run
    return run_path(repository, named(name, line.step))


def _series(lines: Sequence[MetricsLine], urls: Mapping[tuple[str, int], str], ends: tuple[int, int]) -> list[Series]:
    # Filled in the order of display: the titles, then the kinds.
    found: dict[tuple[str, str], dict[int, float]] = {key: {} for key in TITLES}
    for line in sorted(lines, key=lambda line: KINDS.index(line.kind)):
        for name, value in line.metrics.items():
            found.setdefault((line.kind, name), {})[line.step] = value
    # A trainer may report back the metrics that the rollouts already have.
    kept = {
        key: values
        for key, values in found.items()
        if values and not (key[0] == "trainer" and found.get(("rollouts", key[1])))
    }
    series = []
    for (kind, name), values in list(kept.items())[:MAX_SERIES]:
        title = TITLES.get((kind, name)) or (f"held-out {name}" if kind == "evaluation" else name)
        links = {step: urls[kind, step] for step in values} if name == "reward" and kind != "trainer" else {}
        series.append(Series(kind, name, title, values, _chart(name, title, values, links, ends)))
    return series


def _chart(
    name: str, title: str, values: Mapping[int, float], links: Mapping[int, str], ends: tuple[int, int]
) -> Chart | None:
    shown = list(_thinned(list(values.items()), links))
    low, high = min(each.value for each in shown), max(each.value for each in shown)
    if name in SHARES and low >= 0 and high <= 1:
        low, high = 0, 1
    elif low == high:
        # A constant metric needs an axis with some height, which puts its line in the middle.
        low, high = low - (abs(low) or 1), high + (abs(high) or 1)
    told = f"{shown[0].value:.4g} at first, {shown[-1].value:.4g} at last"
    label = f"{title} from step {min(values)} to {max(values)}: {told}"
    return line_chart(label, shown, low, high, ends=ends, width=360, left=58)


def _thinned(values: Sequence[tuple[int, float]], links: Mapping[int, str]) -> list[Value]:
    """Return one value per step; for more than `MAX_POINTS` steps, means over that many parts."""
    size = math.ceil(len(values) / MAX_POINTS)
    shown = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        last, mean = part[-1][0], sum(value for _, value in part) / len(part)
        what = f"step {last}" if len(part) == 1 else f"mean of steps {part[0][0]} to {last}"
        shown.append(Value(last, mean, f"{what}: {mean:.4g}", links.get(last, "")))
    return shown
