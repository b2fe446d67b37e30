"""Every name of the workflow SDK resolves where workspaces import it, and loads only what it needs."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys

import pytest

from osmosis_ai.rollout import RolloutContext, RolloutStatus
from osmosis_ai.rollout.backend.harbor import HarborBackend, TaskMode
from osmosis_ai.rollout.context import RolloutContext as WorkflowContext

TYPES = [
    "AgentWorkflowConfig",
    "AgentWorkflowOutput",
    "BaseConfig",
    "ConcurrencyConfig",
    "ExecutionRequest",
    "ExecutionResult",
    "GraderCompleteRequest",
    "GraderConfig",
    "GraderInitRequest",
    "GraderInitResponse",
    "GraderStatus",
    "MessageDict",
    "RolloutCompleteRequest",
    "RolloutErrorCategory",
    "RolloutInitRequest",
    "RolloutInitResponse",
    "RolloutSample",
    "RolloutStatus",
]
CONTEXT = ["AgentWorkflowContext", "GraderContext", "SampleSource", "get_rollout_context"]
PATHS = {
    "osmosis_ai.rollout": [
        *TYPES,
        *CONTEXT,
        "AgentWorkflow",
        "ControllerAuth",
        "ExecutionBackend",
        "ExecutionOutcome",
        "Grader",
        "HarborAgentWorkflowContext",
        "LocalBackend",
        "MultiTurnMode",
        "RolloutContext",
        "RolloutResultResponse",
        "create_rollout_server",
    ],
    "osmosis_ai.rollout.agent_workflow": ["AgentWorkflow"],
    "osmosis_ai.rollout.grader": ["Grader"],
    "osmosis_ai.rollout.context": [
        *CONTEXT,
        "API_KEY_ENV",
        "CHAT_COMPLETIONS_URL_ENV",
        "HarborAgentWorkflowContext",
        "ROLLOUT_ID_ENV",
        "RolloutContext",
        "rollout_contextvar",
    ],
    "osmosis_ai.rollout.types": [
        *TYPES,
        "CancelRolloutsRequest",
        "CancelRolloutsResponse",
        "Messages",
        "MultiTurnMode",
        "POLLING_LEASE_HEADER",
        "RolloutStatusResponse",
    ],
    "osmosis_ai.rollout.types.config": ["BaseConfig"],
    "osmosis_ai.rollout.types.output": ["AgentWorkflowOutput", "Messages"],
    "osmosis_ai.rollout.types.protocol": ["RolloutInitRequest"],
    "osmosis_ai.rollout.types.sample": ["RolloutSample"],
    "osmosis_ai.rollout.backend": ["ExecutionBackend", "LocalBackend", "ResultCallback"],
    "osmosis_ai.rollout.backend.base": ["ExecutionBackend", "ResultCallback"],
    "osmosis_ai.rollout.backend.local": ["LocalBackend"],
    "osmosis_ai.rollout.backend.local.backend": ["LocalBackend"],
    "osmosis_ai.rollout.backend.harbor": ["HarborBackend", "TaskMode"],
    "osmosis_ai.rollout.server": ["ControllerAuth", "create_rollout_server"],
    "osmosis_ai.rollout.server.app": ["create_rollout_server"],
    "osmosis_ai.rollout.server.auth": ["ControllerAuth"],
    "osmosis_ai.rollout.trajectory": [
        "TrajectoryReport",
        "convert_sample_to_trajectory",
        "report_from_response",
        "save_trajectory",
    ],
    "osmosis_ai.rollout.utils.messages": ["map_initial_messages_to_content_blocks"],
    "osmosis_ai.rollout.validator": ["ValidationError", "ValidationResult", "resolved_agent_name", "validate_backend"],
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names])
def test_a_name_resolves_where_workspaces_look_for_it(path: str, name: str) -> None:
    module = importlib.import_module(path)
    assert hasattr(module, name)
    assert name in module.__all__


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "from osmosis_ai.rollout import AgentWorkflow, Grader, SampleSource, get_rollout_context",
            {"pydantic", "aiohttp", "starlette", "anyio"},
        ),
        (
            "from osmosis_ai.rollout import LocalBackend, RolloutSample",
            {"starlette", "fastapi", "uvicorn", "aiohttp", "strands", "agents", "litellm", "mcp"},
        ),
        (
            "from osmosis_ai.rollout import create_rollout_server",
            {"fastapi", "uvicorn", "aiohttp", "litellm", "fastmcp", "mcp", "strands", "agents"},
        ),
    ],
)
def test_a_name_loads_only_what_it_needs(statement: str, absent: set[str]) -> None:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) & absent == set()


@pytest.mark.parametrize("kind", [HarborBackend, TaskMode])
def test_harbor_says_what_to_use_instead(kind: type) -> None:
    with pytest.raises(NotImplementedError, match="use LocalBackend"):
        kind(orchestrator=None, tasks_dir=".")


def test_one_name_means_the_context_of_both_kinds_of_rollouts() -> None:
    made = [RolloutContext(), RolloutContext("http://model", "key"), RolloutContext(rollout_id="r1")]  # type: ignore[call-arg, arg-type]
    assert {type(each) for each in made} == {WorkflowContext}
    assert all(isinstance(each, RolloutContext) for each in made)
    with pytest.raises(TypeError, match="missing 3 required positional arguments"):
        RolloutContext(debug_dir=None)  # type: ignore[call-arg]


def test_statuses_are_their_texts() -> None:
    assert [str(RolloutStatus.SUCCESS), f"{RolloutStatus.COMPLETED}", f"{RolloutStatus.ERROR:>7}"] == [
        "success",
        "COMPLETED",
        "  ERROR",
    ]
    assert json.dumps([RolloutStatus.CANCELLED]) == '["cancelled"]'
    assert pickle.loads(pickle.dumps(RolloutStatus.FAILURE)) is RolloutStatus.FAILURE
    running = [status.value for status in RolloutStatus if not status.is_terminal]
    assert running == ["pending", "queued", "running", "grading", "unknown"]
