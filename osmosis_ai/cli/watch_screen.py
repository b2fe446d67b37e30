"""The screen of a watch session, redrawn in place."""

from __future__ import annotations

from time import monotonic
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

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
SLOW_SECONDS = 5.0
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
        self._mask = output.mask
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
        self._live.console.print(Text(self._mask("\n".join(lines))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[Any] = []
        if self._broken is not None:
            parts += [Text(f"✗ {self._mask(self._broken.message)}", style=f"bold {BAD}")]
            if self._broken.excerpt:
                parts += [Text(self._mask(self._broken.excerpt), style=BAD)]
            parts += [Text("the results below are those of the last good save", style=FAINT), Text("")]
        if self._working is not None:
            parts += [self._working.render()]
        if self._iteration is not None:
            parts += _results(self._iteration, options.max_width)
        if self._note:
            parts += [Text(self._note, style=FAINT)]
        yield Group(*parts, Text(HELP, style=FAINT))


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

    def render(self) -> Text:
        seconds = monotonic() - self._started
        if not self.total:
            return Text(f"● {self._trigger}: loading, {seconds:.1f} s", style="cyan")
        text = f"● {self._trigger}: {self.done}/{self.total} rollouts, {self._scored} scored, {seconds:.1f} s"
        oldest = self._pool.oldest() if self._pool is not None else None
        if oldest is not None and oldest.seconds > SLOW_SECONDS:
            text += f"; row {oldest.row_index} waits for {oldest.waiting_on}"
        return Text(text, style="cyan")


def _results(iteration: Iteration, width: int) -> list[Any]:
    done, plan, report = iteration.done, iteration.plan, iteration.report
    stand_in = " (offline stand-in)" if report.policy.stand_in else ""
    redone = f"{done.redone.rollouts} rollouts, {done.redone.scores} scores, {done.redone.cached_turns} cached turns"
    parts: list[Any] = [
        Text(f"iteration {done.number}: {', '.join(done.trigger)}", style=HEADING),
        Text(f"{report.policy.model}{stand_in}, {plan.total_rows} rows; redone: {redone}; {duration(done.took_ms)}"),
        *_scores(iteration).lines(width),
    ]
    if done.out_of_budget:
        budget = f"${plan.config.limits.max_cost:g} (--max-cost)"
        parts.append(Text(f"stopped: the budget of {budget} is spent", style=BAD))
    totals = report.policy
    if totals.failed or totals.missing or report.scoring_errors:
        counts = f"{totals.failed} failed, {totals.missing} missing, {report.scoring_errors} scoring errors"
        parts.append(Text(counts, style=BAD))
        for cause in report.failures[:3]:
            where = f" at {cause.file}:{cause.line}" if cause.file else ""
            parts.append(Text(f"  {cause.count} × {cause.origin}{where}: {cause.message}", style=BAD))
    for name, style in (("added", GOOD), ("removed", BAD), ("changed", CAUTION)):
        if tools := getattr(done.tools, name):
            parts.append(Text(f"tools {name}: {', '.join(tools)}", style=style))
    names = report.functions
    for name, flips in done.flipped.functions.items():
        parts += _flips(f"{short_name(name, names)}: {len(flips.passed):,} now pass", GOOD, flips.passed)
        parts += _flips(f"{short_name(name, names)}: {len(flips.failed):,} now fail", BAD, flips.failed)
    return parts + _below(iteration)


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


def _flips(title: str, style: str, flips: list[Flip]) -> list[Any]:
    if not flips:
        return []
    lines: list[Any] = [Text(title, style=f"bold {style}")]
    for flip in flips[:ROWS_SHOWN]:
        change = f"{score_number(flip.before)} → {score_number(flip.after)}"
        lines.append(Text(f"  row {flip.row_index}: {flip.prompt}  {change}"))
    return lines + _more(len(flips))


def _below(iteration: Iteration) -> list[Any]:
    """List the first rows that fall short, with the scores and failures because of which they do."""
    report = iteration.report
    if not report.below:
        return []
    lines: list[Any] = [Text(below_title(report), style=HEADING)]
    telling = telling_functions(report.functions, report.pass_threshold)
    for row in report.below[:ROWS_SHOWN]:
        outcome = row.outcome
        low = [name for name in lacking(outcome, telling, report.pass_threshold) if name in outcome.scores]
        scores = [f"{short_name(name, report.functions)} {score_number(outcome.scores[name].value)}" for name in low]
        why = went_wrong(outcome.failure, outcome.scores) or ", ".join(scores)
        lines.append(Text(f"  row {outcome.row_index}: {iteration.prompts[outcome.row_id]}  {why}"))
    return lines + _more(report.rows_below)


def _more(count: int) -> list[Any]:
    return [Text(f"  … and {count - ROWS_SHOWN:,} more", style=FAINT)] if count > ROWS_SHOWN else []
