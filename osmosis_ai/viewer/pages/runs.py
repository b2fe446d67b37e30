"""The list of all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from osmosis_ai.errors import StoreError
from osmosis_ai.store.queries import RunInfo
from osmosis_ai.store.views import RunView, run_view
from osmosis_ai.text import score_number
from osmosis_ai.training.record import TrainingState, find_records
from osmosis_ai.viewer.addresses import Address, run_path, training_path, training_runs
from osmosis_ai.viewer.charts import Chart, Value, line_chart
from osmosis_ai.viewer.rendering import file_name
from osmosis_ai.viewer.site import FIGURES_AT_ONCE, Site
from osmosis_ai.viewer.stores import Repository

__all__ = ["runs_page"]

LISTED_RUNS = 500
"""Runs to list of each repository, the latest."""


class ScoreBar(NamedTuple):
    """A mean score, and its 95 % interval if known."""

    function: str
    mean: float | None
    interval: tuple[float, float] | None

    @property
    def parts(self) -> tuple[float, float, float] | None:
        """The bar's length and the ends of its whiskers, in percent; None if the score is outside 0 to 1."""
        if self.mean is None or not 0 <= self.mean <= 1:
            return None
        low, high = self.interval or (self.mean, self.mean)
        return self.mean * 100, max(low, 0.0) * 100, min(high, 1.0) * 100


class ListedRun(NamedTuple):
    """A run in the list of runs."""

    repository: Repository
    run: RunInfo
    view: RunView
    url: str
    scores: list[ScoreBar]

    @property
    def dataset(self) -> str:
        return file_name(self.view.dataset or "")


class ListedTraining(NamedTuple):
    """A training run in the list of runs; `state` is None if it can't be read."""

    repository: str
    name: str
    url: str
    runs: str
    state: TrainingState | None


class DatasetChart(NamedTuple):
    """A function's mean over the runs of one dataset."""

    dataset: str
    function: str
    functions: list[str]
    line: Chart


def runs_page(site: Site, query: Mapping[str, str]) -> str:
    """Render the list of runs."""
    live = site.stores.version()
    training = query.get("training") or None
    runs = [_listed(site, repository, run) for repository in site.stores
            for run in (repository.listed_runs(LISTED_RUNS, training) if repository.exists else [])]  # fmt: skip
    total = len(runs)
    chart = _chart(runs, query)
    runs = _sorted_runs([run for run in runs if _run_matches(run, query)], query.get("sort", "-when"))
    return site.render(
        "runs.html",
        trainings=_trainings(site),
        runs=runs,
        total=total,
        here=Address("/", query),
        several=len(site.stores) > 1,
        chart=chart,
        live=live,
    )


def _trainings(site: Site) -> list[ListedTraining]:
    """List the training runs, newest first."""
    found = []
    for repository in site.stores:
        for record in find_records(repository.folder):
            try:
                state = record.read()
            except StoreError:
                # Its own page shows the error.
                state = None
            name = record.name
            found.append(
                ListedTraining(repository.name, name, training_path(repository.name, name), training_runs(name), state)
            )
    return sorted(found, key=lambda each: each.state.created_at if each.state else 0.0, reverse=True)


def _listed(site: Site, repository: Repository, run: RunInfo) -> ListedRun:
    view = run_view(run)
    intervals = view.intervals
    means = view.functions
    # It has no summary yet, from which the others' scores come.
    if run.status == "running" and 0 < run.rollouts <= FIGURES_AT_ONCE:
        statistics = site.figures_of(repository, run).statistics
        means = {name: each.mean for name, each in statistics.items()}
        intervals = {name: each.confidence_interval for name, each in statistics.items()}
    scores = [ScoreBar(name, mean, intervals.get(name)) for name, mean in means.items()]
    return ListedRun(repository, run, view, run_path(repository.name, run.id), scores)


def _run_matches(run: ListedRun, query: Mapping[str, str]) -> bool:
    view = run.view
    exact = {"status": view.status, "command": view.command, "model": view.model, "dataset": run.dataset}
    if any(query.get(name) and query[name] != value for name, value in exact.items()):
        return False
    words = " ".join(filter(None, [view.id, *exact.values(), run.repository.name])).lower()
    return all(word in words for word in query.get("q", "").lower().split())


def _sorted_runs(runs: list[ListedRun], sort: str) -> list[ListedRun]:
    keys: dict[str, Callable[[ListedRun], Any]] = {
        "when": lambda run: run.run.created_at,
        "status": lambda run: run.view.status,
        "command": lambda run: run.view.command,
        "model": lambda run: run.view.model or "",
        "dataset": lambda run: run.dataset,
        "rollouts": lambda run: run.view.rollouts,
        "failed": lambda run: run.view.failed,
        "score": lambda run: ((means := [bar.mean or 0.0 for bar in run.scores]) and sum(means) / len(means)) or 0.0,
        "cost": lambda run: run.view.cost_usd or 0.0,
    }
    return sorted(runs, key=keys.get(sort.removeprefix("-"), keys["when"]), reverse=sort.startswith("-"))


def _chart(runs: Sequence[ListedRun], query: Mapping[str, str]) -> DatasetChart | None:
    """Lay out the chart of the dataset that the query names, else of the newest one with two scored runs."""
    by_dataset: dict[str, list[ListedRun]] = {}
    for run in runs:
        if run.dataset and any(bar.parts for bar in run.scores):
            by_dataset.setdefault(run.dataset, []).append(run)
    dataset = query.get("dataset") or next((name for name, found in by_dataset.items() if len(found) > 1), "")
    # Runs are listed newest first, but charted from left to right.
    found = by_dataset.get(dataset, [])[::-1][-100:]
    functions = list(dict.fromkeys(bar.function for run in found for bar in run.scores))
    if len(found) < 2 or not functions:
        return None
    function = query["fn"] if query.get("fn") in functions else functions[0]
    scored = [(run, bar) for run in found for bar in run.scores if bar.function == function and bar.parts]
    if len(scored) < 2:
        return None
    values = []
    for index, (run, bar) in enumerate(scored):
        mean, low, high = (part / 100 for part in bar.parts or ())
        values.append(Value(index, mean, f"{run.view.id}: {score_number(mean)}", run.url, (low, high)))
    ends = f"from {score_number(values[0].value)} to {score_number(values[-1].value)}"
    line = line_chart(f"Mean of {function} over {len(values)} runs, {ends}", values)
    return None if line is None else DatasetChart(dataset, function, functions, line)
