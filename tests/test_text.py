"""Text for a terminal contains no control sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from osmosis_ai.text import visible


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    safe = visible(text)
    assert all(character >= " " or character in "\t\n" for character in safe)
    assert not any("\x7f" <= character <= "\x9f" for character in safe)
    if text.isalnum():
        assert safe == text
