"""Compare two runs side by side, and two rollouts of a row step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from osmosis_ai.store.alignment import AlignedStep
from osmosis_ai.store.browsing import RowFilter
from osmosis_ai.store.compare import compare_row
from osmosis_ai.store.queries import RunInfo, ScoredRollout
from osmosis_ai.store.views import RunView, run_view
from osmosis_ai.viewer.addresses import Address, beside, compare_path, following, number, run_path, without
from osmosis_ai.viewer.cells import Attempt, attempt_cell
from osmosis_ai.viewer.pages.run import PAGE_ROWS
from osmosis_ai.viewer.site import Site
from osmosis_ai.viewer.stores import Repository

__all__ = ["blocks_of", "compare_page", "compared_row_page"]


class Side(NamedTuple):
    """One of two compared rollouts."""

    view: RunView
    url: str
    attempts: list[Attempt]
    chosen: int
    scored: ScoredRollout


class Block(NamedTuple):
    """Steps of two conversations: a span of equal steps, or of different ones. `first` is True where they diverge."""

    equal: bool
    steps: list[AlignedStep]
    first: bool


def compare_page(site: Site, repository: str, a: str, b: str, query: Mapping[str, str]) -> str:
    """Render the comparison of two runs: flipped rows, and the paired differences of their scores."""
    live = site.stores.version()
    store, run_a = site.find(repository, a)
    _, run_b = site.find(repository, b)
    here = Address(compare_path(repository, a, b), query)
    compared = site.compared(store, run_a, run_b, query)
    offset = number(query.get("offset"))
    function = query["fn"] if query.get("fn") in compared.functions else next(iter(compared.functions), None)
    flips = [] if function is None else compared.functions[function].flips
    kind = query.get("show")
    flips = [flip for flip in flips if kind not in ("pass", "fail") or flip.passes == (kind == "pass")]
    part = flips[offset : offset + PAGE_ROWS]
    prompts = {each.row.index: each.row.user_prompt for each in store.runs.page(run_a.id, [f.row_index for f in part])}
    return site.render(
        "compare.html",
        compared=compared,
        here=here,
        repository=store,
        function=function,
        kind=kind,
        flips=part,
        count=len(flips),
        offset=offset,
        page_rows=PAGE_ROWS,
        prompts=prompts,
        live=live,
    )


def compared_row_page(site: Site, repository: str, a: str, b: str, row: int, query: Mapping[str, str]) -> str:
    """Render an attempt at a row in two runs, step by step."""
    live = site.stores.version()
    store, run_a = site.find(repository, a)
    _, run_b = site.find(repository, b)
    runs = Address(compare_path(repository, a, b), without(query, "attempt", "attempt_b"))
    here = Address(f"{runs.path}/rows/{row}", query)
    attempt = number(query.get("attempt"))
    attempt_b = number(query.get("attempt_b"), attempt)
    compared, first, second = compare_row(store.runs, run_a, run_b, row, attempt, attempt_b)
    flipped = site.flips(store, run_a, run_b, query)
    selection = site.select(store, run_a, RowFilter())
    return site.render(
        "compare_row.html",
        compared=compared,
        blocks=blocks_of(compared.steps),
        runs=runs,
        here=here,
        row=row,
        sides=[
            _side(store, run, name, scored, here)
            for name, run, scored in (("attempt", run_a, first), ("attempt_b", run_b, second))
        ],
        links={
            "previous": beside(selection, row, -1, runs),
            "next": beside(selection, row, 1, runs),
            "flip": following(flipped, row, runs),
        },
        live=live,
    )


def _side(store: Repository, run: RunInfo, name: str, scored: ScoredRollout, here: Address) -> Side:
    rollout = scored.stored.rollout
    listed = store.runs.page(run.id, [scored.row.index])[0]
    outcomes = [outcome for outcome in listed.outcomes if outcome.policy == "policy"]
    # The URL names both attempts, so that one can change without the other.
    both = {"attempt": number(here.query.get("attempt"))}
    both["attempt_b"] = number(here.query.get("attempt_b"), both["attempt"])
    attempts = [
        attempt_cell(outcome, run, here.query, here.but(**{**both, name: outcome.run_index})) for outcome in outcomes
    ]
    chosen = [outcome.run_index for outcome in outcomes].index(rollout.run_index)
    url = f"{run_path(store.name, run.id)}/rows/{scored.row.index}?attempt={rollout.run_index}"
    return Side(run_view(run), url, attempts, chosen, scored)


def blocks_of(aligned: Sequence[AlignedStep]) -> list[Block]:
    """Group aligned steps into spans of equal and of different steps."""
    blocks: list[Block] = []
    for equal, group in groupby(aligned, key=lambda step: step.change == "equal"):
        first = not equal and all(block.equal for block in blocks)
        blocks.append(Block(equal, list(group), first))
    return blocks
