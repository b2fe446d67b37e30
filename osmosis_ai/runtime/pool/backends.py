"""The backends that run workers. To add one, write a file and add a line here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from osmosis_ai.errors import UsageError
from osmosis_ai.runtime.pool.base import Pool, PoolOptions
from osmosis_ai.runtime.pool.inline import open_inline
from osmosis_ai.runtime.pool.local import open_local
from osmosis_ai.runtime.pool.ray import open_ray
from osmosis_ai.runtime.protocol import WorkerSpec

__all__ = ["BACKENDS", "open_pool"]

Opener = Callable[[WorkerSpec, PoolOptions], AbstractAsyncContextManager[Pool]]

BACKENDS: dict[str, Opener] = {"inline": open_inline, "local": open_local, "ray": open_ray}
"""Each opener loads a repository into workers and yields them as a pool; it raises StartError if loading fails."""


def open_pool(spec: WorkerSpec, options: PoolOptions) -> AbstractAsyncContextManager[Pool]:
    """Load the repository into workers, or into this process.

    Raises StartError if something can't be loaded; the message names the user's file and line.
    """
    if options.backend not in BACKENDS:
        raise UsageError(f"--cluster {options.cluster}: write auto, local or ray://HOST:PORT")
    return BACKENDS[options.backend](spec, options)
