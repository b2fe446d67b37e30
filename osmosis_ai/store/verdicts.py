"""Users' verdicts on a run's rollouts, and their agreement with its scores."""

from __future__ import annotations

from collections import defaultdict

from osmosis_ai.records import Record
from osmosis_ai.reward_rubric.agreement import LabelAgreement, agreement
from osmosis_ai.store.queries import JudgedScore, Queries, RunInfo

__all__ = ["HUMAN", "Verdicts", "verdicts_on"]

HUMAN = "human"
"""The column that holds verdicts, where they are labels."""


class Verdicts(Record, frozen=True):
    """The verdicts on a run's rollouts."""

    rollouts: int
    """Rollouts with a verdict."""
    good: int
    """Verdicts that say good."""
    agreement: dict[str, LabelAgreement]
    """Agreement of each function with them, on the rollouts that it scored."""


def verdicts_on(runs: Queries, run: RunInfo) -> Verdicts | None:
    """Sum up the verdicts on a run; None if there are none. A score agrees if it passes where the verdict is good."""
    by_function: defaultdict[str, list[tuple[JudgedScore, float]]] = defaultdict(list)
    found: dict[int, int] = {}
    for judged in runs.verdicts(run.id):
        found[judged.rollout] = judged.verdict
        if judged.function is not None and judged.score is not None:
            by_function[judged.function].append((judged, judged.score))
    if not found:
        return None
    agreements = {
        function: agreement(
            HUMAN,
            [score for _, score in pairs],
            [float(judged.verdict) for judged, _ in pairs],
            run.pass_threshold,
            label_threshold=1.0,
            rows=[judged.row_index for judged, _ in pairs],
        )
        for function, pairs in sorted(by_function.items())
    }
    return Verdicts(len(found), sum(found.values()), agreements)
