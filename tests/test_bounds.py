"""Bounds on values from outside."""

from __future__ import annotations

import pytest

from osmosis_ai.bounds import MAX_COUNT, MAX_DEPTH, count_of, too_deep


def nested(levels: int) -> object:
    value: object = "x"
    for level in range(levels):
        value = [value, "y"] if level % 2 else {"a": 1, "b": value}
    return value


def test_nesting_is_counted_in_lists_and_dicts() -> None:
    assert not too_deep("text")
    assert not too_deep(nested(MAX_DEPTH))
    assert not too_deep([nested(MAX_DEPTH - 1)] * 3)
    assert too_deep(nested(MAX_DEPTH + 1))
    assert too_deep(["shallow", nested(100_000)])


def test_a_value_that_holds_itself_twice_is_too_deep() -> None:
    endless: list[object] = []
    endless += [endless, endless]
    assert too_deep(endless)


@pytest.mark.parametrize("number", [0, 7, MAX_COUNT])
def test_a_count_is_kept(number: int) -> None:
    assert count_of(number) == number


@pytest.mark.parametrize("value", [True, -1, 1.0, "7", None, [], MAX_COUNT + 1, 10**400])
def test_what_is_no_count_counts_nothing(value: object) -> None:
    assert count_of(value) == 0
