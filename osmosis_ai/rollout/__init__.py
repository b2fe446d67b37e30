"""The rollout SDK: write agent loops, or workflows and their graders, and serve them to a trainer over HTTP.

Repositories import every name from here. Each name is loaded on first use, so that a loop doesn't pay for a server it
doesn't start. `RolloutContext` is the context of agent loops; called with a workflow's arguments, it creates the
context of workflows (`osmosis_ai.rollout.context.RolloutContext`) instead.
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
    from osmosis_ai.rollout.agent_workflow import AgentWorkflow
    from osmosis_ai.rollout.backend import ExecutionBackend, LocalBackend
    from osmosis_ai.rollout.context import (
        AgentWorkflowContext,
        GraderContext,
        HarborAgentWorkflowContext,
        RolloutTools,
        SampleSource,
        get_rollout_context,
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
    )
    from osmosis_ai.rollout.grader import Grader
    from osmosis_ai.rollout.server.app import create_app
    from osmosis_ai.rollout.server.auth import ControllerAuth
    from osmosis_ai.rollout.server.serve import serve_agent_loop
    from osmosis_ai.rollout.server.workflows import create_rollout_server
    from osmosis_ai.rollout.tools import (
        create_tool_error_result,
        create_tool_result,
        execute_tool_calls,
        get_tool_call_info,
        parse_tool_arguments,
        serialize_tool_result,
    )
    from osmosis_ai.rollout.types import (
        AgentWorkflowConfig,
        AgentWorkflowOutput,
        BaseConfig,
        ConcurrencyConfig,
        ExecutionOutcome,
        ExecutionRequest,
        ExecutionResult,
        GraderCompleteRequest,
        GraderConfig,
        GraderInitRequest,
        GraderInitResponse,
        MessageDict,
        RolloutCompleteRequest,
        RolloutInitRequest,
        RolloutInitResponse,
        RolloutResultResponse,
        RolloutSample,
    )
    from osmosis_ai.rollout.validator import ValidationIssue, ValidationResult, validate_agent_loop, validate_backend
    from osmosis_ai.rollout.vocabulary import GraderStatus, MultiTurnMode, RolloutErrorCategory, RolloutStatus

__all__ = [
    "AgentLoopError",
    "AgentLoopNotFoundError",
    "AgentWorkflow",
    "AgentWorkflowConfig",
    "AgentWorkflowContext",
    "AgentWorkflowOutput",
    "BaseConfig",
    "CompletionsRequest",
    "CompletionsResponse",
    "CompletionsResult",
    "ConcurrencyConfig",
    "ControllerAuth",
    "ExecutionBackend",
    "ExecutionOutcome",
    "ExecutionRequest",
    "ExecutionResult",
    "Grader",
    "GraderCompleteRequest",
    "GraderConfig",
    "GraderContext",
    "GraderInitRequest",
    "GraderInitResponse",
    "GraderStatus",
    "HarborAgentWorkflowContext",
    "InitResponse",
    "LocalBackend",
    "MessageDict",
    "MessagesRewrittenError",
    "MultiTurnMode",
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
    "RolloutCompleteRequest",
    "RolloutContext",
    "RolloutErrorCategory",
    "RolloutInitRequest",
    "RolloutInitResponse",
    "RolloutMetrics",
    "RolloutRequest",
    "RolloutResponse",
    "RolloutResult",
    "RolloutResultResponse",
    "RolloutSample",
    "RolloutStatus",
    "RolloutTools",
    "SampleSource",
    "ToolArgumentError",
    "ToolExecutionError",
    "ValidationIssue",
    "ValidationResult",
    "create_app",
    "create_rollout_server",
    "create_tool_error_result",
    "create_tool_result",
    "execute_tool_calls",
    "get_rollout_context",
    "get_tool_call_info",
    "parse_tool_arguments",
    "serialize_tool_result",
    "serve_agent_loop",
    "validate_agent_loop",
    "validate_backend",
]

_HOMES = (
    "errors",
    "rollout.vocabulary",
    "rollout.agent_workflow",
    "rollout.grader",
    "rollout.context",
    "rollout.tools",
    "rollout.core.schemas",
    "rollout.core.base",
    "rollout.types",
    "rollout.validator",
    "rollout.backend",
    "rollout.server.auth",
    "rollout.server",
)
"""The modules that define the names, in the order of lookup: modules that import little come first."""

_CHOSEN = {
    # Both kinds of rollouts have one.
    "RolloutContext": "rollout.core.base",
    # SDK 0.2 exported these here. They need the extra `strands`, so `import *` leaves them out.
    "OsmosisRolloutModel": "rollout.integrations.agents.strands",
    "OsmosisStrandsAgent": "rollout.integrations.agents.strands",
}
"""Names that aren't looked up."""


def __getattr__(name: str) -> object:
    if name not in __all__ and name not in _CHOSEN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (_CHOSEN[name],) if name in _CHOSEN else _HOMES
    modules = (import_module(f"osmosis_ai.{home}") for home in homes)
    value: object = next(getattr(module, name) for module in modules if name in module.__all__)
    # Python looks here first, so it asks only once for each name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
