"""Agent loops of one's own, and the server that offers them to a trainer: the remote rollout SDK.

The names are loaded when they are first used, so that a loop doesn't pay for a server it doesn't start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from osmosis_ai.compat import ROLLOUT_NAMES, lazy_names

if TYPE_CHECKING:
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
    from osmosis_ai.rollout.core.base import CompletionsResult, RolloutAgentLoop, RolloutContext, RolloutResult
    from osmosis_ai.rollout.core.schemas import (
        CompletionsRequest,
        CompletionsResponse,
        InitResponse,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionPropertySchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolSchema,
        RolloutMetrics,
        RolloutRequest,
        RolloutResponse,
        RolloutStatus,
    )
    from osmosis_ai.rollout.server.app import create_app
    from osmosis_ai.rollout.server.serve import serve_agent_loop
    from osmosis_ai.rollout.tools import (
        create_tool_error_result,
        create_tool_result,
        execute_tool_calls,
        get_tool_call_info,
        parse_tool_arguments,
        serialize_tool_result,
    )
    from osmosis_ai.rollout.validator import ValidationIssue, ValidationResult, validate_agent_loop

__all__ = [
    "AgentLoopError",
    "AgentLoopNotFoundError",
    "CompletionsRequest",
    "CompletionsResponse",
    "CompletionsResult",
    "InitResponse",
    "MessagesRewrittenError",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "OsmosisRolloutError",
    "OsmosisServerError",
    "OsmosisTimeoutError",
    "OsmosisTransportError",
    "OsmosisValidationError",
    "RolloutAgentLoop",
    "RolloutContext",
    "RolloutMetrics",
    "RolloutRequest",
    "RolloutResponse",
    "RolloutResult",
    "RolloutStatus",
    "ToolArgumentError",
    "ToolExecutionError",
    "ValidationIssue",
    "ValidationResult",
    "create_app",
    "create_tool_error_result",
    "create_tool_result",
    "execute_tool_calls",
    "get_tool_call_info",
    "parse_tool_arguments",
    "serialize_tool_result",
    "serve_agent_loop",
    "validate_agent_loop",
]

__getattr__ = lazy_names(__name__, ROLLOUT_NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
