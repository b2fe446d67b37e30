"""Print the report of a finished run.

`test` answers whether tools and rewards work: a line per row with its scores, tool calls and errors. `eval` answers how
good the model is: statistics of the scores, and the rows that fall short of the threshold. Both end with what to do
next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from osmosis_ai.cli.console import BAD, FAINT, HEADING, Output
from osmosis_ai.cli.scores import ScoreColumns, below_title, score_style, went_wrong
from osmosis_ai.cli.tables import Cell, Column, Table
from osmosis_ai.conversation import last_answer
from osmosis_ai.records import Outcome
from osmosis_ai.reward_fn.statistics import FunctionStatistics
from osmosis_ai.runtime.run.plan import POLICY
from osmosis_ai.runtime.run.report import Baseline, Policy, Report
from osmosis_ai.runtime.run.results import Cause
from osmosis_ai.runtime.run.rows import ListedRow
from osmosis_ai.store.queries import Queries, RolloutFilter
from osmosis_ai.text import cost, counted, duration, excerpt, indented, score_number

__all__ = ["figure_with_error", "lead_on", "print_report", "shown_interval"]

MAX_CAUSES = 10
"""Causes of failures listed, the most frequent first."""
TEST_ROWS = 20
EVAL_ROWS = 10
"""Rows listed by `test` and by `eval`; `osmosis runs show` lists more."""
ANSWER_CHARACTERS = 60


def print_report(output: Output, report: Report) -> None:
    """Print a run's report to stdout."""
    output.line(f"\nmodel {_shown(report.policy)}")
    if report.command == "test":
        _print_rows(output, report)
    output.line(_headline(report.policy, report.scoring_errors, report.wall_ms))
    if report.functions:
        output.table(_test_scores(report) if report.command == "test" else _eval_scores(report))
        if any(statistics.scoring_errors for statistics in report.functions.values()):
            output.line("mean counts a missing score as 0, mean scored leaves it out", FAINT)
    if report.baseline is not None:
        output.line(f"\nbaseline {_shown(report.baseline)}, on the same rows")
        output.line(_headline(report.baseline, 0, None))
        output.table(_comparison(report.baseline))
    if report.judges.calls:
        paid = "" if report.judges.cost_usd is None else f", {cost(report.judges.cost_usd)}"
        output.line(f"judges: {counted(report.judges.calls, 'call')}, {report.judges.total_tokens:,} tokens{paid}")
    if report.tools:
        output.table(_tools(report))
    _print_causes(output, "tool errors", report.tool_errors)
    _print_causes(output, "failures", report.failures)
    if report.not_scored:
        output.line("not scored with (--keep-going)", HEADING)
        for failure in report.not_scored:
            output.line(indented(failure.message))
    if report.command == "eval":
        _print_below(output, report)
    output.line(f"run {report.run_id}")


def _headline(policy: Policy, scoring_errors: int, wall_ms: float | None) -> str:
    parts = [f"{policy.passed:,} of {policy.planned:,} rollouts completed"]
    if policy.failed:
        parts.append(f"{policy.failed:,} failed")
    if policy.removed:
        parts.append(f"{policy.removed:,} removed")
    if policy.missing:
        parts.append(f"{policy.missing:,} not run")
    if scoring_errors:
        parts.append(counted(scoring_errors, "scoring error"))
    parts.append(f"{policy.usage.total_tokens:,} tokens")
    if policy.cost_usd:
        parts.append(cost(policy.cost_usd))
    if wall_ms is not None:
        parts.append(duration(wall_ms))
    return ", ".join(parts)


# Statistics


def _test_scores(report: Report) -> Table:
    errors = _errors(report)
    table = Table(Column("function", "function"), "mean", *errors, "min", "max", title="scores")
    for name, found in report.functions.items():
        mean = Cell(score_number(found.mean), score_style(found.mean, report.pass_threshold))
        table.add(name, mean, *_error_cells(found, errors), score_number(found.min), score_number(found.max))
    return table


