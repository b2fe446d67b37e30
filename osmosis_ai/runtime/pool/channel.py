"""What the run needs of a worker, wherever that runs: no socket, no process id, no path of its machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from osmosis_ai.runtime.protocol import Event, Order

__all__ = ["LOAD_SECONDS", "Channel", "Spawner"]

LOAD_SECONDS = 120.0
"""How long user code may take to load."""


class Channel(Protocol):
    """A connection to one worker."""

    @property
    def ending(self) -> str:
        """How the worker ended, in words; known when `read` has returned."""
        ...

    async def read(self, take: Callable[[Event], None]) -> None:
        """Hand over every event, in order, until the worker has ended and nothing that it started is left.

        When cancelled, it ends the worker first.
        """

    def send(self, order: Order) -> None:
        """Send the worker a job, or an order about one; lost when the worker has ended."""

    def kill(self) -> None:
        """End the worker and whatever it started, now. May be called from a signal handler."""

    def memory(self) -> int:
        """Bytes the worker holds; 0 if nobody knows."""
        ...


class Spawner(Protocol):
    """Starts workers of one kind."""

    async def spawn(self) -> Channel:
        """Start one; raises OSError when it can't."""
        ...

    def stop(self) -> None:
        """Start no more, and give up a start that doesn't come to an end."""

    async def aclose(self) -> None:
        """End what was needed for starting them."""
