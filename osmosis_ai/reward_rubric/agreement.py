"""How far a judge agrees with people: measures of agreement between scores and labels of the same records."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from statistics import StatisticsError, correlation

from msgspec import UNSET, UnsetType

from osmosis_ai.records import Record
from osmosis_ai.reward_fn.statistics import summarize
from osmosis_ai.text import score_number

__all__ = ["FEW", "Confusion", "LabelAgreement", "agreement", "agreement_words", "kappa", "kappa_interval", "spearman"]

FEW = 30
"""With fewer records than this, only the intervals say something."""


class Confusion(Record, frozen=True):
    """Counts of records whose human label and judge's score reach the threshold or not."""

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int


class LabelAgreement(Record, frozen=True):
    """Agreement of the records' mean scores with human labels. The measures are absent if no record has both."""

    column: str
    """The column with the labels."""
    records: int
    """Records with both a score and a label."""
    mean_absolute_error: float | UnsetType = UNSET
    """Mean absolute difference between score and label."""
    spearman: float | UnsetType | None = UNSET
    """Spearman's rank correlation, null where it is not defined."""
    threshold: float | UnsetType = UNSET
    """Lowest score or label that counts as positive."""
    confusion: Confusion | UnsetType = UNSET
    """Records by label and score."""
    accuracy: float | UnsetType = UNSET
    """Share of records where both are on the same side of the threshold."""
    accuracy_interval: tuple[float, float] | UnsetType | None = UNSET
    """95 % confidence interval of that share, `[low, high]`, by Wilson; null for fewer than two records."""
    kappa: float | UnsetType | None = UNSET
    """Cohen's kappa: agreement beyond that by chance, from −1 to 1; null if both always say the same."""
    kappa_interval: tuple[float, float] | UnsetType | None = UNSET
    """95 % confidence interval of kappa, `[low, high]`; null for fewer than two records, or without kappa."""


def agreement(
    column: str,
    scores: Sequence[float],
    labels: Sequence[float],
    threshold: float,
    *,
    label_threshold: float | None = None,
    rows: Sequence[Hashable] | None = None,
) -> LabelAgreement:
    """Compare a judge's scores (at least one) with human labels in the same order.

    Labels are on the scale of the scores, unless they have a threshold of their own. `rows` tells which records are
    attempts at the same row, in the same order: these aren't independent, which widens the intervals.
    """
    pairs = list(zip(scores, labels, strict=True))
    bound = threshold if label_threshold is None else label_threshold
    each = [(label >= bound, score >= threshold) for score, label in pairs]
    sides = Counter(each)
    counts = (sides[True, True], sides[False, True], sides[True, False], sides[False, False])
    by_row: defaultdict[Hashable, list[float]] = defaultdict(list)
    for row, (label, score) in zip(range(len(pairs)) if rows is None else rows, each, strict=True):
        by_row[row].append(float(label == score))
    agreed = summarize(list(by_row.values()), pass_threshold=1.0).confidence_interval
    confusion = Confusion(*counts)
    return LabelAgreement(
        column,
        len(pairs),
        mean_absolute_error=math.fsum(abs(score - label) for score, label in pairs) / len(pairs),
        spearman=spearman(scores, labels),
        threshold=threshold,
        confusion=confusion,
        accuracy=(counts[0] + counts[3]) / len(pairs),
        accuracy_interval=agreed,
        kappa=kappa(confusion),
        kappa_interval=kappa_interval(confusion, agreed),
    )


def agreement_words(found: LabelAgreement) -> str:
    """Say how far a judge and people agree, and how sure that is."""
    if not isinstance(found.accuracy, float):
        return "have no rollout in common"
    both = round(found.accuracy * found.records)
    agreed = f"agree on {both:,} of {found.records:,}{_within(found.accuracy_interval)}"
    if isinstance(found.kappa, float):
        beyond = f"Cohen's kappa {score_number(found.kappa)}{_within(found.kappa_interval)}"
    else:
        beyond = "Cohen's kappa is not defined, because all say the same"
    few = "" if found.records >= FEW else f"; {found.records} are few: only the intervals say something"
    return f"{agreed}, {beyond}{few}"


def _within(interval: tuple[float, float] | UnsetType | None) -> str:
    return f" (95 % CI {interval[0]:.2f} … {interval[1]:.2f})" if isinstance(interval, tuple) else ""


def kappa(confusion: Confusion) -> float | None:
    """Return Cohen's kappa, (p_o − p_e) / (1 − p_e) for the observed agreement p_o and that expected by chance, p_e.

    J. Cohen 1960, "A Coefficient of Agreement for Nominal Scales". None if chance alone agrees always: both say the
    same of every record.
    """
    positive, negative = confusion.true_positive, confusion.true_negative
    number = positive + negative + confusion.false_positive + confusion.false_negative
    by_chance = _by_chance(confusion)
    return None if by_chance >= 1 else ((positive + negative) / number - by_chance) / (1 - by_chance)


def kappa_interval(confusion: Confusion, agreed: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return a 95 % confidence interval of kappa from that of the observed agreement.

    As Cohen's standard error (1960) it takes the agreement by chance as known. With Wilson's limits for the observed
    agreement it holds what it promises from about ten records, where the asymptotic interval (Fleiss, Cohen & Everitt
    1969) doesn't: among 20 records that covers kappa in as few as 55 of 100 cases.
    """
    by_chance = _by_chance(confusion)
    if agreed is None or by_chance >= 1:
        return None
    low, high = ((limit - by_chance) / (1 - by_chance) for limit in agreed)
    return low, high


def _by_chance(confusion: Confusion) -> float:
    positive, negative = confusion.true_positive, confusion.true_negative
    only_judge, only_label = confusion.false_positive, confusion.false_negative
    number = positive + negative + only_judge + only_label
    both = (positive + only_judge) * (positive + only_label) + (negative + only_label) * (negative + only_judge)
    return both / number**2


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, from −1 to 1: Pearson's of the ranks; equal values share their mean rank.

    C. Spearman 1904, "The Proof and Measurement of Association between Two Things". None for fewer than two pairs, or
    if all values on one side are equal.
    """
    try:
        # Rounding may push the correlation slightly beyond 1.
        return max(-1.0, min(1.0, correlation(_ranks(a), _ranks(b))))
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + 1 + bisect_right(ordered, value)) / 2 for value in values]
