"""A run's page: its statistics and its rows."""

from __future__ import annotations

import time
from collections.abc import Mapping

from osmosis_ai.store.browsing import RowFilter, Selection
from osmosis_ai.store.queries import RunInfo
from osmosis_ai.store.verdicts import verdicts_on
from osmosis_ai.store.views import run_view
from osmosis_ai.viewer.addresses import Address, number, row_filter, run_path, training_path, without
from osmosis_ai.viewer.cells import TableRow, table_row
from osmosis_ai.viewer.site import FIGURES_AT_ONCE, Site, functions_of
from osmosis_ai.viewer.stores import Repository

__all__ = ["PAGE_ROWS", "figures_part", "run_page", "table_part"]

PAGE_ROWS = 100


def run_page(site: Site, repository: str, name: str, query: Mapping[str, str], *, with_rows: bool = True) -> str:
    """Render a run: its statistics, and the first part of its rows."""
    # Read before anything else, here and on every page: a change in the meantime makes the page refresh once more than
    # needed, rather than miss it.
    live = site.stores.version()
    if name == "latest" and not _has_runs(site, repository):
        return site.render("waiting.html", live=live)
    store, run = site.find(repository, name)
    here = Address(run_path(repository, name), query)
    wanted = row_filter(query)
    selection = site.select(store, run, wanted)
    # A link may point beyond the rows that its filter still selects.
    offset = min(number(query.get("offset")), max(len(selection) - 1, 0))
    now = time.time()
    training = store.training_of(run)
    figures = site.figures_of(store, run) if run.rollouts <= FIGURES_AT_ONCE else None
    # A page that refreshes itself asks only for its rows.
    rows = _table(store, run, selection, offset, PAGE_ROWS, query) if with_rows else []
    return site.render(
        "run.html",
        repository=store,
        run=run,
        view=run_view(run),
        here=here,
        query=query,
        wanted=wanted,
        filtered=wanted != RowFilter(sort=wanted.sort),
        functions=functions_of(run, figures),
        threshold=run.pass_threshold,
        count=len(selection),
        offset=offset,
        page_rows=PAGE_ROWS,
        rows=rows,
        in_flight=[(each, max(now - each.started_at, 0.0) * 1000) for each in store.runs.in_flight(run)],
        figures=figures,
        verdicts=verdicts_on(store.runs, run),
        training=training,
        training_url="" if training is None else training_path(repository, training),
        others=site.others(store, run),
        live=live,
    )


def table_part(site: Site, repository: str, name: str, query: Mapping[str, str]) -> str:
    """Render a part of a run's rows, as table rows."""
    store, run = site.find(repository, name)
    selection = site.select(store, run, row_filter(query))
    limit = min(number(query.get("limit"), PAGE_ROWS), 2 * PAGE_ROWS)
    rows = _table(store, run, selection, number(query.get("offset")), limit, query)
    return site.render("rows.html", rows=rows, count=len(selection))


def figures_part(site: Site, repository: str, name: str, query: Mapping[str, str]) -> str:
    """Render a run's statistics."""
    store, run = site.find(repository, name)
    here = Address(run_path(repository, name), query)
    figures = site.figures_of(store, run)
    return site.render("figures.html", figures=figures, run=run, here=here, threshold=run.pass_threshold)


def _has_runs(site: Site, repository: str) -> bool:
    store = site.stores.get(repository)
    return store.exists and bool(store.runs.list_runs(1))


def _table(
    store: Repository,
    run: RunInfo,
    selection: Selection,
    offset: int,
    limit: int,
    query: Mapping[str, str],
) -> list[TableRow]:
    listed = store.runs.page(run.id, selection.rows[offset : offset + limit])
    url = Address(run_path(store.name, run.id), without(query, "offset", "limit"))
    return [table_row(each, run, query, url) for each in listed]
