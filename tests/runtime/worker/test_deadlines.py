"""Deadlines that pause while another job blocks the event loop."""

from __future__ import annotations

import threading

import anyio
import pytest

from osmosis_ai.runtime.worker.deadlines import Deadlines


@pytest.mark.anyio
async def test_a_limit_cancels_its_block() -> None:
    with Deadlines().limit(0.01, "a") as clock:
        await anyio.sleep_forever()
    assert clock.cancelled_caught


@pytest.mark.anyio
async def test_no_limit_never_cancels() -> None:
    deadlines = Deadlines()
    with deadlines.limit(None, "a") as clock:
        deadlines.give_back(10.0, None)
        assert not deadlines.expired("a")
        await anyio.lowlevel.checkpoint()
    assert not clock.cancelled_caught


@pytest.mark.anyio
async def test_time_is_given_back_to_all_but_the_culprit() -> None:
    deadlines = Deadlines()
    with deadlines.limit(100.0, "innocent") as innocent, deadlines.limit(100.0, "culprit") as culprit:
        before = innocent.deadline, culprit.deadline
        deadlines.give_back(7.0, "culprit")
        assert innocent.deadline == before[0] + 7.0
        assert culprit.deadline == before[1]
        deadlines.give_back(1.0, None)
        assert (innocent.deadline, culprit.deadline) == (before[0] + 8.0, before[1] + 1.0)


@pytest.mark.anyio
async def test_a_limit_that_has_run_out_stays_so() -> None:
    deadlines = Deadlines()
    with deadlines.limit(0.001, "a") as clock:
        clock.cancel()
        before = clock.deadline
        deadlines.give_back(60.0, None)
        assert clock.deadline == before


@pytest.mark.anyio
async def test_other_threads_can_ask_who_is_out_of_time_while_the_loop_stands_still() -> None:
    deadlines = Deadlines()
    asked: list[tuple[bool, bool]] = []

    def ask() -> None:
        asked.append((deadlines.expired("late"), deadlines.expired("early")))

    with deadlines.limit(0.0, "late"), deadlines.limit(100.0, "early"):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert asked == [(True, False)]
    assert not deadlines.expired("late")
