"""The screen of a watch session, redrawn in place."""

from __future__ import annotations

from time import monotonic
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live

from osmosis_ai.cli.console import BAD, CAUTION, FAINT, GOOD, HEADING, Output
from osmosis_ai.cli.scores import below_title, score_style, short_name, went_wrong
from osmosis_ai.cli.tables import Cell, Column, Table
from osmosis_ai.records import Record, Rollout
from osmosis_ai.runtime.pool.base import Pool
from osmosis_ai.runtime.protocol import RolloutJob
from osmosis_ai.runtime.run.plan import RunPlan
from osmosis_ai.runtime.run.results import Flip
from osmosis_ai.runtime.run.rows import lacking, telling_functions
from osmosis_ai.runtime.run.run import RunListener
from osmosis_ai.runtime.run.scoring import Scored
from osmosis_ai.runtime.watch.session import Iteration
from osmosis_ai.text import duration, score_number

__all__ = ["BrokenSave", "Display", "Screen"]

ROWS_SHOWN = 5
"""Rows listed of each kind, so that all kinds fit on a screen."""
SLOW_SECONDS = 5.0
"""Age from which the oldest rollout is named."""
_Styled: TypeAlias = tuple[str, str]
"""A text and its style."""
HELP = "r rerun all · f new samples for rows that fall short · d first flipped row's transcript · q quit"


class BrokenSave(Record, frozen=True, omit_defaults=False):
    """The error in a save that can't be used; `excerpt` is the source around the line."""

    kind: str
    message: str
    file: str | None = None
    line: int | None = None
    excerpt: str | None = None


class Display:
    """A display of a watch session. This base class shows nothing."""

    def begin(self, trigger: list[str], pool: Pool | None) -> None:
        """Show that an iteration begins."""

    def listener(self, plan: RunPlan, done: int) -> RunListener:
        """Return the listener for the records of the iteration that begins."""
        return self

    def rollout_started(self, job: RolloutJob) -> None:
        """Ignore it: displays count finished rollouts."""

    def rollout_done(self, rollout: Rollout) -> None:
        """Count a recorded rollout."""

    def scores_done(self, scored: list[Scored]) -> None:
        """Count recorded scores."""

    def show(self, iteration: Iteration, results: bytes) -> None:
        """Show a finished iteration."""

    def unchanged(self) -> None:
        """Show that the change made no difference."""

    def broken(self, broken: BrokenSave) -> None:
        """Show the error in a save; the last good results stay."""

    def flipped_transcript(self, lines: list[str]) -> None:
        """Show the first flipped row's transcript."""


