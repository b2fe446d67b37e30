"""Agent loops of one's own, and the server that offers them to a trainer: the remote rollout SDK.

The names are loaded when they are first used, so that a loop doesn't pay for a server it doesn't start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

_HOMES = {
    "osmosis_ai.errors": (
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
    ),
    "osmosis_ai.rollout.core.base": ("CompletionsResult", "RolloutAgentLoop", "RolloutContext", "RolloutResult"),
    "osmosis_ai.rollout.core.schemas": (
        "CompletionsRequest",
        "CompletionsResponse",
        "InitResponse",
        "OpenAIFunctionParametersSchema",
        "OpenAIFunctionPropertySchema",
        "OpenAIFunctionSchema",
        "OpenAIFunctionToolSchema",
        "RolloutMetrics",
        "RolloutRequest",
        "RolloutResponse",
        "RolloutStatus",
    ),
    "osmosis_ai.rollout.server.app": ("create_app",),
    "osmosis_ai.rollout.server.serve": ("serve_agent_loop",),
    "osmosis_ai.rollout.tools": (
        "create_tool_error_result",
        "create_tool_result",
        "execute_tool_calls",
        "get_tool_call_info",
        "parse_tool_arguments",
        "serialize_tool_result",
    ),
    "osmosis_ai.rollout.validator": ("ValidationIssue", "ValidationResult", "validate_agent_loop"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
