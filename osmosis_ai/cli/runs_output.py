"""Print the output of `osmosis runs`: stored runs, rollouts and comparisons as tables and text."""

from __future__ import annotations

import time
from itertools import groupby
from operator import attrgetter

from osmosis_ai.cli.console import BAD, CAUTION, GOOD, Output
from osmosis_ai.cli.progress import LiveProgress
from osmosis_ai.cli.report import figure_with_error, shown_interval
from osmosis_ai.cli.scores import ScoreColumns, score_style, short_name, went_wrong
from osmosis_ai.cli.tables import Cell, Column, Table
from osmosis_ai.records import JsonObject, Verdict
from osmosis_ai.reward_rubric.agreement import agreement_words
from osmosis_ai.runtime.run.scoring import Scored
from osmosis_ai.store.alignment import AlignedStep, word_changes
from osmosis_ai.store.queries import FunctionTotals, Queries, RunInfo, ScoredRollout
from osmosis_ai.store.transcript import transcript
from osmosis_ai.store.verdicts import Verdicts
from osmosis_ai.store.views import ComparedRow, ComparedRuns, shown_status
from osmosis_ai.text import cost, counted, duration, excerpt, indented, score_number
from osmosis_ai.urls import show_url

__all__ = [
    "RescoreProgress",
    "print_aligned",
    "print_comparison",
    "print_rescored",
    "print_rollouts",
    "print_run",
    "print_runs",
    "print_transcript",
    "print_verdicts",
]

PROMPT_CHARACTERS = 60
"""Characters of a prompt by which a flipped row is recognized."""
_STATUS_STYLES = {"interrupted": CAUTION, "killed": BAD}


# Runs


def print_runs(output: Output, runs: list[RunInfo]) -> None:
    """Print the list of runs."""
    labels = [Column(title, "label") for title in ("run", "command", "when", "status")]
    names = [Column(title, "name") for title in ("model", "dataset")]
    table = Table(*labels, *names, "rollouts", "failed", Column("mean", "list"))
    for run in runs:
        means = (run.summary or {}).get("functions") or {}
        status = shown_status(run)
        table.add(
            run.id,
            run.command,
            _when(run.created_at)[:-3],
            Cell(status, _STATUS_STYLES.get(status, "")),
            str(run.config.get("model") or "–"),
            _dataset(run),
            _recorded(run),
            Cell(f"{run.failed:,}", BAD if run.failed else ""),
            ", ".join(f"{short_name(name, means)} {score_number(mean)}" for name, mean in means.items()) or "–",
        )
    output.table(table)


def print_run(output: Output, run: RunInfo, totals: list[FunctionTotals]) -> None:
    """Print a run's summary."""
    summary = run.summary or {}
    n = run.config.get("n")
    attempts = f", {n} attempts per row" if isinstance(n, int) and n > 1 else ""
    baseline = f" against {run.config['baseline_model']}" if run.config.get("baseline_model") else ""
    parts = [f"{_recorded(run)} rollouts", f"{run.failed:,} failed"]
    if summary.get("total_tokens") is not None:
        parts.append(f"{summary['total_tokens']:,} tokens")
    if summary.get("cost_usd"):
        parts.append(cost(summary["cost_usd"]))
    if run.finished_at is not None:
        parts.append(duration((run.finished_at - run.created_at) * 1000))
    where = f" at {show_url(run.config['base_url'])}" if run.config.get("base_url") else ""
    named = f" ({run.config['name']})" if run.config.get("name") else ""
    output.line(f"run {run.id}{named}: {run.command}, {shown_status(run)}, {_when(run.created_at)}")
    dataset = run.config.get("dataset", "an unknown dataset")
    shard = f", shard {run.identity['shard']}" if run.identity.get("shard") else ""
    output.line(f"model {_model(run)}{where}{baseline} on {dataset}{shard}{attempts}")
    if imported := run.config.get("imported"):
        output.line(imported_words(imported))
    output.line(", ".join(parts))
    if totals:
        table = Table(Column("function", "function"), "mean", "scored", "errors")
        for total in totals:
            table.add(
                total.function,
                Cell(score_number(total.mean), score_style(total.mean, run.pass_threshold)),
                f"{total.scored:,} of {total.rollouts:,}",
                Cell(f"{total.errors:,}", BAD if total.errors else ""),
            )
        output.table(table)


def imported_words(imported: JsonObject) -> str:
    """Say where an imported run comes from."""
    task = f" {imported['task']}" if imported["task"] else ""
    scorers = ", ".join(imported["scorers"]) or "nothing"
    missing = [*imported["left_out"].values(), *filter(None, [imported["unreadable"]])]
    less = f"; {sum(missing):,} not imported" if missing else ""
    return f"ran{task} in {imported['tool']}, scored there by {scorers}{less}"