class Screen(Display):
    """The terminal screen: the last good results, the running iteration and errors. Use as a context manager."""

    def __init__(self, output: Output, iteration: Iteration | None) -> None:
        self._output = output
        self._live = Live(self, console=output.results, refresh_per_second=8)
        self._working: _Working | None = None
        self._iteration = iteration
        self._broken: BrokenSave | None = None
        self._note = ""

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._working = None
        self._live.stop()

    def begin(self, trigger: list[str], pool: Pool | None) -> None:
        self._working = _Working(trigger, pool)
        self._note = ""

    def listener(self, plan: RunPlan, done: int) -> RunListener:
        assert self._working is not None
        self._working.total, self._working.done = plan.total_rollouts, done
        return self._working

    def show(self, iteration: Iteration, results: bytes) -> None:
        self._iteration, self._broken, self._working = iteration, None, None
        self._live.refresh()

    def unchanged(self) -> None:
        self._working, self._broken, self._note = None, None, "the last save made no difference"

    def broken(self, broken: BrokenSave) -> None:
        self._working, self._broken = None, broken
        self._live.refresh()

    def flipped_transcript(self, lines: list[str]) -> None:
        # Printed above the live part, because a transcript may be longer than the screen.
        self._live.console.print(self._output.styled("\n".join(lines)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        styled = self._output.styled
        parts: list[RenderableType] = []
        if self._broken is not None:
            parts.append(styled(f"✗ {self._broken.message}", style=f"bold {BAD}"))
            if self._broken.excerpt:
                parts.append(styled(self._broken.excerpt, style=BAD))
            parts += [styled("the results below are those of the last good save", style=FAINT), styled()]
        if self._working is not None:
            parts.append(styled(self._working.status(), style="cyan"))
        if self._iteration is not None:
            parts += _results(self._iteration, self._output, options.max_width)
        if self._note:
            parts.append(styled(self._note, style=FAINT))
        yield Group(*parts, styled(HELP, style=FAINT))


class _Working:
    """The running iteration; listens to its records."""

    def __init__(self, trigger: list[str], pool: Pool | None) -> None:
        self.total = self.done = 0
        self._trigger = ", ".join(trigger)
        self._pool = pool
        self._scored = 0
        self._started = monotonic()

    def rollout_started(self, job: RolloutJob) -> None:
        """Ignore it: the screen counts finished rollouts."""

    def rollout_done(self, rollout: Rollout) -> None:
        self.done += 1

    def scores_done(self, scored: list[Scored]) -> None:
        self._scored += len(scored)

    def status(self) -> str:
        seconds = monotonic() - self._started
        if not self.total:
            return f"● {self._trigger}: loading, {seconds:.1f} s"
        text = f"● {self._trigger}: {self.done}/{self.total} rollouts, {self._scored} scored, {seconds:.1f} s"
        oldest = self._pool.oldest() if self._pool is not None else None
        if oldest is not None and oldest.seconds > SLOW_SECONDS:
            text += f"; row {oldest.row_index} waits for {oldest.waiting_on}"
        return text


def _results(iteration: Iteration, output: Output, width: int) -> list[RenderableType]:
    done, plan, report = iteration.done, iteration.plan, iteration.report
    stand_in = " (offline stand-in)" if report.policy.stand_in else ""
    redone = f"{done.redone.rollouts} rollouts, {done.redone.scores} scores, {done.redone.cached_turns} cached turns"
    parts: list[RenderableType] = [
        output.styled(f"iteration {done.number}: {', '.join(done.trigger)}", style=HEADING),
        output.styled(
            f"{report.policy.model}{stand_in}, {plan.total_rows} rows; redone: {redone}; {duration(done.took_ms)}"
        ),
        *_scores(iteration).lines(width, output.shown),
    ]
    return [*parts, *(output.styled(text, style=style) for text, style in _lines(iteration))]


def _lines(iteration: Iteration) -> list[_Styled]:
    """List what went wrong and what changed."""
    done, report = iteration.done, iteration.report
    lines: list[_Styled] = []
    if done.out_of_budget:
        lines.append((f"stopped: the budget of ${iteration.plan.config.limits.max_cost:g} (--max-cost) is spent", BAD))
    totals = report.policy
    if totals.failed or totals.missing or report.scoring_errors:
        lines.append((f"{totals.failed} failed, {totals.missing} missing, {report.scoring_errors} scoring errors", BAD))
        for cause in report.failures[:3]:
            where = f" at {cause.file}:{cause.line}" if cause.file else ""
            lines.append((f"  {cause.count} × {cause.origin}{where}: {cause.message}", BAD))
    for name, style in (("added", GOOD), ("removed", BAD), ("changed", CAUTION)):
        if tools := getattr(done.tools, name):
            lines.append((f"tools {name}: {', '.join(tools)}", style))
    names = report.functions
    for name, flips in done.flipped.functions.items():
        lines += _flips(f"{short_name(name, names)}: {len(flips.passed):,} now pass", GOOD, flips.passed)
        lines += _flips(f"{short_name(name, names)}: {len(flips.failed):,} now fail", BAD, flips.failed)
    return lines + _below(iteration)


def _scores(iteration: Iteration) -> Table:
    table = Table(Column("function", "function"), "mean", "change", "min", "max", "errors")
    before = iteration.before.functions if iteration.before is not None else {}
    for name, found in iteration.report.functions.items():
        change = found.mean - before[name].mean if name in before else None
        style = "" if not change else GOOD if change > 0 else BAD
        table.add(
            name,
            Cell(score_number(found.mean), score_style(found.mean, iteration.report.pass_threshold)),
            Cell("" if change is None else "=" if change == 0 else score_number(change, "+"), style),
            score_number(found.min),
            score_number(found.max),
            Cell(f"{found.scoring_errors:,}" if found.scoring_errors else "–", BAD if found.scoring_errors else ""),
        )
    return table


def _flips(title: str, style: str, flips: list[Flip]) -> list[_Styled]:
    if not flips:
        return []
    lines: list[_Styled] = [(title, f"bold {style}")]
    for flip in flips[:ROWS_SHOWN]:
        change = f"{score_number(flip.before)} → {score_number(flip.after)}"
        lines.append((f"  row {flip.row_index}: {flip.prompt}  {change}", ""))
    return lines + _more(len(flips))


def _below(iteration: Iteration) -> list[_Styled]:
    """List the first rows that fall short, with the scores and failures because of which they do."""
    report = iteration.report
    if not report.below:
        return []
    lines: list[_Styled] = [(below_title(report), HEADING)]
    telling = telling_functions(report.functions, report.pass_threshold)
    for row in report.below[:ROWS_SHOWN]:
        outcome = row.outcome
        low = [name for name in lacking(outcome, telling, report.pass_threshold) if name in outcome.scores]
        scores = [f"{short_name(name, report.functions)} {score_number(outcome.scores[name].value)}" for name in low]
        why = went_wrong(outcome.failure, outcome.scores) or ", ".join(scores)
        lines.append((f"  row {outcome.row_index}: {iteration.prompts[outcome.row_id]}  {why}", ""))
    return lines + _more(report.rows_below)


def _more(count: int) -> list[_Styled]:
    return [(f"  … and {count - ROWS_SHOWN:,} more", FAINT)] if count > ROWS_SHOWN else []
