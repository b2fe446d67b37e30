"""Where workers can run. Another place for them is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.pool.inline import open_inline
from osmosis_ai.runtime.pool.local import open_local
from osmosis_ai.runtime.pool.pool import WorkerPool
from osmosis_ai.runtime.protocol import WorkerSpec

__all__ = ["BACKENDS", "open_pool"]

Opener = Callable[[WorkerSpec, PoolOptions], AbstractAsyncContextManager[WorkerPool]]

BACKENDS: dict[str, Opener] = {"inline": open_inline, "local": open_local}
"""Each loads a repository and gives its workers as a pool; raises StartError when something can't be loaded."""


def open_pool(spec: WorkerSpec, options: PoolOptions) -> AbstractAsyncContextManager[WorkerPool]:
    """Load the repository into workers, or into this process.

    Raises StartError when something can't be loaded; the message names the user's file and line.
    """
    return BACKENDS[options.backend](spec, options)