def print_verdicts(output: Output, verdicts: Verdicts | None) -> None:
    """Print what people said of a run's rollouts, and how far each function agrees with them."""
    if verdicts is None:
        return
    output.line(f"{counted(verdicts.rollouts, 'verdict')}, {verdicts.good:,} good")
    for function, agreed in verdicts.agreement.items():
        output.line(f"  {short_name(function, verdicts.agreement)} and people {agreement_words(agreed)}")


# Rollouts


def print_rollouts(output: Output, run: RunInfo, rollouts: list[ScoredRollout], more: int) -> None:
    """Print a table with a line for each rollout, and how many more there are."""
    functions = dict.fromkeys([*_functions(run), *(name for scored in rollouts for name in scored.scores)])
    scores = ScoreColumns(functions, run.pass_threshold)
    with_policy = any(scored.stored.rollout.policy != "policy" for scored in rollouts)
    with_errors = any(scored.stored.tool_errors for scored in rollouts)
    with_verdict = any(scored.verdict for scored in rollouts)
    with_cost = any(scored.stored.rollout.cost_usd for scored in rollouts)
    columns: list[str | Column] = ["row", "run", *([Column("policy", "label")] if with_policy else [])]
    columns += [Column("finish", "label"), *scores.columns, "turns", "calls"]
    columns += [*(["tool errors"] if with_errors else []), "tokens", "time"]
    columns += [*(["cost"] if with_cost else []), *(["verdict"] if with_verdict else []), Column("error", "text")]
    table = Table(*columns)
    for scored in rollouts:
        stored, rollout = scored.stored, scored.stored.rollout
        table.add(
            *(str(rollout.row_index), str(rollout.run_index)),
            *([rollout.policy] if with_policy else []),
            Cell(rollout.finish_reason, BAD if rollout.failure else ""),
            *scores.cells(scored.scores),
            *(f"{stored.turns:,}", f"{stored.tool_calls:,}"),
            *([Cell(f"{stored.tool_errors:,}", BAD if stored.tool_errors else "")] if with_errors else []),
            *(f"{rollout.usage.total_tokens:,}", duration(rollout.duration_ms)),
            *(["–" if rollout.cost_usd is None else cost(rollout.cost_usd)] if with_cost else []),
            *([_verdict(scored.verdict)] if with_verdict else []),
            Cell(went_wrong(rollout.failure, scored.scores), BAD),
        )
    if rollouts:
        output.table(table)
    if more:
        every = len(rollouts) + more
        output.line(f"… and {more:,} more; --limit {every} shows them all, --row N one row's transcript")


def _verdict(verdict: Verdict | None) -> Cell:
    return Cell("–") if verdict is None else Cell(str(verdict.value), GOOD if verdict.value else BAD)


def print_transcript(output: Output, scored: ScoredRollout) -> None:
    """Print everything about a rollout."""
    for line in transcript(scored):
        output.line(line)
    output.line("")


# Comparisons


def print_comparison(
    output: Output,
    comparison: ComparedRuns,
    a: RunInfo,
    b: RunInfo,
    store: Queries,
    *,
    limit: int,
    flips_first: bool = False,
) -> None:
    """Print two runs side by side, and at most `limit` flipped rows per function."""
    for name, run in (("A", a), ("B", b)):
        output.line(f"{name}  {run.id}  {run.command}, {_model(run)} on {_dataset(run)}, {_recorded(run)} rollouts")
    for note in comparison.notes:
        output.warn(note)
    if comparison.functions and not flips_first:
        output.table(_compared(comparison))
    for name in comparison.functions:
        _print_flips(output, comparison, name, store, limit)
    if comparison.functions and flips_first:
        output.table(_compared(comparison))
    for name, functions in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if functions:
            output.line(f"only {name} was scored with {', '.join(functions)}")


def print_aligned(output: Output, compared: ComparedRow) -> None:
    """Print two conversations side by side, with equal steps folded."""
    for name, rollout in (("A", compared.a), ("B", compared.b)):
        scores = ", ".join(f"{each} {score_number(score.value)}" for each, score in rollout.scores.items())
        output.line(
            f"{name}  row {rollout.row_index}, run {rollout.run_index}: {rollout.finish_reason}, "
            f"{counted(rollout.turns, 'turn')}, {counted(rollout.tool_calls, 'tool call')}, {scores or 'no scores'}"
        )
    if compared.first_difference is None:
        output.line(f"both went the same way, in {counted(len(compared.steps), 'step')}")
        return
    for change, group in groupby(compared.steps, key=attrgetter("change")):
        steps = list(group)
        if change == "equal":
            output.line(f"  … {counted(len(steps), 'equal step')}")
            continue
        for step in steps:
            _print_step(output, step)