def _eval_scores(report: Report) -> Table:
    ks = sorted({k for found in report.functions.values() for k in found.pass_at_k})
    # pass^1 is the same as pass@1.
    passes = [*(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks[1:])]
    errors = _errors(report)
    rows = max(found.rows for found in report.functions.values())
    attempts = f" × {counted(report.n, 'attempt')}" if report.n > 1 else ""
    columns = ["mean ± stderr", *errors, "95 % CI", "std", "min", "max", *passes]
    table = Table(Column("function", "function"), *columns, title=f"scores, n = {counted(rows, 'row')}{attempts}")
    for name, found in report.functions.items():
        mean = figure_with_error(found.mean, found.standard_error)
        cells = [Cell(mean, score_style(found.mean, report.pass_threshold)), *_error_cells(found, errors)]
        cells += [Cell(shown_interval(found.confidence_interval))]
        cells += [Cell(score_number(value)) for value in (found.std, found.min, found.max)]
        cells += [Cell(f"{found.pass_at_k.get(k, 0.0):.3f}") for k in ks]
        cells += [Cell(f"{found.pass_hat_k.get(k, 0.0):.3f}") for k in ks[1:]]
        table.add(name, *cells)
    return table


def _errors(report: Report) -> list[str]:
    """Headings of the columns about missing scores; none if none is missing for a function's fault."""
    missing = any(found.scoring_errors for found in report.functions.values())
    return ["errors", "mean scored"] if missing else []


def _error_cells(found: FunctionStatistics, columns: Sequence[str]) -> list[Cell]:
    if not columns:
        return []
    errors = Cell(f"{found.scoring_errors:,}", BAD if found.scoring_errors else "")
    return [errors, Cell(score_number(found.mean_scored))]


def _comparison(baseline: Baseline) -> Table:
    columns = ("baseline", "win", "loss", "tie", "difference", "95 % CI")
    table = Table(Column("function", "function"), *columns)
    for name, paired in baseline.comparison.items():
        found = baseline.functions[name]
        table.add(
            name,
            figure_with_error(found.mean, found.standard_error),
            *(f"{count:,}" for count in (paired.wins, paired.losses, paired.ties)),
            score_number(paired.mean_difference, "+"),
            shown_interval(paired.confidence_interval, "+"),
        )
    return table


def _tools(report: Report) -> Table:
    table = Table(Column("tool", "name"), "calls", "errors", "median", "p95", title="tools")
    for name, tool in report.tools.items():
        errors = ", ".join(f"{kind} {count:,}" for kind, count in tool.errors.items())
        times = duration(tool.median_ms), duration(tool.p95_ms)
        table.add(name, f"{tool.calls:,}", Cell(errors or "–", BAD if errors else ""), *times)
    return table


# Rows and failures


def _print_rows(output: Output, report: Report) -> None:
    """Print a line per row, those that fall short first."""
    rows = [*report.below, *report.others][:TEST_ROWS]
    if not rows:
        return
    scores = ScoreColumns(report.functions, report.pass_threshold)
    errors = [", ".join(_tool_errors(row.outcome)) for row in rows]
    reasons = [_reason(report, row) if row in report.below else "" for row in rows]
    columns: list[str | Column] = ["row", *scores.columns, "calls", "time"]
    columns += [Column("tool errors", "list")] if any(errors) else []
    columns += [Column("what went wrong", "text")] if any(reasons) else []
    table = Table(*columns, title="rows")
    for row, failed, reason in zip(rows, errors, reasons, strict=True):
        outcome = row.outcome
        cells: list[str | Cell] = [f"{len(outcome.calls):,}", duration(outcome.duration_ms)]
        cells += [Cell(failed, BAD)] if any(errors) else []
        cells += [reason] if any(reasons) else []
        table.add(str(outcome.row_index), *scores.cells(outcome.scores), *cells)
    output.table(table)
    more = report.rows - report.policy.missing - report.policy.removed - len(rows)
    if more > 0:
        below = report.rows_below - min(len(report.below), len(rows))
        output.line(f"… and {more:,} more, {f'{below:,} of them' if below else 'none'} below the threshold", FAINT)


