"""How well a judge agrees with people, and with itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

from osmosis_ai.records import Record

__all__ = ["Agreement", "Confusion", "agreement", "spearman"]


class Confusion(Record, frozen=True):
    """Records by whether the human label and the judge's score reach the threshold."""

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int

    @property
    def accuracy(self) -> float:
        """The share of records where both say the same."""
        total = self.true_positive + self.false_positive + self.false_negative + self.true_negative
        return (self.true_positive + self.true_negative) / total


class Agreement(Record, frozen=True):
    """A judge's scores beside human labels of the same records. `spearman` is None where it isn't defined."""

    records: int
    mean_absolute_error: float
    spearman: float | None
    threshold: float
    confusion: Confusion
    accuracy: float


def agreement(scores: Sequence[float], labels: Sequence[float], threshold: float) -> Agreement:
    """Compare scores with labels.

    Args:
        scores: The judge's, one for each record.
        labels: People's, in the same order and on the same scale.
        threshold: What is at least this counts as positive.

    Raises:
        ValueError: There are none, or not as many of one as of the other.
    """
    if len(scores) != len(labels) or not scores:
        raise ValueError(f"needs as many scores as labels, and some; got {len(scores)} and {len(labels)}")
    pairs = [(label >= threshold, score >= threshold) for score, label in zip(scores, labels, strict=True)]
    confusion = Confusion(
        true_positive=pairs.count((True, True)),
        false_positive=pairs.count((False, True)),
        false_negative=pairs.count((True, False)),
        true_negative=pairs.count((False, False)),
    )
    error = math.fsum(abs(score - label) for score, label in zip(scores, labels, strict=True)) / len(scores)
    return Agreement(len(scores), error, spearman(scores, labels), threshold, confusion, confusion.accuracy)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, where equal values share the mean of their ranks.

    C. Spearman 1904, "The Proof and Measurement of Association between Two Things".

    Returns:
        From −1 to 1; None for fewer than two pairs, or when all values on one side are equal.
    """
    x, y = _ranks(a), _ranks(b)
    mean = (len(x) + 1) / 2
    xs, ys = [rank - mean for rank in x], [rank - mean for rank in y]
    spread = math.sqrt(math.fsum(d * d for d in xs) * math.fsum(d * d for d in ys))
    if len(x) < 2 or spread == 0:
        return None
    return max(-1.0, min(1.0, math.fsum(p * q for p, q in zip(xs, ys, strict=True)) / spread))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + 1 + end) / 2
        start = end
    return ranks
