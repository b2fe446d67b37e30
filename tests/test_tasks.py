"""A task group raises what its tasks raised in the form that callers catch."""

from __future__ import annotations

import asyncio
import sys

import pytest

from osmosis_ai.errors import StoreError
from osmosis_ai.tasks import task_group

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


def run(*errors: Exception) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def nested() -> None:
        async with task_group() as outer, task_group() as inner:
            for group, error in zip((outer, inner, inner), errors, strict=False):
                group.start_soon(fail, error)

    asyncio.run(nested())


def test_several_tasks_that_meet_the_same_trouble_raise_it_once() -> None:
    with pytest.raises(StoreError, match="disk full"):
        run(*[StoreError("disk full")] * 3)
    with pytest.raises(StoreError, match="disk full"):
        run(StoreError("disk full"))


def test_a_fault_of_the_program_is_never_hidden_behind_an_error() -> None:
    with pytest.raises(BaseExceptionGroup):
        run(StoreError("disk full"), ValueError("a fault"))
