"""Numbers are written in one way, and text for a terminal contains no control sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osmosis_ai.text import cost, duration, excerpt, score_number, visible


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    safe = visible(text)
    assert all(character >= " " or character in "\t\n" for character in safe)
    assert not any("\x7f" <= character <= "\x9f" for character in safe)
    if text.isalnum():
        assert safe == text


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (0.04, "0.0 ms"),
        (999.94, "999.9 ms"),
        (999.96, "1.0 s"),
        (59_940, "59.9 s"),
        (59_960, "1 min 0 s"),
        (125_000, "2 min 5 s"),
        (3_599_700, "1 h 0 min"),
        (90_000_000, "25 h 0 min"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(milliseconds: float, shown: str) -> None:
    assert duration(milliseconds) == shown


@pytest.mark.parametrize(
    ("value", "sign", "shown"),
    [
        (None, "", "–"),
        (0.3333, "", "0.333"),
        (-0.0001, "", "0.000"),
        (-0.0, "+", "+0.000"),
        (0.25, "+", "+0.250"),
        (999_999.0, "", "999999.000"),
        (1e300, "", "1.00e+300"),
        (-1e300, "+", "-1.00e+300"),
    ],
)
def test_a_score_has_three_decimals_or_an_exponent(value: float | None, sign: str, shown: str) -> None:
    assert score_number(value, sign) == shown


def test_a_cost_has_cents_or_fractions_of_one() -> None:
    assert [cost(dollars) for dollars in (0.0, 0.01234, 1.5, 1234.5)] == ["$0.0000", "$0.0123", "$1.50", "$1,234.50"]


def test_an_excerpt_is_one_line() -> None:
    assert excerpt(" a\n b  c", 10) == "a b c"
    assert excerpt("abcdef", 4) == "abc…"
