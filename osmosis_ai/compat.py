"""Names that stay because repositories and scripts written for earlier versions use them.

New code has no need of them; whatever is here for that reason alone stands in this file, with what it stands for.

- `osmosis_ai.rollout`: every name of the rollout SDK was importable from the package itself, wherever it lived, and
  agent loops in training repositories import them so. `ROLLOUT_NAMES` says where each lives now.
- `osmosis_ai.rollout.core.base`, `.core.schemas` and `.core.exceptions`: the modules those names lived in. The
  errors have moved to `osmosis_ai.errors`; `core/exceptions.py` holds nothing but their names.
- `serve_agent_loop(skip_register=…)`: loops were registered with the platform; nothing is registered now.

This module is imported by the command line and by packages that users import, so it imports nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["ROLLOUT_NAMES", "lazy_names"]

ROLLOUT_NAMES: Mapping[str, tuple[str, ...]] = {
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


def lazy_names(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """Make a package's `__getattr__`, which imports a name's module when the name is first used.

    Args:
        package: The package's own name.
        homes: The names by the module they live in.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import sys
        from importlib import import_module

        value: object = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
