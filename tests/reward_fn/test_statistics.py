"""Statistics against brute force, the standard library, published tables and simulation."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from itertools import combinations, pairwise
from time import perf_counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osmosis_ai.reward_fn.statistics import (
    FunctionStatistics,
    paired,
    pass_at_k,
    pass_hat_k,
    summarize,
    t_critical,
)

score = st.floats(-1e6, 1e6)
maybe_score = st.one_of(st.none(), score)
row_lists = st.lists(st.lists(maybe_score, min_size=1, max_size=5), min_size=1, max_size=12)
near = pytest.approx


def filled(rows: list[list[float | None]]) -> list[list[float]]:
    return [[0.0 if value is None else value for value in row] for row in rows]


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_and_pass_hat_k_are_the_shares_of_all_choices_of_k_attempts(
    passed: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(passed)))
    choices = list(combinations(passed, k))
    n, c = len(passed), sum(passed)
    assert pass_at_k(n, c, k) == near(sum(map(any, choices)) / len(choices))
    assert pass_hat_k(n, c, k) == near(sum(map(all, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(0, 0, 1), (3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    for estimate in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="needs 1 <= k <= n"):
            estimate(n, c, k)


@given(row_lists)
def test_the_moments_are_those_of_the_standard_library(rows: list[list[float | None]]) -> None:
    found = summarize(rows, 1.0)
    values = [value for row in filled(rows) for value in row]
    scored = [value for row in rows for value in row if value is not None]
    assert (found.rows, found.count, found.scored) == (len(rows), len(values), len(scored))
    assert found.scoring_errors == len(values) - len(scored)
    assert found.mean == near(statistics.fmean(values), rel=1e-12, abs=1e-9)
    assert found.std == near(statistics.pstdev(values), rel=1e-9, abs=1e-6)
    assert (found.min, found.max) == (min(values), max(values))
    assert found.mean_scored == (near(statistics.fmean(scored), abs=1e-9) if scored else None)


@given(st.lists(score, min_size=2, max_size=20))
def test_with_one_attempt_per_row_the_standard_error_is_the_plain_one(values: list[float]) -> None:
    found = summarize([[value] for value in values], 1.0)
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert found.standard_error == near(error, rel=1e-9, abs=1e-6)


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.lists(st.lists(maybe_score, min_size=n, max_size=n), min_size=2, max_size=10)
    )
)
def test_with_equal_rows_the_standard_error_is_that_of_the_row_means(rows: list[list[float | None]]) -> None:
    means = [statistics.fmean(row) for row in filled(rows)]
    expected = statistics.stdev(means) / math.sqrt(len(means))
    assert summarize(rows, 1.0).standard_error == near(expected, rel=1e-9, abs=1e-6)


@given(row_lists.filter(lambda rows: len(rows) > 1))
def test_with_unequal_rows_the_standard_error_adds_the_covariances_within_rows(rows: list[list[float | None]]) -> None:
    values = [value for row in filled(rows) for value in row]
    mean, groups = statistics.fmean(values), len(rows)
    total = sum((a - mean) * (b - mean) for row in filled(rows) for a in row for b in row)
    expected = math.sqrt(max(total, 0.0) * groups / (groups - 1)) / len(values)
    # The double sum cancels to a rounding error where the true value is 0.
    assert summarize(rows, 1.0).standard_error == near(expected, rel=1e-6, abs=1e-1)


def test_identical_attempts_add_no_certainty() -> None:
    single = summarize([[1.0], [0.0], [0.0], [1.0], [1.0]], 1.0)
    repeated = summarize([[1.0] * 8, [0.0] * 8, [0.0] * 8, [1.0] * 8, [1.0] * 8], 1.0)
    assert repeated.standard_error == near(single.standard_error)
    assert repeated.confidence_interval == near(single.confidence_interval)


@given(row_lists, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[list[float | None]], randomly: random.Random) -> None:
    shuffled = rows.copy()
    randomly.shuffle(shuffled)
    assert summarize(shuffled, 1.0) == summarize(rows, 1.0)


@given(row_lists, st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
def test_pass_rates_are_the_mean_over_rows_with_lacking_attempts_as_failures(
    rows: list[list[float | None]], threshold: float
) -> None:
    found = summarize(rows, threshold)
    longest = max(map(len, rows))
    ks = [k for k in (1, 3, 5, 10) if k <= longest] if longest > 1 else []
    assert list(found.pass_at_k) == list(found.pass_hat_k) == ks
    for k in ks:
        some, every = [], []
        for row in rows:
            passed = [value is not None and value >= threshold for value in row]
            choices = list(combinations(passed + [False] * (k - len(passed)), k))
            some.append(statistics.fmean(map(any, choices)))
            every.append(statistics.fmean(map(all, choices)))
        assert found.pass_at_k[k] == near(statistics.fmean(some))
        assert found.pass_hat_k[k] == near(statistics.fmean(every))


def test_a_missing_score_counts_as_zero_but_never_passes() -> None:
    found = summarize([[None, 0.0, 1.0], [None, None, None]], 0.0)
    assert (found.mean, found.mean_scored, found.scoring_errors) == (near(1 / 6), 0.5, 4)
    assert found.pass_at_k[1] == near(1 / 3)
    assert found.pass_hat_k[1] == near(1 / 3)


def test_missing_scores_that_are_not_the_functions_fault_are_told_apart() -> None:
    found = summarize([[None], [1.0], [None]], 1.0, scoring_errors=1)
    assert (found.count, found.scored, found.scoring_errors) == (3, 1, 1)


def test_the_example_with_five_attempts() -> None:
    found = summarize([[1.0, 1.0, 0.0, 0.0, 0.0], [1.0] * 5], 1.0)
    assert found.pass_at_k == {1: near(0.7), 3: near((0.9 + 1) / 2), 5: 1.0}
    assert found.pass_hat_k == {1: near(0.7), 3: 0.5, 5: 0.5}


def test_nothing_and_one_row_have_no_uncertainty() -> None:
    for rows in ([], [[]]):
        nothing = summarize(rows, 1.0)
        assert (nothing.rows, nothing.count, nothing.mean, nothing.std) == (0, 0, 0.0, 0.0)
        assert (nothing.mean_scored, nothing.standard_error, nothing.confidence_interval) == (None, None, None)
    one = summarize([[1.0, 0.0]], 1.0)
    assert (one.mean, one.standard_error, one.confidence_interval) == (0.5, None, None)
    assert one.pass_at_k == {1: 0.5}


def test_a_row_without_attempts_is_left_out() -> None:
    assert summarize([[1.0, 0.0], [], [1.0, 1.0]], 1.0) == summarize([[1.0, 0.0], [1.0, 1.0]], 1.0)


def test_huge_scores_stay_finite() -> None:
    found = summarize([[1.5e308], [1.5e308], [-1.5e308], [1e300]], 1.0)
    assert found.mean == near(0.375e308)
    assert found.std == near(1.5e308 * math.sqrt(0.75 - 0.0625), rel=1e-6)
    assert math.isfinite(found.standard_error or math.nan)


def test_sums_are_exact() -> None:
    found = summarize([[1e16], [1.0], [-1e16]], 1.0)
    assert found.mean == near(1 / 3)


@given(st.lists(st.tuples(st.lists(maybe_score, max_size=4), st.lists(maybe_score, max_size=4)), max_size=12))
def test_the_paired_comparison_is_that_of_row_means(pairs: list[tuple[list[float | None], list[float | None]]]) -> None:
    found = paired([a for a, _ in pairs], [b for _, b in pairs])
    differences = [statistics.fmean(filled([a])[0]) - statistics.fmean(filled([b])[0]) for a, b in pairs if a and b]
    assert found.rows == len(differences) == found.wins + found.losses + found.ties
    assert found.wins == sum(difference > 1e-9 for difference in differences)
    assert found.losses == sum(difference < -1e-9 for difference in differences)
    assert found.mean_difference == near(statistics.fmean(differences) if differences else 0.0, rel=1e-9, abs=1e-6)
    if len(differences) < 2:
        assert found.standard_error is None
        assert found.confidence_interval is None
    else:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        assert found.standard_error == near(error, rel=1e-9, abs=1e-6)


@given(row_lists)
def test_against_itself_everything_ties(rows: list[list[float | None]]) -> None:
    found = paired(rows, rows)
    assert (found.wins, found.losses, found.ties, found.mean_difference) == (0, 0, len(rows), 0.0)


def test_rounding_is_a_tie_and_swapping_sides_swaps_the_result() -> None:
    a, b = [[0.1, 0.2], [1.0], [0.0], [0.5]], [[0.15, 0.15 + 1e-12], [0.0], [1.0], [0.25]]
    one, other = paired(a, b), paired(b, a)
    assert (one.wins, one.losses, one.ties) == (2, 1, 1)
    assert (other.wins, other.losses, other.ties) == (1, 2, 1)
    assert other.mean_difference == -one.mean_difference


def test_different_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired([[1.0], [1.0]], [[1.0]])


@pytest.mark.parametrize(
    ("degrees", "confidence", "expected"),
    [
        # Table of critical values in any textbook, for example NIST/SEMATECH e-Handbook, 1.3.6.7.2.
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.95, 3.182),
        (4, 0.95, 2.776),
        (5, 0.95, 2.571),
        (10, 0.95, 2.228),
        (29, 0.95, 2.045),
        (30, 0.95, 2.042),
        (60, 0.95, 2.000),
        (100, 0.95, 1.984),
        (1, 0.99, 63.657),
        (10, 0.99, 3.169),
        (25, 0.90, 1.708),
        (1_000_000, 0.95, 1.960),
    ],
)
def test_t_agrees_with_the_tables(degrees: int, confidence: float, expected: float) -> None:
    assert t_critical(degrees, confidence) == near(expected, abs=6e-4)


def test_t_has_closed_forms_and_no_seam() -> None:
    for confidence in (0.5, 0.9, 0.95, 0.999):
        assert t_critical(1, confidence) == near(math.tan(math.pi * confidence / 2), rel=1e-9)
        assert t_critical(2, confidence) == near(confidence * math.sqrt(2 / (1 - confidence**2)), rel=1e-9)
    values = [t_critical(degrees) for degrees in range(190, 212)]
    steps = [a - b for a, b in pairwise(values)]
    assert all(a > b > 0 for a, b in pairwise(steps))


@given(st.lists(st.lists(maybe_score, min_size=1, max_size=4), min_size=2, max_size=60))
def test_an_interval_is_within_the_range_of_the_scores_and_holds_the_mean(rows: list[list[float | None]]) -> None:
    found = summarize(rows, 1.0)
    assert found.confidence_interval is not None
    low, high = found.confidence_interval
    possible = {0.0, 1.0} if {found.min, found.max} <= {0.0, 1.0} else {found.min, found.max}
    assert min(possible) <= low <= high <= max(possible)


@pytest.mark.parametrize(
    ("passed", "rows", "expected"),
    [
        # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_the_interval_of_a_share_is_that_of_wilson(passed: int, rows: int, expected: tuple[float, float]) -> None:
    scores = [[1.0]] * passed + [[0.0]] * (rows - passed)
    assert summarize(scores, 1.0).confidence_interval == near(expected, abs=6e-5)


def test_attempts_of_one_row_that_all_agree_narrow_no_interval_and_independent_ones_do() -> None:
    rows = [[1.0], [0.0], [1.0], [1.0], [0.0], [1.0]]
    single = summarize(rows, 1.0).confidence_interval
    assert summarize([row * 9 for row in rows], 1.0).confidence_interval == near(single)
    assert single is not None
    mixed = summarize([[1.0, 0.0, 1.0]] * 6, 1.0).confidence_interval
    assert mixed is not None
    assert mixed[1] - mixed[0] < single[1] - single[0]


def test_rows_that_all_pass_leave_room_for_doubt() -> None:
    found = summarize([[1.0]] * 3, 1.0).confidence_interval
    assert found == near((0.4385, 1.0), abs=1e-4)
    difference = paired([[1.0]] * 3, [[0.0]] * 3).confidence_interval
    assert difference == near((1 - math.hypot(0.5615, 0.5615), 1.0), abs=1e-4)


def test_equal_scores_have_equal_intervals() -> None:
    rows: list[list[float | None]] = [[0.1 * number, 0.2] for number in range(10)]
    assert summarize(rows, 1.0) == summarize(rows[::-1], 1.0)
    assert paired(rows, rows[::-1]) == paired(rows, rows[::-1])


def test_huge_scores_have_a_finite_interval() -> None:
    found = summarize([[1e300], [-1e300], [0.5]], 1.0).confidence_interval
    assert found == (-1e300, 1e300)


def coverage(draw: Callable[[], tuple[float, float]], truth: float, trials: int) -> float:
    covered = [low <= truth <= high for low, high in (draw() for _ in range(trials))]
    return sum(covered) / trials


@pytest.mark.parametrize(("rows", "trials"), [(8, 600), (60, 3000)])
def test_the_interval_of_the_mean_covers_the_truth_about_as_often_as_it_says(rows: int, trials: int) -> None:
    randomly = random.Random(20240601)

    def interval() -> tuple[float, float]:
        centres = [randomly.gauss(0.4, 0.3) for _ in range(rows)]
        found = summarize([[randomly.gauss(centre, 0.2) for _ in range(3)] for centre in centres], 1.0)
        assert found.confidence_interval is not None
        return found.confidence_interval

    # A plain percentile bootstrap of 8 rows would cover 0.89.
    assert coverage(interval, 0.4, trials) == near(0.945, abs=0.03)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_intervals_of_shares_cover_the_truth_about_as_often_as_they_say(share: float) -> None:
    randomly = random.Random(20240602)

    def passes(chance: float) -> list[float | None]:
        return [float(randomly.random() < chance)]

    def of_a_share() -> tuple[float, float]:
        found = summarize([passes(share) for _ in range(30)], 1.0).confidence_interval
        assert found is not None
        return found

    def of_a_difference() -> tuple[float, float]:
        found = paired([passes(share) for _ in range(30)], [passes(0.3) for _ in range(30)]).confidence_interval
        assert found is not None
        return found

    assert coverage(of_a_share, share, 2000) == near(0.955, abs=0.025)
    assert coverage(of_a_difference, share - 0.3, 2000) == near(0.955, abs=0.025)


def test_a_hundred_thousand_rows_take_seconds_at_most() -> None:
    rows = [[float(number % 3 == 0)] for number in range(100_000)]
    started = perf_counter()
    found = summarize(rows, 1.0)
    # Several times what it takes: this catches a quadratic or exact-fraction computation, not a busy machine.
    assert perf_counter() - started < 10.0
    assert found.mean == near(1 / 3, abs=1e-5)


def test_the_record_survives_json() -> None:
    found = summarize([[1.0, 0.0, 1.0], [0.0, None, 0.0]], 1.0)
    encoded = msgspec.json.encode(found)
    assert msgspec.json.decode(encoded, type=FunctionStatistics) == found
    assert b'"pass_at_1":' in encoded
    assert b'"pass_at_5":' not in encoded
