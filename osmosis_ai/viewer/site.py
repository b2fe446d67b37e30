"""The parts that all pages share: the stores, the templates, and cached results computed from runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from osmosis_ai.errors import StoreError
from osmosis_ai.masking import Masker
from osmosis_ai.records import Outcome
from osmosis_ai.reward_fn.statistics import FunctionStatistics, summarize
from osmosis_ai.store.browsing import VERDICTS, FailureGroup, RowFilter, RunTotals, Selection
from osmosis_ai.store.compare import compare_runs
from osmosis_ai.store.queries import RolloutFilter, RunInfo, ScoredRollout
from osmosis_ai.store.views import ComparedRuns
from osmosis_ai.viewer.addresses import decimal
from osmosis_ai.viewer.rendering import environment, is_markup, shown
from osmosis_ai.viewer.stores import Repository, Stores

__all__ = ["FIGURES_AT_ONCE", "Figures", "Site", "functions_of"]

FIGURES_AT_ONCE = 3000
"""Largest number of rollouts for which a run's page includes the statistics; larger runs load them afterwards."""

COMPARED_RUNS = 50


class Figures(NamedTuple):
    """Statistics of a run's scores and calls."""

    totals: RunTotals
    statistics: dict[str, FunctionStatistics]
    histograms: dict[str, Any]
    tools: list[Any]
    failures: list[FailureGroup]


class Site:
    """Renders the pages of a viewer. Thread-safe; raises StoreError if something doesn't exist.

    `masker` masks keys in text that users write. With `masked`, it also masks keys in what pages show, which may not
    have been known when the run was stored.
    """

    def __init__(self, stores: Stores, masker: Masker, *, masked: bool = False) -> None:
        self.stores = stores
        self.masker = masker
        self._templates = environment()
        if masked:
            mask = masker.text
            self._templates = self._templates.overlay(
                finalize=lambda value: shown(mask(value) if isinstance(value, str) and not is_markup(value) else value)
            )

    def render(self, template: str, **values: Any) -> str:
        """Render a template."""
        return self._templates.get_template(template).render(**values)

    def error(self, message: str) -> str:
        """Render a page with an error message."""
        return self.render("error.html", message=message, live="")

    def find(self, repository: str, name: str) -> tuple[Repository, RunInfo]:
        """Return a repository, and its run with this name, id or prefix of an id."""
        store = self.stores.get(repository)
        return store, store.runs.find_run(name)

    def select(self, store: Repository, run: RunInfo, wanted: RowFilter) -> Selection:
        """Return the rows that a filter selects."""
        if wanted.status in VERDICTS:
            # Not cached, because users give verdicts even on a run that has ended.
            return store.runs.select(run.id, wanted, run.pass_threshold)
        return store.kept(("rows", run.id, wanted), run, lambda: store.runs.select(run.id, wanted, run.pass_threshold))

    def figures_of(self, store: Repository, run: RunInfo) -> Figures:
        """Return the statistics of a run's scores and calls, computed or cached."""

        def compute() -> Figures:
            runs = store.runs
            histograms = runs.histograms(run.id)
            names = dict.fromkeys([*functions_of(run, None), *histograms])
            errors = {each.function: each.errors for each in runs.function_totals(run.id)}
            bound = run.pass_threshold
            statistics = {
                name: summarize(runs.scores_by_row(run.id, name), bound, scoring_errors=errors.get(name, 0))
                for name in names
            }
            failures = runs.failure_groups(run.id)
            return Figures(runs.run_totals(run.id), statistics, histograms, runs.tool_totals(run.id), failures)

        return store.kept(("figures", run.id), run, compute)

    def compared(self, store: Repository, a: RunInfo, b: RunInfo, query: Mapping[str, str] = {}) -> ComparedRuns:
        """Compare two runs; `query` may have a `threshold`."""
        threshold = decimal(query.get("threshold"))
        threshold = b.pass_threshold if threshold is None else threshold
        # `kept` watches the run that may still change; the key holds the state of the other one.
        running, other = (a, b) if a.alive else (b, a)
        key = ("compared", a.id, b.id, threshold, other.rollouts, other.finished_at, repr(other.summary))
        return store.kept(key, running, lambda: compare_runs(store.runs, a, b, threshold))

    def flips(self, store: Repository, a: RunInfo, b: RunInfo, query: Mapping[str, str]) -> list[int]:
        """Return the rows of run `a` that flipped, by the function that the query names or else the first one."""
        functions = self.compared(store, a, b, query).functions
        function = query["fn"] if query.get("fn") in functions else next(iter(functions), None)
        return [] if function is None else [flip.row_index for flip in functions[function].flips]

    def others(self, store: Repository, run: RunInfo) -> list[RunInfo]:
        """Return the latest runs to compare a run with; for a run of a training run, those of the same training run."""
        return [each for each in store.listed_runs(COMPARED_RUNS, store.training_of(run)) if each.id != run.id]

    def rollout(self, store: Repository, run: RunInfo, row: int, chosen: Outcome) -> ScoredRollout:
        """Return a rollout with its trajectory."""
        wanted = RolloutFilter(row=row, run_index=chosen.run_index)
        for scored in store.runs.scored(run.id, wanted, with_trajectory=True):
            if scored.stored.rollout.policy == chosen.policy:
                return scored
        raise StoreError(f"row {row} of run {run.id} was removed in the meantime")


def functions_of(run: RunInfo, figures: Figures | None) -> list[str]:
    """Return the functions that score a run: those it started with, and those that scored it later."""
    known = [str(name) for name in run.config.get("functions") or ()]
    return list(dict.fromkeys([*known, *(figures.statistics if figures is not None else ())]))
