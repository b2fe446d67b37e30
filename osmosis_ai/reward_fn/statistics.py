"""Statistics of scores: mean and its uncertainty, pass@k and pass^k, and the comparison of two policies row by row.

Pure functions over plain numbers. Rows are independent of each other, but the attempts of one row aren't, so every
uncertainty here is computed with rows as clusters (Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640).

Intervals are at 95 % and never leave what is possible: Wilson's if every score is 0 or 1, else a bootstrap of the rows,
or Student's t if there are so many rows that both agree.

Missing scores: None is an attempt without a score. It counts as 0 in averages and never as a pass. An attempt that was
never made is absent from its row: it doesn't count towards the mean, and if a row has fewer than k attempts, the
lacking ones count as not passed. Rows without attempts are left out.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import NormalDist

from osmosis_ai.records import Record

__all__ = [
    "FunctionStatistics",
    "PairedComparison",
    "paired",
    "pass_at_k",
    "pass_at_powers_of_2",
    "pass_hat_k",
    "summarize",
    "t_critical",
]

_KS = (1, 3, 5, 10)
_TIE = 1e-9
_Z = NormalDist().inv_cdf(0.975)
_RESAMPLES = 1000
"""At most 25 of them lie beyond each end of the interval."""
_BOOTSTRAP_ROWS = 50
"""With more rows the mean is close to normal, and a bootstrap would cost time and change little."""
_SEED = 20240229
# Squares and sums of larger scores could overflow a float, so they are scaled down while computing.
_LARGE, _SCALE = 1e100, 2.0**-600


class FunctionStatistics(Record, frozen=True):
    """One function's scores over all rows.

    In `mean`, `std`, `min`, `max`, `standard_error` and `confidence_interval` a missing score counts as 0.
    """

    rows: int
    """Rows with at least one attempt."""
    count: int
    """Attempts."""
    scored: int
    """Attempts with a score."""
    scoring_errors: int
    """Attempts whose score could not be computed."""
    mean: float
    """Mean of all attempts."""
    mean_scored: float | None
    """Mean of the attempts with a score, null if there are none."""
    std: float
    """Population standard deviation of all attempts."""
    min: float
    """Lowest score."""
    max: float
    """Highest score."""
    standard_error: float | None
    """Standard error of the mean, with rows as clusters; null for fewer than two rows."""
    confidence_interval: tuple[float, float] | None
    """95 % confidence interval of the mean, `[low, high]`, within the range of the scores: Wilson's if all are 0 or 1,
    else a bootstrap of the rows. Null for fewer than two rows."""
    pass_at_1: float | None = None
    """pass@1: the share of attempts that pass. Present if a row has two attempts or more."""
    pass_at_3: float | None = None
    """pass@3: probability that at least one of 3 attempts passes. Present if a row has that many."""
    pass_at_5: float | None = None
    """pass@5: probability that at least one of 5 attempts passes. Present if a row has that many."""
    pass_at_10: float | None = None
    """pass@10: probability that at least one of 10 attempts passes. Present if a row has that many."""
    pass_hat_1: float | None = None
    """pass^1, which equals pass@1."""
    pass_hat_3: float | None = None
    """pass^3: probability that all of 3 attempts pass. Present if a row has that many."""
    pass_hat_5: float | None = None
    """pass^5: probability that all of 5 attempts pass. Present if a row has that many."""
    pass_hat_10: float | None = None
    """pass^10: probability that all of 10 attempts pass. Present if a row has that many."""

    @property
    def pass_at_k(self) -> dict[int, float]:
        """pass@k by k; empty if no row has more than one attempt."""
        return {k: value for k in _KS if (value := getattr(self, f"pass_at_{k}")) is not None}

    @property
    def pass_hat_k(self) -> dict[int, float]:
        """pass^k by k; empty if no row has more than one attempt."""
        return {k: value for k in _KS if (value := getattr(self, f"pass_hat_{k}")) is not None}


class PairedComparison(Record, frozen=True):
    """Comparison of policy `a` with policy `b` on the same rows."""

    rows: int
    """Rows on which both have attempts."""
    wins: int
    """Rows where the mean of `a` is higher."""
    losses: int
    """Rows where the mean of `b` is higher."""
    ties: int
    """Rows where the means are closer than 1e-9."""
    mean_difference: float
    """Mean over rows of a − b."""
    standard_error: float | None
    """Standard error of the mean difference, null for fewer than two rows."""
    confidence_interval: tuple[float, float] | None
    """95 % confidence interval of the mean difference, `[low, high]`, within the possible range: by Newcombe if all
    scores are 0 or 1, else a bootstrap of the rows. Null for fewer than two rows."""


def summarize(
    scores_by_row: Sequence[Sequence[float | None]], pass_threshold: float, *, scoring_errors: int | None = None
) -> FunctionStatistics:
    """Summarize one function's scores.

    Args:
        scores_by_row: For every row the finite scores of its attempts; None is an attempt without a score.
        pass_threshold: An attempt passes if its score is at least this.
        scoring_errors: Number of scores missing because the function failed, not the rollout. Default: all that are
            missing.
    """
    rows = [row for row in scores_by_row if row]
    scored = [score for row in rows for score in row if score is not None]
    count = sum(map(len, rows))
    filled = list(map(_filled, rows))
    values = [score for row in filled for score in row]
    mean = _mean(values)
    error = _clustered_error(filled, mean)
    return FunctionStatistics(
        rows=len(rows),
        count=count,
        scored=len(scored),
        scoring_errors=count - len(scored) if scoring_errors is None else scoring_errors,
        mean=mean,
        mean_scored=_mean(scored) if scored else None,
        std=_root_of_mean_square(values, mean),
        min=min(values, default=0.0),
        max=max(values, default=0.0),
        standard_error=error,
        confidence_interval=_interval(filled, mean, error),
        **_passes(rows, pass_threshold),
    )


def paired(a_by_row: Sequence[Sequence[float | None]], b_by_row: Sequence[Sequence[float | None]]) -> PairedComparison:
    """Compare two policies on the same rows by the mean score of each row.

    The standard error is that of the mean of paired differences (Miller 2024, section 4.2). Means closer than 1e-9 tie.
    Rows on which either has no attempt are left out.

    Args:
        a_by_row: For every row the scores of its attempts; None is an attempt without a score and counts as 0.
        b_by_row: The same rows, in the same order.

    Raises:
        ValueError: The two don't have the same number of rows.
    """
    both = [(_filled(a), _filled(b)) for a, b in zip(a_by_row, b_by_row, strict=True) if a and b]
    means = [(_mean(a), _mean(b)) for a, b in both]
    differences = [a - b for a, b in means]
    mean = _mean(differences)
    each = [(difference,) for difference in differences]
    error = _clustered_error(each, mean)
    if error is not None and _binary(score for pair in both for row in pair for score in row):
        interval: tuple[float, float] | None = _newcombe(both, means, mean)
    else:
        interval = _interval(each, mean, error)
    wins = sum(difference > _TIE for difference in differences)
    losses = sum(difference < -_TIE for difference in differences)
    return PairedComparison(
        rows=len(differences),
        wins=wins,
        losses=losses,
        ties=len(differences) - wins - losses,
        mean_difference=mean,
        standard_error=error,
        confidence_interval=interval,
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate, from n attempts of which c passed, that at least one of k attempts passes.

    1 − C(n−c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374.
    """
    _check_counts(n, c, k)
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def pass_at_powers_of_2(rows: Sequence[tuple[int, int]], n: int) -> dict[int, float]:
    """Compute pass@k for k = 1, 2, 4, … up to `n`: the mean of the estimates of the rows with k attempts.

    Args:
        rows: Each row's attempts, and how many of them passed.
        n: The largest k.

    Returns:
        pass@k by k, for each k that a row has attempts for.
    """
    found = {}
    for k in (1 << power for power in range(n.bit_length())):
        estimates = [pass_at_k(attempts, passed, k) for attempts, passed in rows if attempts >= k]
        if estimates:
            found[k] = math.fsum(estimates) / len(estimates)
    return found


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate, from n attempts of which c passed, that all of k attempts pass (pass^k).

    C(c, k) / C(n, k): Yao et al. 2024, "τ-bench", arXiv:2406.12045.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