def _print_step(output: Output, step: AlignedStep) -> None:
    shown = step.a or step.b
    assert shown is not None
    title = shown.role if shown.tool is None else f"→ {shown.tool}"
    if step.a is None or step.b is None:
        sign, style = ("-", BAD) if step.b is None else ("+", GOOD)
        output.line(f"{sign} {title}", style=style)
        for text in filter(None, (shown.text, shown.result and f"= {shown.result}")):
            output.line(indented(text), style=style)
        return
    output.line(f"~ {title}")
    output.line(indented(_marked(step.a.text, step.b.text)))
    if step.a.result is not None or step.b.result is not None:
        output.line(indented(f"= {_marked(step.a.result or '', step.b.result or '')}"))


def _marked(a: str, b: str) -> str:
    """Mark the words that only one of two texts has, as `git diff --word-diff` does."""
    marks = {"equal": "{}", "delete": "[-{}-]", "insert": "{{+{}+}}"}
    return "".join(marks[change].format(text) for change, text in word_changes(a, b))


def _compared(comparison: ComparedRuns) -> Table:
    columns = ("A ± stderr", "B ± stderr", "B − A", "95 % CI", "B wins", "B loses", "ties")
    title = f"n = {counted(comparison.rows.shared, 'common row')}"
    table = Table(Column("function", "function"), *columns, title=title)
    for name, function in comparison.functions.items():
        style = GOOD if function.difference > 0 else BAD if function.difference < 0 else ""
        table.add(
            name,
            *(figure_with_error(each.mean, each.standard_error) for each in (function.a, function.b)),
            Cell(score_number(function.difference, "+"), style),
            shown_interval(function.confidence_interval, "+"),
            *(f"{count:,}" for count in (function.wins, function.losses, function.ties)),
        )
    return table


def _print_flips(output: Output, comparison: ComparedRuns, name: str, store: Queries, limit: int) -> None:
    function = comparison.functions[name]
    if not function.flips:
        output.line(f"{name}: no row crossed the pass threshold {comparison.pass_threshold:g}")
        return
    output.line(
        f"{name}: flipped to passing: {function.now_pass:,}, to failing: {function.now_fail:,} "
        f"(pass threshold {comparison.pass_threshold:g})",
    )
    for flip in function.flips[:limit]:
        prompt = excerpt(store.row(comparison.a.id, flip.row_id).user_prompt, PROMPT_CHARACTERS)
        change = f"{score_number(flip.a)} → {score_number(flip.b)}"
        output.line(f"  row {flip.row_index}  {change}  {'passes' if flip.passes else 'fails'}  {prompt}")
    if len(function.flips) > limit:
        output.line(f"  … and {len(function.flips) - limit:,} more; --limit shows them")


# Rescoring


class RescoreProgress(LiveProgress):
    """The progress of rescoring, in rollouts."""

    def __init__(self, output: Output, total: int) -> None:
        super().__init__(output, total, "rollouts", lambda: ["scoring"])

    def scores_done(self, scored: list[Scored]) -> None:
        self.advance(len(scored))


def print_rescored(output: Output, rescored: int, before: dict[str, float], totals: list[FunctionTotals]) -> None:
    """Print the changes made by rescoring."""
    table = Table(Column("function", "function"), "mean before", "mean now", "scored", "errors")
    for total in totals:
        table.add(
            total.function,
            score_number(before.get(total.function)),
            score_number(total.mean),
            f"{total.scored:,} of {total.rollouts:,}",
            Cell(f"{total.errors:,}", BAD if total.errors else ""),
        )
    output.table(table)
    if not rescored:
        output.line("nothing to rescore: this code has scored every rollout that didn't fail")


# Cells


def _model(run: RunInfo) -> str:
    model = str(run.config.get("model") or "–")
    return f"{model} (offline stand-in)" if run.config.get("stand_in") else model


def _dataset(run: RunInfo) -> str:
    name = str(run.config.get("dataset") or "–").replace("\\", "/").rpartition("/")[2]
    return f"{name} {run.identity['shard']}" if run.identity.get("shard") else name


def _recorded(run: RunInfo) -> str:
    planned = run.config.get("planned", (run.summary or {}).get("planned"))
    return f"{run.rollouts:,}" if planned is None else f"{run.rollouts:,} of {planned:,}"


def _functions(run: RunInfo) -> list[str]:
    return [str(name) for name in run.config.get("functions") or ()]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
