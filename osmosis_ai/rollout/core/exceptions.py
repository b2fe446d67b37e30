"""The errors of agent loops and of their talk with a trainer, under the path that repositories import.

New code imports them from `osmosis_ai.errors`, the one error tree.
"""

from __future__ import annotations

from osmosis_ai.errors import (
    AgentLoopError,
    AgentLoopNotFoundError,
    MessagesRewrittenError,
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisTimeoutError,
    OsmosisTransportError,
    OsmosisValidationError,
    ToolArgumentError,
    ToolExecutionError,
)

__all__ = [
    "AgentLoopError",
    "AgentLoopNotFoundError",
    "MessagesRewrittenError",
    "OsmosisRolloutError",
    "OsmosisServerError",
    "OsmosisTimeoutError",
    "OsmosisTransportError",
    "OsmosisValidationError",
    "ToolArgumentError",
    "ToolExecutionError",
]
