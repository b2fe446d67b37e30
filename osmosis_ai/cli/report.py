"""Print the report of a finished run: scores, tools, failures by cause."""

from __future__ import annotations

from rich.table import Table

from osmosis_ai.cli.console import Output, table_of
from osmosis_ai.reward_fn.statistics import FunctionStatistics
from osmosis_ai.runtime.run.report import Baseline, Policy, Report
from osmosis_ai.runtime.run.results import Cause
from osmosis_ai.text import counted, indented

__all__ = ["mean_and_error", "print_report", "shown_interval"]

MAX_CAUSES = 10


def print_report(output: Output, report: Report) -> None:
    """Print a run's report to stdout."""
    output.result(f"\nmodel {_shown(report.policy)}")
    output.result(_headline(report.policy, report.scoring_errors, report.wall_ms))
    if report.functions:
        output.result(_functions_table(report))
    if report.baseline is not None:
        output.result(f"\nbaseline {_shown(report.baseline)}, on the same rows")
        output.result(_headline(report.baseline, 0, None))
        output.result(_comparison_table(report.baseline))
    if report.judges.calls:
        cost = "" if report.judges.cost_usd is None else f", ${report.judges.cost_usd:.4f}"
        output.result(f"judges: {counted(report.judges.calls, 'call')}, {report.judges.total_tokens:,} tokens{cost}")
    if report.tools:
        output.result(_tools_table(report))
    _print_causes(output, "tool errors", report.tool_errors)
    _print_causes(output, "failures", report.failures)
    if report.not_scored:
        output.result("not scored with (--keep-going)")
        for failure in report.not_scored:
            output.line(indented(failure.message))
    output.result(f"run {report.run_id}")


def _headline(policy: Policy, scoring_errors: int, wall_ms: float | None) -> str:
    parts = [f"{policy.passed} of {policy.planned} rollouts completed"]
    if policy.failed:
        parts.append(f"{policy.failed} failed")
    if policy.missing:
        parts.append(f"{policy.missing} not run")
    if scoring_errors:
        parts.append(counted(scoring_errors, "scoring error"))
    parts.append(f"{policy.usage.total_tokens:,} tokens")
    if policy.cost_usd:
        parts.append(f"${policy.cost_usd:.4f}")
    if wall_ms is not None:
        parts.append(f"{wall_ms / 1000:.1f} s")
    return ", ".join(parts)


def _functions_table(report: Report) -> Table:
    ks = sorted({k for statistics in report.functions.values() for k in statistics.pass_at_k})
    passes = [*(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks[1:])]
    table = _table("scores", "function", "mean ± stderr", "95 % CI", "std", "min", "max", *passes)
    errors = any(statistics.scoring_errors for statistics in report.functions.values())
    if errors:
        table.add_column("errors", justify="right", style="red")
        table.add_column("mean scored", justify="right")
    for name, statistics in report.functions.items():
        cells = [name, mean_and_error(statistics), shown_interval(statistics.confidence_interval)]
        cells += [f"{value:.3f}" for value in (statistics.std, statistics.min, statistics.max)]
        cells += [f"{statistics.pass_at_k.get(k, 0.0):.3f}" for k in ks]
        cells += [f"{statistics.pass_hat_k.get(k, 0.0):.3f}" for k in ks[1:]]
        if errors:
            scored = statistics.mean_scored
            cells += [str(statistics.scoring_errors), "–" if scored is None else f"{scored:.3f}"]
        table.add_row(*cells)
    return table


def _comparison_table(baseline: Baseline) -> Table:
    table = _table("", "function", "baseline mean ± stderr", "win", "loss", "tie", "difference", "95 % CI")
    for name, paired in baseline.comparison.items():
        table.add_row(
            name,
            mean_and_error(baseline.functions[name]),
            *map(str, (paired.wins, paired.losses, paired.ties)),
            f"{paired.mean_difference:+.3f}",
            shown_interval(paired.confidence_interval),
        )
    return table


def _tools_table(report: Report) -> Table:
    table = _table("tools", "tool", "calls", "errors", "median ms", "p95 ms")
    for name, tool in report.tools.items():
        errors = ", ".join(f"{kind} {count}" for kind, count in tool.errors.items()) or "–"
        table.add_row(name, str(tool.calls), errors, f"{tool.median_ms:.1f}", f"{tool.p95_ms:.1f}")
    return table


def _print_causes(output: Output, title: str, causes: list[Cause]) -> None:
    if not causes:
        return
    output.result(title)
    for cause in causes[:MAX_CAUSES]:
        where = f" at {cause.file}:{cause.line}" if cause.file and cause.line else ""
        subject = f"{cause.function}: " if cause.function else ""
        output.line(
            f"  {cause.count} × {cause.origin}{where}, for example row {cause.row_index}: {subject}{cause.message}"
        )
    if len(causes) > MAX_CAUSES:
        output.result(f"  … and {len(causes) - MAX_CAUSES} further causes")


def _table(title: str, first: str, *columns: str) -> Table:
    return table_of((first, *columns), right=columns, title=title)


def _shown(policy: Policy) -> str:
    where = f" at {policy.base_url}" if policy.base_url else ""
    stand_in = "  (offline stand-in: these scores say nothing about a model)" if policy.stand_in else ""
    return f"{policy.model}{where}{stand_in}"


def mean_and_error(statistics: FunctionStatistics) -> str:
    """Format a mean with its standard error, if there is one."""
    error = statistics.standard_error
    return f"{statistics.mean:.3f}" + ("" if error is None else f" ± {error:.3f}")


def shown_interval(interval: tuple[float, float] | None, sign: str = "") -> str:
    """Format a confidence interval; `sign` is as in a format specification."""
    return "–" if interval is None else f"{interval[0]:{sign}.3f} … {interval[1]:{sign}.3f}"
