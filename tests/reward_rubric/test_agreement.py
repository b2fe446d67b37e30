"""Agreement with labels, checked against values computed by hand and against properties."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osmosis_ai.reward_rubric.agreement import Confusion, agreement, kappa, spearman

NUMBERS = st.floats(-100, 100, allow_nan=False)


def test_known_values() -> None:
    found = agreement("label", [0.9, 0.2, 0.4, 0.6], [1.0, 0.0, 0.5, 0.0], 0.5)
    assert found.mean_absolute_error == pytest.approx((0.1 + 0.2 + 0.1 + 0.6) / 4)
    assert found.confusion == Confusion(true_positive=1, false_positive=1, false_negative=1, true_negative=1)
    assert found.accuracy == 0.5
    # Ranks 4 1 2 3 against 4 1.5 3 1.5: products 3, squares 5 and 4.5.
    assert found.spearman == pytest.approx(3.0 / math.sqrt(5 * 4.5))


def test_ranks_do_not_ask_for_a_straight_line() -> None:
    assert spearman([1, 2, 3], [1, 10, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1], [2]), ([1, 1], [1, 2]), ([1, 2], [3, 3])])
def test_where_there_is_no_correlation_it_is_none(a: list[float], b: list[float]) -> None:
    assert spearman(a, b) is None


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1))
def test_it_is_symmetric_and_bounded(pairs: list[tuple[float, float]]) -> None:
    a, b = (list(side) for side in zip(*pairs, strict=True))
    rank = spearman(a, b)
    assert rank == spearman(b, a)
    assert rank is None or -1 <= rank <= 1
    assert agreement("label", a, a, 0.0).mean_absolute_error == 0
    assert agreement("label", a, b, 0.0).records == len(pairs)


def test_as_many_scores_as_labels_are_needed() -> None:
    with pytest.raises(ValueError, match="shorter"):
        agreement("label", [1.0], [], 0.5)


def test_kappa_of_cohens_textbook_case() -> None:
    # 45 and 15 both, 25 and 15 one alone: observed 0.6, by chance 0.54.
    assert kappa(Confusion(45, 15, 25, 15)) == pytest.approx((0.6 - 0.54) / (1 - 0.54))
    found = agreement("label", [1, 1, 0, 0], [1, 1, 0, 0], 0.5)
    assert (found.kappa, found.accuracy) == (1.0, 1.0)
    # Four of four is no proof.
    assert isinstance(found.accuracy_interval, tuple)
    assert found.accuracy_interval == pytest.approx((0.510, 1.0), abs=1e-3)
    assert found.kappa_interval == pytest.approx((0.020, 1.0), abs=1e-3)


def test_kappa_is_not_defined_where_both_always_say_the_same() -> None:
    found = agreement("label", [1, 1, 1], [1, 1, 1], 0.5)
    assert (found.accuracy, found.kappa, found.kappa_interval) == (1.0, None, None)
    assert agreement("label", [1], [0], 0.5).accuracy_interval is None


def test_attempts_at_one_row_count_less_than_rows() -> None:
    scores, labels = [1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 1, 1]
    alone = agreement("label", scores, labels, 0.5)
    together = agreement("label", scores, labels, 0.5, rows=[0, 0, 1, 1, 2, 2, 3, 3])
    assert isinstance(alone.accuracy_interval, tuple)
    assert isinstance(together.accuracy_interval, tuple)
    assert together.accuracy == alone.accuracy
    assert together.accuracy_interval[0] < alone.accuracy_interval[0]


def test_labels_may_have_a_scale_of_their_own() -> None:
    found = agreement("human", [6.0, 9.0], [0, 1], 8.0, label_threshold=0.5)
    assert found.confusion == Confusion(1, 0, 0, 1)


@pytest.mark.parametrize("cells", [(45, 5, 5, 45), (70, 10, 10, 10), (85, 5, 5, 5), (25, 25, 25, 25)])
def test_the_interval_of_kappa_holds_what_it_promises_also_for_few_records(cells: tuple[int, ...]) -> None:
    true, draw = kappa(Confusion(*cells)), random.Random(1)
    assert true is not None
    held = []
    for _ in range(300):
        drawn = draw.choices([(1, 1), (1, 0), (0, 1), (0, 0)], cells, k=20)
        found = agreement("label", [score for score, _ in drawn], [label for _, label in drawn], 0.5).kappa_interval
        if isinstance(found, tuple):
            held.append(found[0] <= true <= found[1])
    assert sum(held) / len(held) > 0.92
