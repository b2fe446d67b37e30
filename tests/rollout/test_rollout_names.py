"""Every name and path of `osmosis_ai.rollout` that repositories import resolves, without needless imports."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import osmosis_ai.rollout as rollout

PATHS = {
    "osmosis_ai.rollout": [
        "RolloutAgentLoop",
        "RolloutContext",
        "RolloutResult",
        "RolloutMetrics",
        "CompletionsResult",
        "RolloutRequest",
        "InitResponse",
        "RolloutResponse",
        "CompletionsRequest",
        "CompletionsResponse",
        "OpenAIFunctionToolSchema",
        "OpenAIFunctionSchema",
        "OpenAIFunctionParametersSchema",
        "OpenAIFunctionPropertySchema",
        "RolloutStatus",
        "create_tool_result",
        "create_tool_error_result",
        "serialize_tool_result",
        "parse_tool_arguments",
        "get_tool_call_info",
        "execute_tool_calls",
        "OsmosisRolloutError",
        "OsmosisTransportError",
        "OsmosisServerError",
        "OsmosisValidationError",
        "OsmosisTimeoutError",
        "AgentLoopNotFoundError",
        "ToolExecutionError",
        "ToolArgumentError",
        "create_app",
        "serve_agent_loop",
        "validate_agent_loop",
        "ValidationResult",
    ],
    "osmosis_ai.rollout.core.base": [
        "RolloutAgentLoop",
        "RolloutContext",
        "RolloutResult",
        "RolloutMetrics",
        "CompletionsResult",
    ],
    "osmosis_ai.rollout.core.schemas": [
        "RolloutRequest",
        "InitResponse",
        "RolloutResponse",
        "RolloutMetrics",
        "CompletionsRequest",
        "CompletionsResponse",
        "OpenAIFunctionToolSchema",
        "OpenAIFunctionSchema",
        "OpenAIFunctionParametersSchema",
        "OpenAIFunctionPropertySchema",
        "RolloutStatus",
    ],
    "osmosis_ai.rollout.core.exceptions": [
        "OsmosisRolloutError",
        "OsmosisTransportError",
        "OsmosisServerError",
        "OsmosisValidationError",
        "OsmosisTimeoutError",
        "AgentLoopNotFoundError",
        "ToolExecutionError",
        "ToolArgumentError",
    ],
    "osmosis_ai.rollout.tools": [
        "create_tool_result",
        "create_tool_error_result",
        "serialize_tool_result",
        "parse_tool_arguments",
        "get_tool_call_info",
        "execute_tool_calls",
    ],
    "osmosis_ai.rollout.server": ["create_app", "serve_agent_loop"],
    "osmosis_ai.rollout.testing": ["TrainerDouble", "serve_app", "with_faults"],
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names])
def test_a_name_resolves_where_repositories_look_for_it(path: str, name: str) -> None:
    value = getattr(importlib.import_module(path), name)
    assert value.__name__ == name
    assert getattr(rollout, name, value) is value


def test_all_is_complete_and_every_name_resolves() -> None:
    assert set(PATHS["osmosis_ai.rollout"]) <= set(rollout.__all__)
    assert len(set(rollout.__all__)) == len(rollout.__all__)
    # An alias has the name of what it stands for.
    for name in set(rollout.__all__) - {"MessageDict"}:
        assert getattr(rollout, name).__name__ == name
    assert set(rollout.__all__) <= set(dir(rollout))
    names: dict[str, object] = {}
    exec("from osmosis_ai.rollout import *", names)
    assert set(rollout.__all__) <= set(names)
    with pytest.raises(AttributeError, match=r"'osmosis_ai\.rollout' has no attribute 'RolloutLoop'"):
        rollout.RolloutLoop  # noqa: B018


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import osmosis_ai.rollout", {"pydantic", "aiohttp", "starlette", "uvicorn", "msgspec", "anyio"}),
        ("from osmosis_ai.rollout import RolloutAgentLoop", {"aiohttp", "starlette", "uvicorn"}),
        ("from osmosis_ai.rollout import create_tool_result, ToolArgumentError", {"pydantic", "aiohttp", "starlette"}),
        ("from osmosis_ai.rollout import validate_agent_loop", {"aiohttp", "starlette", "uvicorn"}),
        ("from osmosis_ai.rollout import create_app", {"uvicorn", "litellm", "fastmcp", "mcp"}),
    ],
)
def test_a_name_loads_only_what_it_needs(statement: str, absent: set[str]) -> None:
    assert loaded_by(statement) & absent == set()
