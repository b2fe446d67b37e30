"""Compare two stored runs row by row: the difference in scores, the rows that flipped, and conversations by step."""

from __future__ import annotations

from statistics import fmean

from osmosis_ai.errors import StoreError
from osmosis_ai.reward_fn.statistics import paired, summarize
from osmosis_ai.store.alignment import align
from osmosis_ai.store.queries import (
    FunctionTotals,
    PairedRow,
    Queries,
    RolloutFilter,
    RunInfo,
    ScoredRollout,
    SharedRows,
)
from osmosis_ai.store.views import (
    ComparedFunction,
    ComparedRow,
    ComparedRuns,
    FlippedRow,
    rollout_summary,
    run_view,
)

__all__ = ["compare_row", "compare_runs"]

_TOLERANCE = 1e-9  # a mean of floats may miss the threshold by a rounding error


def compare_runs(store: Queries, a: RunInfo, b: RunInfo, pass_threshold: float) -> ComparedRuns:
    """Compare run `b` with run `a` on their common rows, by every function that scored both.

    Two rows are the same if their content is. A row's score is the mean over its attempts; a missing score counts as 0.
    A row passes if its mean score is at least `pass_threshold`.
    """
    totals_a, totals_b = _totals(store, a), _totals(store, b)
    functions = {
        name: _compare_function(store, a, b, name, pass_threshold, _same_code(totals_a[name], totals_b[name]))
        for name in totals_a
        if name in totals_b
    }
    rows = store.shared_rows(a.id, b.id)
    return ComparedRuns(
        a=run_view(a),
        b=run_view(b),
        pass_threshold=pass_threshold,
        rows=rows,
        functions={name: function for name, function in functions.items() if function.rows},
        only_in_a=[name for name in totals_a if name not in totals_b],
        only_in_b=[name for name in totals_b if name not in totals_a],
        notes=_notes(a, b, rows, functions),
    )


def compare_row(
    store: Queries, a: RunInfo, b: RunInfo, row: int, run_index: int = 0, run_index_b: int | None = None
) -> tuple[ComparedRow, ScoredRollout, ScoredRollout]:
    """Compare an attempt of a row of run `a` with one of the same row of run `b`, by default the same attempt.

    Returns the comparison, and both rollouts with their trajectories. Raises StoreError if one of them doesn't exist.
    """
    first = _rollout(store, a, RolloutFilter(row=row, run_index=run_index))
    row_id = first.row.id
    try:
        row_b = store.row(b.id, row_id).index
    except StoreError:
        raise StoreError(f"run {b.id} doesn't have row {row} of run {a.id}") from None
    wanted = RolloutFilter(row=row_b, run_index=run_index if run_index_b is None else run_index_b)
    second = _rollout(store, b, wanted, row_id)
    steps = align(first.stored.rollout, second.stored.rollout)
    first_difference = next((index for index, step in enumerate(steps) if step.change != "equal"), None)
    compared = ComparedRow(row_id, rollout_summary(first), rollout_summary(second), steps, first_difference)
    return compared, first, second


def _rollout(store: Queries, run: RunInfo, wanted: RolloutFilter, row_id: str | None = None) -> ScoredRollout:
    for scored in store.scored(run.id, wanted, with_trajectory=True):
        if scored.stored.rollout.policy == "policy" and scored.row.id == (row_id or scored.row.id):
            return scored
    if wanted.row is not None and row_id is None and not store.count_rollouts(run.id, RolloutFilter(row=wanted.row)):
        raise StoreError(f"run {run.id} has no row {wanted.row}")
    raise StoreError(f"run {run.id} has no attempt {wanted.run_index} of row {wanted.row}")


def _totals(store: Queries, run: RunInfo) -> dict[str, FunctionTotals | None]:
    """Totals by function; None for a planned function without any score, for example because every rollout failed."""
    found: dict[str, FunctionTotals | None] = dict.fromkeys(run.config.get("functions") or ())
    return {**found, **{totals.function: totals for totals in store.function_totals(run.id)}}


def _same_code(a: FunctionTotals | None, b: FunctionTotals | None) -> bool | None:
    if a is None or b is None or not a.code or not b.code:
        return None
    # Several hashes mean that the code changed within a run.
    return a.code == b.code and len(a.code) == 1


def _compare_function(
    store: Queries, a: RunInfo, b: RunInfo, function: str, threshold: float, same_code: bool | None
) -> ComparedFunction:
    scores_a: list[list[float | None]] = []
    scores_b: list[list[float | None]] = []
    flips = []
    for row in store.paired_scores(a.id, b.id, function):
        scores_a.append(row.a)
        scores_b.append(row.b)
        flip = _flip(row, threshold)
        if flip is not None:
            flips.append(flip)
    difference = paired(scores_b, scores_a)
    passing = sum(row.passes for row in flips)
    return ComparedFunction(
        a=summarize(scores_a, threshold),
        b=summarize(scores_b, threshold),
        difference=difference.mean_difference,
        rows=difference.rows,
        wins=difference.wins,
        losses=difference.losses,
        ties=difference.ties,
        standard_error=difference.standard_error,
        confidence_interval=difference.confidence_interval,
        same_code=same_code,
        now_pass=passing,
        now_fail=len(flips) - passing,
        flips=flips,
    )


def _flip(row: PairedRow, threshold: float) -> FlippedRow | None:
    a, b = (fmean(0.0 if value is None else value for value in values) for values in (row.a, row.b))
    if (a >= threshold - _TOLERANCE) == (b >= threshold - _TOLERANCE):
        return None
    return FlippedRow(row.row_index, row.row_id, a, b)


def _notes(a: RunInfo, b: RunInfo, rows: SharedRows, functions: dict[str, ComparedFunction]) -> list[str]:
    notes = []
    for name, run in (("A", a), ("B", b)):
        if run.config.get("stand_in"):
            model = run.config.get("model", "its model")
            notes.append(f"run {name}: {model} is an offline stand-in, so its scores say nothing about a model")
        if run.status != "finished":
            of = f" of {run.config['planned']}" if "planned" in run.config else ""
            notes.append(f"run {name} is incomplete: {run.rollouts}{of} rollouts are recorded")
        if run.failed:
            notes.append(f"run {name} has {run.failed} failed rollouts; their missing scores count as 0")
    if not rows.shared:
        notes.append("the runs have no row in common, so there is nothing to compare")
    elif rows.only_a or rows.only_b:
        notes.append(
            f"only the {rows.shared} common rows are compared; {rows.only_a} are in A only, {rows.only_b} in B only"
        )
    if a.config.get("n") != b.config.get("n"):
        notes.append(
            f"attempts per row differ: {a.config.get('n', '?')} in A, {b.config.get('n', '?')} in B; "
            "the rows' means are compared"
        )
    # `n` and the rows have notes above, and comparing two models is the usual purpose.
    differing = sorted(
        name
        for name in (a.identity.keys() & b.identity.keys()) - {"n", "rows", "model", "baseline"}
        if a.identity[name] != b.identity[name]
    )
    if differing:
        notes.append(f"the runs also differ in: {', '.join(differing)}")
    changed = [name for name, function in functions.items() if function.same_code is False]
    if changed:
        notes.append(
            f"the runs' scores of {', '.join(changed)} come from different code; "
            "`osmosis runs rescore` scores a run with the current code"
        )
    return notes
