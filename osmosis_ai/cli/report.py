"""A finished run as text: scores, tools, failures by cause."""

from __future__ import annotations

from rich.table import Table

from osmosis_ai.cli.console import Output
from osmosis_ai.records import ModelSpec
from osmosis_ai.reward_fn.statistics import FunctionStatistics
from osmosis_ai.runtime.run.report import Comparison, Report, Totals
from osmosis_ai.runtime.run.run import BASELINE, POLICY, RunPlan
from osmosis_ai.text import counted

__all__ = ["print_report"]

MAX_CAUSES = 10


def print_report(output: Output, plan: RunPlan, report: Report, *, wall_ms: float, run_id: str) -> None:
    """Print a run's report to stdout.

    Args:
        output: Where to print.
        plan: What was run.
        report: What came out.
        wall_ms: Milliseconds the run took.
        run_id: Its id in the store.
    """
    output.result(f"\nmodel {_shown(plan.policies[POLICY])}")
    output.result(_headline(report.policy, report.scoring_errors, wall_ms))
    if report.functions:
        output.result(_functions_table(plan, report))
    if report.baseline is not None:
        output.result(f"\nbaseline {_shown(plan.policies[BASELINE])}, on the same rows")
        output.result(_headline(report.baseline, 0, None))
        output.result(_comparison_table(report.comparisons))
    if report.judges.calls:
        cost = "" if report.judges.cost_usd is None else f", ${report.judges.cost_usd:.4f}"
        output.result(f"judges: {counted(report.judges.calls, 'call')}, {report.judges.total_tokens:,} tokens{cost}")
    if report.tools:
        output.result(_tools_table(report))
    _print_causes(output, report)
    output.result(f"run {run_id}")


def _headline(totals: Totals, scoring_errors: int, wall_ms: float | None) -> str:
    parts = [f"{totals.passed} of {totals.planned} rollouts completed"]
    if totals.failed:
        parts.append(f"{totals.failed} failed")
    if totals.missing:
        parts.append(f"{totals.missing} not run")
    if scoring_errors:
        parts.append(counted(scoring_errors, "scoring error"))
    parts.append(f"{totals.usage.total_tokens:,} tokens")
    if totals.cost_usd:
        parts.append(f"${totals.cost_usd:.4f}")
    if wall_ms is not None:
        parts.append(f"{wall_ms / 1000:.1f} s")
    return ", ".join(parts)


def _functions_table(plan: RunPlan, report: Report) -> Table:
    table = _table("scores", "function", "mean ± stderr", "95 % CI", "std", "min", "max")
    ks = sorted({k for statistics in report.functions.values() for k in statistics.pass_at_k})
    for k in ks:
        table.add_column(f"pass@{k}", justify="right")
    for k in ks[1:]:
        table.add_column(f"pass^{k}", justify="right")
    errors = any(statistics.scoring_errors for statistics in report.functions.values())
    if errors:
        table.add_column("errors", justify="right", style="red")
        table.add_column("mean scored", justify="right")
    for name, statistics in report.functions.items():
        cells = [name, _mean(statistics), _interval(statistics.confidence_interval)]
        cells += [f"{value:.3f}" for value in (statistics.std, statistics.min, statistics.max)]
        cells += [f"{statistics.pass_at_k.get(k, 0.0):.3f}" for k in ks]
        cells += [f"{statistics.pass_hat_k.get(k, 0.0):.3f}" for k in ks[1:]]
        if errors:
            scored = statistics.mean_scored
            cells += [str(statistics.scoring_errors), "–" if scored is None else f"{scored:.3f}"]
        table.add_row(*cells)
    return table


def _comparison_table(comparisons: list[Comparison]) -> Table:
    table = _table("", "function", "baseline mean ± stderr", "win", "loss", "tie", "difference", "95 % CI")
    for comparison in comparisons:
        paired = comparison.paired
        table.add_row(
            comparison.function,
            _mean(comparison.baseline),
            str(paired.wins),
            str(paired.losses),
            str(paired.ties),
            f"{paired.mean_difference:+.3f}",
            _interval(paired.confidence_interval),
        )
    return table


def _tools_table(report: Report) -> Table:
    table = _table("tools", "tool", "calls", "errors", "median ms", "p95 ms")
    for tool in report.tools:
        errors = ", ".join(f"{kind} {count}" for kind, count in tool.errors.items()) or "–"
        table.add_row(tool.name, str(tool.calls), errors, f"{tool.median_ms:.1f}", f"{tool.p95_ms:.1f}")
    return table


def _print_causes(output: Output, report: Report) -> None:
    if not report.causes:
        return
    output.result("failures")
    for cause in report.causes[:MAX_CAUSES]:
        where = f" at {cause.file}:{cause.line}" if cause.file and cause.line else ""
        subject = f"{cause.function}: " if cause.function else ""
        output.line(
            f"  {cause.count} × {cause.origin}{where}, for example row {cause.row_index}: {subject}{cause.message}"
        )
    if len(report.causes) > MAX_CAUSES:
        output.result(f"  … and {len(report.causes) - MAX_CAUSES} further causes")


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _shown(spec: ModelSpec) -> str:
    where = f" at {spec.base_url}" if spec.base_url else ""
    stand_in = "  (offline stand-in: these scores say nothing about a model)" if spec.engine == "offline" else ""
    return f"{spec.name}{where}{stand_in}"


def _mean(statistics: FunctionStatistics) -> str:
    error = statistics.standard_error
    return f"{statistics.mean:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _interval(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:+.3f} … {interval[1]:+.3f}".replace("+", "")
