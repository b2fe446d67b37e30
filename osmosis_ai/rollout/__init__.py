"""The remote rollout SDK: write your own agent loop and serve it to a trainer over HTTP.

Agent loops in training repositories import every name from here. Each name is loaded on first use, so that a loop
doesn't pay for a server it doesn't start.
"""

from __future__ import annotations

from importlib import import_module
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

_HOMES = ("errors", "rollout.tools", "rollout.core.schemas", "rollout.core.base", "rollout.validator", "rollout.server")
"""The modules that define the names. Names are looked up in this order, so modules that load little come first."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (import_module(f"osmosis_ai.{home}") for home in _HOMES)
    value: object = next(getattr(module, name) for module in modules if name in module.__all__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
