"""The errors of agent loops and trainer connections, under the path that existing repositories import.

New code imports them from `osmosis_ai.errors`.
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
