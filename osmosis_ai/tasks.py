"""Task groups that raise a failure unwrapped."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from osmosis_ai.errors import OsmosisError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

__all__ = ["task_group"]


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Open an anyio task group that raises a lone exception unwrapped, so callers can catch it by type.

    It also raises the first of several OsmosisErrors: tasks that meet the same trouble at once say the same.
    """
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as failures:
        error, *others = _leaves(failures)
        if others and not all(isinstance(each, OsmosisError) for each in (error, *others)):
            raise
        # "from" its own cause: otherwise the traceback would show the group as context.
        raise error from error.__cause__


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
