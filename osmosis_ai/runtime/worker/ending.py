"""The error that ends a worker for a reason outside its own code."""

from __future__ import annotations

from osmosis_ai.errors import OsmosisError
from osmosis_ai.runtime import protocol

__all__ = ["WorkerEndsError"]


class WorkerEndsError(OsmosisError):
    """The worker ends, and loses its jobs; `event` tells the run why."""

    def __init__(self, event: protocol.Dying | protocol.Stuck) -> None:
        super().__init__(event.reason if isinstance(event, protocol.Dying) else "stuck")
        self.event = event
