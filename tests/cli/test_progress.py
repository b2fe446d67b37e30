"""The progress line: one line at every width, with the most important facts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from osmosis_ai.cli.console import Output
from osmosis_ai.cli.progress import RunProgress
from osmosis_ai.records import Score
from osmosis_ai.runtime.pool.base import InFlight

HELD = InFlight(row_index=2, run_index=0, seconds=17.2, waiting_on="the model")


def progress(total: int, done: int = 0, oldest: Callable[[], InFlight | None] = lambda: None) -> RunProgress:
    shown = RunProgress(Output(), total, oldest)
    shown.advance(done)
    shown.scores_done([Score(function="f", value=0.25), Score(function="g", value=0.75)])
    return shown


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 160])
@pytest.mark.parametrize("total", [3, 47, 2_350, 1_000_000])
@pytest.mark.parametrize("oldest", [None, HELD])
def test_the_line_fits(width: int, total: int, oldest: InFlight | None) -> None:
    bar, text = progress(total, total // 2, lambda: oldest).line(width)
    # A very narrow terminal cuts the most important fact, which is always there.
    least = len(
        f"{total:,}/{total:,}  oldest: row 2 for 17 s, waiting for the model"
        if oldest
        else f"{total:,}/{total:,}  0 failed"
    )
    assert bar + 2 + len(text) <= max(width, least + 2)


def test_sixty_columns_hold_what_matters() -> None:
    bar, text = progress(2_350, 47).line(60)
    assert bar > 0
    assert text.startswith("   47/2,350  0 failed  ")
    assert " left" in text
    assert text.endswith("  mean score 0.500")


def test_a_wide_terminal_holds_everything() -> None:
    assert re.fullmatch(
        r" 0/47  0 failed  0:00 elapsed  mean score 0\.500  0\.0/s  0 tokens", progress(47).line(120)[1]
    )


def test_what_hangs_is_named_even_on_a_narrow_terminal() -> None:
    assert progress(47, 46, lambda: HELD).line(60) == (
        0,
        "46/47  oldest: row 2 for 17 s, waiting for the model",
    )


def test_the_line_keeps_its_width_while_it_counts() -> None:
    widths = {progress(2_350, done).line(60)[1].index("failed") for done in (0, 9, 99, 999, 2_350)}
    assert len(widths) == 1
