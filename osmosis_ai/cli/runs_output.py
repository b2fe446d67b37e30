"""Print the output of `osmosis runs`: stored runs, rollouts and comparisons as tables and text."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.text import Text

from osmosis_ai.cli.console import Output, table_of
from osmosis_ai.cli.progress import LiveProgress
from osmosis_ai.cli.report import mean_and_error, shown_interval
from osmosis_ai.records import Failure, Score
from osmosis_ai.runtime.run.scoring import Scored
from osmosis_ai.store.queries import FunctionTotals, Queries, RunInfo, ScoredRollout
from osmosis_ai.store.transcript import transcript
from osmosis_ai.store.views import ComparedRuns, shown_status
from osmosis_ai.text import failure_line, visible

__all__ = [
    "RescoreProgress",
    "print_comparison",
    "print_rescored",
    "print_rollouts",
    "print_run",
    "print_runs",
    "print_transcript",
]

ERROR_CHARACTERS = 60
PROMPT_CHARACTERS = 60


# Runs


def print_runs(output: Output, runs: list[RunInfo]) -> None:
    """Print the list of runs; means are in the order of the run's functions."""
    columns = ("run", "command", "when", "status", "model", "dataset", "rollouts", "failed", "mean")
    table = table_of(columns, right=("rollouts", "failed"), folding=("model", "dataset"))
    for run in runs:
        means = (run.summary or {}).get("functions") or {}
        table.add_row(
            *_cells(
                output,
                run.id,
                run.command,
                _when(run.created_at)[:-3],
                shown_status(run),
                str(run.config.get("model") or "–"),
                _dataset(run),
                _recorded(run),
                str(run.failed),
                ", ".join(f"{mean:.3f}" for mean in means.values()) or "–",
            )
        )
    output.result(table)


def print_run(output: Output, run: RunInfo, totals: list[FunctionTotals]) -> None:
    """Print a run's summary."""
    summary = run.summary or {}
    n = run.config.get("n")
    attempts = f", {n} attempts per row" if isinstance(n, int) and n > 1 else ""
    baseline = f" against {run.config['baseline_model']}" if run.config.get("baseline_model") else ""
    parts = [f"{_recorded(run)} rollouts", f"{run.failed} failed"]
    if summary.get("total_tokens") is not None:
        parts.append(f"{summary['total_tokens']:,} tokens")
    if summary.get("cost_usd"):
        parts.append(f"${summary['cost_usd']:.4f}")
    _line(output, f"run {run.id}: {run.command}, {shown_status(run)}, {_when(run.created_at)}")
    _line(output, f"model {_model(run)}{baseline} on {run.config.get('dataset', 'an unknown dataset')}{attempts}")
    _line(output, ", ".join(parts))
    for total in totals:
        errors = f", {total.errors} scoring errors" if total.errors else ""
        _line(output, f"{total.function}: mean {total.mean:.3f}{errors}")


# Rollouts


def print_rollouts(output: Output, run: RunInfo, rollouts: list[ScoredRollout], more: int) -> None:
    """Print a table with a line for each rollout, and how many more there are."""
    functions = list(dict.fromkeys([*_functions(run), *(name for scored in rollouts for name in scored.scores)]))
    with_policy = any(scored.stored.rollout.policy != "policy" for scored in rollouts)
    columns = ["row", "run", *(["policy"] if with_policy else []), "finish"]
    columns += [_short(name, functions) for name in functions]
    numbers = ["turns", "calls", "tokens", "ms"]
    table = table_of((*columns, *numbers, "error"), right=("row", "run", *columns[3 + with_policy :], *numbers))
    for scored in rollouts:
        stored, rollout = scored.stored, scored.stored.rollout
        cells = [str(rollout.row_index), str(rollout.run_index), *([rollout.policy] if with_policy else [])]
        cells += [rollout.finish_reason, *(_score_cell(scored.scores.get(name)) for name in functions)]
        cells += [str(stored.turns), str(stored.tool_calls)]
        cells += [f"{rollout.usage.total_tokens:,}", f"{rollout.duration_ms:.0f}"]
        cells.append(_excerpt(_first_error(scored), ERROR_CHARACTERS))
        table.add_row(*_cells(output, *cells))
    if rollouts:
        output.result(table)
    if more:
        _line(
            output, f"… and {more:,} more; --limit {len(rollouts) + more} shows them all, --row N one row's transcript"
        )


def print_transcript(output: Output, scored: ScoredRollout) -> None:
    """Print everything about a rollout."""
    for line in transcript(scored):
        output.line(line)
    output.line("")


# Comparisons


