"""The errors of agent loops and of their talk with a trainer, under the path that repositories import.

New code imports them from `osmosis_ai.errors`, the one error tree.
"""

from __future__ import annotations

from osmosis_ai.errors import AgentLoopError as AgentLoopError
from osmosis_ai.errors import AgentLoopNotFoundError as AgentLoopNotFoundError
from osmosis_ai.errors import MessagesRewrittenError as MessagesRewrittenError
from osmosis_ai.errors import OsmosisRolloutError as OsmosisRolloutError
from osmosis_ai.errors import OsmosisServerError as OsmosisServerError
from osmosis_ai.errors import OsmosisTimeoutError as OsmosisTimeoutError
from osmosis_ai.errors import OsmosisTransportError as OsmosisTransportError
from osmosis_ai.errors import OsmosisValidationError as OsmosisValidationError
from osmosis_ai.errors import ToolArgumentError as ToolArgumentError
from osmosis_ai.errors import ToolExecutionError as ToolExecutionError
