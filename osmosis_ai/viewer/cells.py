"""The rows of a run's table, with one cell per attempt, coloured by score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from osmosis_ai.records import Failure, Outcome, Score, Verdict
from osmosis_ai.store.browsing import ListedRow
from osmosis_ai.store.queries import RunInfo
from osmosis_ai.text import excerpt, failure_line, score_number
from osmosis_ai.viewer.addresses import Address

__all__ = ["Attempt", "attempt_cell", "policy_of", "table_row"]

SHOWN_ATTEMPTS = 32
"""Cells per row; the others are counted."""


class Attempt(NamedTuple):
    """One rollout of a row as a cell: its text, colour, tooltip and verdict."""

    url: str
    text: str
    look: str
    title: str
    verdict: Verdict | None = None


class TableRow(NamedTuple):
    """A row of a run's table."""

    number: int
    url: str
    prompt: str
    attempts: list[Attempt]
    more: int
    tokens: int
    calls: int
    duration_ms: float
    problem: str


def table_row(listed: ListedRow, run: RunInfo, query: Mapping[str, str], url: Address) -> TableRow:
    """Make a row of a run's table; `url` is the run's."""
    index, outcomes = listed.row.index, listed.outcomes
    attempts = [
        attempt_cell(
            outcome,
            run,
            query,
            url.at(f"/rows/{index}", attempt=outcome.run_index or None, policy=policy_of(outcome)),
            listed.verdicts.get(outcome.id),
        )
        for outcome in outcomes[:SHOWN_ATTEMPTS]
    ]
    problems = [failure_line(failure) for outcome in outcomes if (failure := _problem(outcome)) is not None]
    return TableRow(
        index,
        url.at(f"/rows/{index}"),
        excerpt(listed.row.user_prompt, 200),
        attempts,
        max(len(outcomes) - SHOWN_ATTEMPTS, 0),
        sum(outcome.usage.total_tokens for outcome in outcomes),
        sum(len(outcome.calls) for outcome in outcomes),
        sum(outcome.duration_ms for outcome in outcomes),
        excerpt(problems[0], 200) if problems else "",
    )


def attempt_cell(
    outcome: Outcome, run: RunInfo, query: Mapping[str, str], url: str, verdict: Verdict | None = None
) -> Attempt:
    """Make the cell of an attempt; the query may name the function whose score to show."""
    text, look, title = _cell(outcome, run, query)
    whose = "baseline, " if outcome.policy == "baseline" else ""
    said = "" if verdict is None else f"; a person says {'good' if verdict.value else 'bad'}"
    return Attempt(url, text, look, f"{whose}attempt {outcome.run_index}: {title}{said}", verdict)


def _cell(outcome: Outcome, run: RunInfo, query: Mapping[str, str]) -> tuple[str, str, str]:
    if outcome.failure is not None:
        return "✗", "failed", excerpt(failure_line(outcome.failure), 200)
    scores = outcome.scores
    if query.get("fn") in scores:
        scores = {query["fn"]: scores[query["fn"]]}
    told = "; ".join(f"{name} {_score_words(score)}" for name, score in scores.items()) or outcome.finish_reason
    values = [score.value for score in scores.values() if score.value is not None]
    if len(values) < len(scores):
        return "!", "unscored", excerpt(told, 400)
    if not values:
        return "–", "plain", told
    mean, threshold = sum(values) / len(values), run.pass_threshold
    passes = all(value >= threshold for value in values)
    # Three shades below the threshold.
    part = 0 if threshold <= 0 else max(min(int(mean / threshold * 3), 2), 0)
    return f"{mean:.3g}", "passed" if passes else f"part{part}", excerpt(told, 400)


def policy_of(outcome: Outcome) -> str | None:
    """Return an attempt's policy as a URL names it, or None for the model's own."""
    return None if outcome.policy == "policy" else outcome.policy


def _problem(outcome: Outcome) -> Failure | None:
    failures = (score.failure for score in outcome.scores.values() if score.failure is not None)
    return outcome.failure or next(failures, None)


def _score_words(score: Score) -> str:
    return score_number(score.value) if score.failure is None else failure_line(score.failure)