@lru_cache(maxsize=64)
def t_critical(degrees: int, confidence: float = 0.95) -> float:
    """Return the t for which Student's distribution has the given probability between −t and t.

    Up to 200 degrees of freedom the finite series for that probability is inverted (Abramowitz & Stegun 1964, 26.7.3
    and 26.7.4); beyond that, the expansion around the normal quantile is exact to 10 digits (26.7.5).
    """
    if degrees > 200:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        terms = (
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return math.fsum([z, *(term / degrees**power for power, term in enumerate(terms, start=1))])
    # Bisect the angle; 60 halvings reach the precision of a float.
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _central_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _central_probability(angle: float, degrees: int) -> float:
    """Return the probability between −t and t, where t = √degrees · tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def _passes(rows: Sequence[Sequence[float | None]], threshold: float) -> dict[str, float]:
    """Return pass@k and pass^k by field name, for every k up to the longest row's number of attempts."""
    longest = max(map(len, rows), default=0)
    if longest < 2:
        return {}
    # Rows with equal counts share an estimate, and few counts differ.
    kinds = Counter((len(row), sum(score is not None and score >= threshold for score in row)) for row in rows)
    return {
        f"{name}_{k}": math.fsum(times * estimate(max(n, k), c, k) for (n, c), times in kinds.items()) / len(rows)
        for name, estimate in (("pass_at", pass_at_k), ("pass_hat", pass_hat_k))
        for k in _KS
        if k <= longest
    }


def _clustered_error(rows: Sequence[Sequence[float]], mean: float) -> float | None:
    """Return the standard error of the mean of all scores, with rows as clusters that may differ in size.

    √(G/(G−1) · Σ_rows (Σ_attempts (score − mean))²) / N for G rows and N scores: Miller 2024, equation for clustered
    standard errors, with the usual correction for few clusters. For rows of equal size it is the standard error of the
    row means.
    """
    groups = len(rows)
    if groups < 2:
        return None
    scale = _scale_for(score for row in rows for score in row)
    residuals = (math.fsum(score * scale - mean * scale for score in row) for row in rows)
    squares = math.fsum(residual * residual for residual in residuals)
    return math.sqrt(squares * groups / (groups - 1)) / sum(map(len, rows)) / scale


def _interval(rows: Sequence[Sequence[float]], mean: float, error: float | None) -> tuple[float, float] | None:
    """Return the confidence interval of the mean of all scores, with rows as clusters."""
    if error is None:
        return None
    if _binary(score for row in rows for score in row):
        return _wilson(rows, mean, error)
    if len(rows) <= _BOOTSTRAP_ROWS:
        return _bootstrap(rows)
    half = t_critical(len(rows) - 1) * error
    low, high = min(map(min, rows)), max(map(max, rows))
    return max(mean - half, low), min(mean + half, high)


def _wilson(rows: Sequence[Sequence[float]], mean: float, error: float) -> tuple[float, float]:
    """Return Wilson's score interval of a share (Wilson 1927, "Probable Inference").

    Attempts of one row aren't independent, so n is the effective sample size: the number of independent attempts with
    the same standard error (Korn & Graubard 1998; compared with other intervals in Franco et al. 2019, "Comparative
    Study of Confidence Intervals for Proportions in Complex Sample Surveys"). It is the number of rows where that is
    undefined, because all attempts score the same.
    """
    groups, attempts = len(rows), sum(map(len, rows))
    variance = mean * (1 - mean)
    # Without the correction for few clusters, n is exactly the number of rows if each has one attempt.
    squared_error = error * error * (groups - 1) / groups
    if variance <= 0:
        n: float = groups
    else:
        n = min(variance / squared_error, attempts) if squared_error > 0 else attempts
    ratio = _Z * _Z / n
    centre = (mean + ratio / 2) / (1 + ratio)
    half = math.sqrt(ratio * variance + ratio * ratio / 4) / (1 + ratio)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _newcombe(
    both: Sequence[tuple[Sequence[float], Sequence[float]]], means: Sequence[tuple[float, float]], difference: float
) -> tuple[float, float]:
    """Return the interval of a paired difference of shares, a − b, from the Wilson intervals of a and b.

    Newcombe 1998, "Improved Confidence Intervals for the Difference between Binomial Proportions Based on Paired Data",
    method 8, with the correlation of the rows' means.
    """
    down, up = [], []
    for rows in zip(*both, strict=True):
        share = _mean([score for row in rows for score in row])
        low, high = _wilson(rows, share, _clustered_error(rows, share) or 0.0)
        down.append(share - low)
        up.append(high - share)
    correlation = _correlation(means)
    below = down[0] ** 2 - 2 * correlation * down[0] * up[1] + up[1] ** 2
    above = up[0] ** 2 - 2 * correlation * up[0] * down[1] + down[1] ** 2
    # A rounding error may make a square slightly negative.
    return max(difference - math.sqrt(max(below, 0.0)), -1.0), min(difference + math.sqrt(max(above, 0.0)), 1.0)


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Pearson's correlation of bounded values; 0 if one side doesn't vary."""
    centre_a, centre_b = (math.fsum(values) / len(pairs) for values in zip(*pairs, strict=True))
    spread = math.fsum((a - centre_a) ** 2 for a, _ in pairs) * math.fsum((b - centre_b) ** 2 for _, b in pairs)
    return math.fsum((a - centre_a) * (b - centre_b) for a, b in pairs) / math.sqrt(spread) if spread else 0.0


def _bootstrap(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return a percentile interval of the mean over resampled rows (Efron & Tibshirani 1993, chapter 13).

    Its percentiles are moved outwards, because plain ones are too narrow for few rows: Hesterberg 2015, "What Teachers
    Should Know About the Bootstrap", on expanded percentiles. The seed is fixed and rows are sorted, so that equal
    scores have equal intervals.
    """
    count = len(rows)
    scale = _scale_for(score for row in rows for score in row)
    # A row is its total and number of attempts, as one complex number: the sum of a sample then adds both.
    points = [complex(*pair) for pair in sorted((math.fsum(score * scale for score in row), len(row)) for row in rows)]
    draw = random.Random(_SEED).choices  # noqa: S311 - no secret
    sums = (sum(draw(points, k=count)) for _ in range(_RESAMPLES))
    means = sorted(total.real / total.imag / scale for total in sums)
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * t_critical(count - 1))
    cut = int(tail * _RESAMPLES)
    # A sum of equal scores may differ from them by a rounding error.
    low, high = min(map(min, rows)), max(map(max, rows))
    return min(max(means[cut], low), high), max(min(means[-1 - cut], high), low)


def _binary(scores: Iterable[float]) -> bool:
    return all(score in (0.0, 1.0) for score in scores)


def _filled(row: Sequence[float | None]) -> list[float]:
    return [0.0 if score is None else score for score in row]


def _mean(scores: Sequence[float | None]) -> float:
    # Most rows have a single attempt.
    if len(scores) == 1:
        return scores[0] or 0.0
    values = _filled(scores)
    scale = _scale_for(values)
    return math.fsum(value * scale for value in values) / max(len(values), 1) / scale


def _root_of_mean_square(values: Sequence[float], mean: float) -> float:
    scale = _scale_for(values)
    deviations = (value * scale - mean * scale for value in values)
    return math.sqrt(math.fsum(deviation * deviation for deviation in deviations) / max(len(values), 1)) / scale


def _scale_for(values: Iterable[float]) -> float:
    return _SCALE if max(map(abs, values), default=0.0) > _LARGE else 1.0


def _check_counts(n: int, c: int, k: int) -> None:
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