def print_comparison(
    output: Output, comparison: ComparedRuns, a: RunInfo, b: RunInfo, store: Queries, *, limit: int
) -> None:
    """Print two runs side by side, and at most `limit` flipped rows per function."""
    for name, run in (("A", a), ("B", b)):
        _line(output, f"{name}  {run.id}  {run.command}, {_model(run)} on {_dataset(run)}, {_recorded(run)} rollouts")
    for note in comparison.notes:
        output.warn(visible(note))
    if comparison.functions:
        columns = ("function", "A ± stderr", "B ± stderr", "B − A", "95 % CI", "B wins", "B loses", "ties")
        table = table_of(columns, right=columns[1:], folding=columns[:1])
        for name, function in comparison.functions.items():
            table.add_row(
                *_cells(
                    output,
                    name,
                    mean_and_error(function.a),
                    mean_and_error(function.b),
                    f"{function.difference:+.3f}",
                    shown_interval(function.confidence_interval, "+"),
                    *(str(count) for count in (function.wins, function.losses, function.ties)),
                )
            )
        output.result(table)
    for name in comparison.functions:
        _print_flips(output, comparison, name, store, limit)
    for name, functions in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if functions:
            _line(output, f"only {name} was scored with {', '.join(functions)}")


def _print_flips(output: Output, comparison: ComparedRuns, name: str, store: Queries, limit: int) -> None:
    function = comparison.functions[name]
    if not function.flips:
        _line(output, f"{name}: no row crossed the pass threshold {comparison.pass_threshold:g}")
        return
    _line(
        output,
        f"{name}: flipped to passing: {function.now_pass}, to failing: {function.now_fail} "
        f"(pass threshold {comparison.pass_threshold:g})",
    )
    for flip in function.flips[:limit]:
        prompt = store.row(comparison.a.id, flip.row_id).user_prompt
        _line(
            output,
            f"  row {flip.row_index}  {flip.a:.3f} → {flip.b:.3f}  {'passes' if flip.passes else 'fails'}  "
            f"{_excerpt(prompt, PROMPT_CHARACTERS)}",
        )
    if len(function.flips) > limit:
        _line(output, f"  … and {len(function.flips) - limit} more; --limit shows them")


# Rescoring


class RescoreProgress(LiveProgress):
    """The progress of rescoring, in rollouts."""

    def __init__(self, output: Output, total: int) -> None:
        super().__init__(output, total, "rollouts", lambda: ["scoring"])

    def scores_done(self, scored: list[Scored]) -> None:
        self.advance(len(scored))


def print_rescored(output: Output, rescored: int, before: dict[str, float], totals: list[FunctionTotals]) -> None:
    """Print the changes made by rescoring."""
    columns = ("function", "mean before", "mean now", "scored", "errors")
    table = table_of(columns, right=columns[1:], folding=columns[:1])
    for total in totals:
        earlier = before.get(total.function)
        table.add_row(
            *_cells(
                output,
                total.function,
                "–" if earlier is None else f"{earlier:.3f}",
                f"{total.mean:.3f}",
                f"{total.scored} of {total.rollouts}",
                str(total.errors),
            )
        )
    output.result(table)
    if not rescored:
        _line(output, "nothing to rescore: this code has scored every rollout that didn't fail")


# Cells


def _cells(output: Output, *cells: str) -> list[Text]:
    return [Text(visible(output.mask(cell))) for cell in cells]


def _line(output: Output, text: str) -> None:
    output.line(visible(text))


def _model(run: RunInfo) -> str:
    model = str(run.config.get("model") or "–")
    return f"{model} (offline stand-in)" if run.config.get("stand_in") else model


def _dataset(run: RunInfo) -> str:
    return str(run.config.get("dataset") or "–").replace("\\", "/").rpartition("/")[2]


def _recorded(run: RunInfo) -> str:
    planned = run.config.get("planned", (run.summary or {}).get("planned"))
    return str(run.rollouts) if planned is None else f"{run.rollouts} of {planned}"


def _functions(run: RunInfo) -> list[str]:
    return [str(name) for name in run.config.get("functions") or ()]


def _short(name: str, names: Iterable[str]) -> str:
    """Return a function's name without its module, if that is unambiguous."""
    short = name.rpartition(":")[2]
    return short if sum(other.rpartition(":")[2] == short for other in names) < 2 else name


def _score_cell(score: Score | None) -> str:
    if score is None:
        return "–"
    return "error" if score.value is None else f"{score.value:g}"


def _first_error(scored: ScoredRollout) -> str:
    failures: list[Failure | None] = [scored.stored.rollout.failure]
    failures += [score.failure for score in scored.scores.values()]
    return next((failure_line(failure) for failure in failures if failure is not None), "")


def _excerpt(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
