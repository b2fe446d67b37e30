"""Summarize a run's recorded items into its results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from osmosis_ai.records import JsonObject, Outcome
from osmosis_ai.reward_fn.statistics import pass_at_powers_of_2, summarize

__all__ = ["Graded", "graded", "run_results"]


class Graded(NamedTuple):
    """One item of the results. Without a reward it either failed or was left out by its grader."""

    row: str
    reward: float | None
    failed: bool
    tokens: int
    cost: float | None


def graded(outcome: Outcome) -> Graded:
    """Convert a recorded rollout to an item."""
    reward = outcome.reward if outcome.failure is None else None
    failures = (score.failure is not None for score in outcome.scores.values())
    failed = reward is None and (outcome.failure is not None or any(failures))
    return Graded(outcome.row_id, reward, failed, outcome.usage.total_tokens, outcome.cost_usd)


def run_results(
    items: Iterable[Graded], *, n: int, threshold: float, rows: int, dataset_rows: int, resumed: int
) -> JsonObject:
    """Summarize the recorded items of a run of `rows` rows with `n` attempts each.

    A failed item counts as not passed in `pass_rate`; an item that its grader left out doesn't count at all.
    `pass_rate_interval` is the rate's 95 % confidence interval, clustered by row.
    """
    rewards: list[float] = []
    by_row: dict[str, list[bool]] = {}
    done = failed = skipped = tokens = 0
    cost: float | None = None
    for item in items:
        done += 1
        tokens += item.tokens
        if item.cost is not None:
            cost = (cost or 0.0) + item.cost
        if item.reward is not None:
            rewards.append(item.reward)
        elif item.failed:
            failed += 1
        else:
            skipped += 1
            continue
        by_row.setdefault(item.row, []).append(item.reward is not None and item.reward >= threshold)
    passed = sum(map(sum, by_row.values()))
    counted = len(rewards) + failed
    found: JsonObject = {
        "score": statistics.fmean(rewards) if rewards else None,
        "pass_rate": passed / counted if counted else None,
        "pass_rate_interval": summarize([list(map(float, row)) for row in by_row.values()], 1.0).confidence_interval,
        "graded": len(rewards),
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "total_runs": done,
        "total_samples": rows * n,
        "n_runs": n,
        "sampled_rows": rows,
        "total_dataset_rows": dataset_rows,
        "total_tokens": tokens,
        "cost_usd": cost,
        "resumed_count": resumed,
        "pass_threshold": threshold,
        "reward_stats": None,
    }
    if rewards:
        attempts = [(len(row), sum(row)) for row in by_row.values()]
        found["reward_stats"] = {
            "mean": statistics.fmean(rewards),
            "std": statistics.pstdev(rewards),
            "min": min(rewards),
            "median": statistics.median(rewards),
            "max": max(rewards),
            "pass_at_k": {str(k): value for k, value in pass_at_powers_of_2(attempts, n).items()},
        }
    return found