def _tool_errors(outcome: Outcome) -> list[str]:
    """Describe a rollout's failed tool calls: `price: KeyError: 'milk'`, each once."""
    failed = (call for call in outcome.calls if call.error is not None)
    return list(
        dict.fromkeys(f"{call.name}: {call.failure.message if call.failure else call.error}" for call in failed)
    )


def _print_below(output: Output, report: Report) -> None:
    """Print the first rows that fall short, with the reason."""
    if not report.below:
        return
    scores = ScoreColumns(report.functions, report.pass_threshold)
    columns: list[str | Column] = ["row", *(["passed"] if report.n > 1 else []), *scores.columns]
    table = Table(*columns, Column("what went wrong", "text"), title=below_title(report))
    for row in report.below[:EVAL_ROWS]:
        passed = [f"{row.passed:,} of {row.attempts:,}"] if report.n > 1 else []
        table.add(str(row.outcome.row_index), *passed, *scores.cells(row.outcome.scores), _reason(report, row))
    output.table(table)
    if report.rows_below > EVAL_ROWS:
        output.line(f"… and {report.rows_below - EVAL_ROWS:,} more", FAINT)


def _reason(report: Report, row: ListedRow) -> str:
    """Say what failed, or else what was answered."""
    outcome = row.outcome
    if wrong := went_wrong(outcome.failure, outcome.scores):
        return wrong
    # Outcomes hold no messages, so that a report needs little memory; read those of this one.
    this = RolloutFilter(row=outcome.row_index, run_index=outcome.run_index)
    for scored in Queries(Path(report.store)).scored(report.run_id, this, with_trajectory=True):
        if scored.stored.rollout.policy == POLICY:
            answer = excerpt(last_answer(scored.stored.rollout.messages), ANSWER_CHARACTERS)
            truth = scored.row.ground_truth
            wanted = "" if truth is None else f", expected {excerpt(truth, ANSWER_CHARACTERS)!r}"
            return f"answered {repr(answer) if answer else 'nothing'}{wanted}"
    return ""


def _print_causes(output: Output, title: str, causes: list[Cause]) -> None:
    if not causes:
        return
    output.line(title, HEADING)
    for cause in causes[:MAX_CAUSES]:
        where = f" at {cause.file}:{cause.line}" if cause.file and cause.line else ""
        subject = f"{cause.function}: " if cause.function else ""
        output.line(
            f"  {cause.count:,} × {cause.origin}{where}, for example row {cause.row_index}: {subject}{cause.message}"
        )
    if len(causes) > MAX_CAUSES:
        output.line(f"  … and {len(causes) - MAX_CAUSES:,} further causes")


def lead_on(output: Output, report: Report) -> None:
    """Say on stderr which commands show more, or continue the run."""
    if report.policy.missing or (report.baseline is not None and report.baseline.missing):
        output.say("to continue this run, repeat the command with --resume")
    listed = [*report.below, *report.others]
    if listed:
        output.say(f"to see a row: osmosis runs show {report.run_id} --row {listed[0].outcome.row_index}")
    if report.below:
        output.say(f"to list what falls short: osmosis runs show {report.run_id} --not-passed")


# Cells


def _shown(policy: Policy) -> str:
    where = f" at {policy.base_url}" if policy.base_url else ""
    stand_in = "  (offline stand-in: these scores say nothing about a model)" if policy.stand_in else ""
    return f"{policy.model}{where}{stand_in}"


def figure_with_error(value: float, error: float | None) -> str:
    """Format a mean with its standard error, if there is one."""
    return score_number(value) + ("" if error is None else f" ± {score_number(error)}")


def shown_interval(interval: tuple[float, float] | None, sign: str = "") -> str:
    """Format a confidence interval; `sign` is as in a format specification."""
    return "–" if interval is None else f"{score_number(interval[0], sign)} … {score_number(interval[1], sign)}"
