"""Agreement with labels, checked against values computed by hand and against properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osmosis_ai.reward_rubric.evaluation import Confusion, agreement, spearman

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
