"""Strands and the OpenAI Agents SDK in workflows, against a streaming model; and what is said when they are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from workflows import PROMPT, Streaming, local, run, serving

from osmosis_ai.rollout import OsmosisRolloutError, RolloutContext
from osmosis_ai.rollout.integrations.extras import needs_extra
from osmosis_ai.rollout.utils.messages import map_initial_messages_to_content_blocks
from osmosis_ai.testing.endpoint import by_turn, text, tool_call

STRANDS = "osmosis_ai.rollout.integrations.agents.strands"
AGENTS = "osmosis_ai.rollout.integrations.agents.openai_agents"
with_strands = pytest.mark.skipif(find_spec("strands") is None, reason="needs the extra strands")
with_agents = pytest.mark.skipif(find_spec("agents") is None, reason="needs the extra openai-agents")


@pytest.fixture
def model() -> Iterator[Streaming]:
    """A model that calls `add` and then answers."""
    with Streaming(by_turn(tool_call("add", a=2, b=2), text("4"))).run_in_thread() as model:
        yield model


def traced(artifacts: Path) -> list[dict[str, Any]]:
    trajectory = json.loads((artifacts / "r1" / "trajectory.json").read_text(encoding="utf-8"))
    return [
        {name: step[name] for name in ("source", "message", "tool_calls", "observation") if name in step}
        for step in trajectory["steps"]
    ]


STEPS = [
    {"source": "user", "message": "2 + 2"},
    {
        "source": "agent",
        "message": "",
        "tool_calls": [{"tool_call_id": "call_0", "function_name": "add", "arguments": {"a": 2, "b": 2}}],
        "observation": {"results": [{"source_call_id": "call_0", "content": "4"}]},
    },
    {"source": "agent", "message": "4"},
]


def normalised(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with the ids of calls replaced: the model's differ from run to run."""
    for step in steps:
        for call in step.get("tool_calls", []):
            call["tool_call_id"] = "call_0"
        for result in step.get("observation", {}).get("results", []):
            result["source_call_id"] = "call_0"
    return steps


@with_strands
def test_a_strands_agent_is_the_sample(model: Streaming, artifacts: Path) -> None:
    import strands

    from osmosis_ai.rollout.integrations.agents.strands import OsmosisRolloutModel, OsmosisStrandsAgent

    @strands.tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async def work(ctx: Any) -> None:
        rollout_model = OsmosisRolloutModel(params={"temperature": 0.5})
        agent = OsmosisStrandsAgent(name="adder", model=rollout_model, tools=[add], callback_handler=None)
        await agent.invoke_async(ctx.prompt[0]["content"])

    def grade(ctx: Any) -> None:
        ctx.set_reward(float(ctx.sample.messages[-1]["content"][0]["text"] == ctx.label))

    with serving(local(work, grade)) as client:
        body = run(client, model.request())
        assert body["err_message"] is None
    assert (body["sample"]["id"], body["sample"]["reward"]) == ("adder", 1.0)
    assert [message["role"] for message in body["sample"]["messages"]] == ["user", "assistant", "user", "assistant"]
    assert {(each.headers["x-rollout-id"], each.headers["x-sample-id"]) for each in model.requests} == {("r1", "adder")}
    assert {each.body["temperature"] for each in model.requests} == {0.5}
    assert normalised(traced(artifacts)) == STEPS


@with_strands
def test_a_strands_agent_for_the_rollouts_model_needs_a_rollout() -> None:
    from osmosis_ai.rollout.integrations.agents.strands import OsmosisRolloutModel, OsmosisStrandsAgent

    with pytest.raises(RuntimeError, match=r"create it in a workflow's run\(\)"):
        OsmosisStrandsAgent(model=OsmosisRolloutModel())
    from osmosis_ai import rollout

    assert rollout.OsmosisStrandsAgent is OsmosisStrandsAgent  # type: ignore[attr-defined]
    placeholder = OsmosisRolloutModel()
    for method in ("stream", "structured_output", "get_config", "update_config"):
        with pytest.raises(NotImplementedError, match="placeholder"):
            getattr(placeholder, method)()


@with_agents
def test_a_session_is_the_sample(model: Streaming, artifacts: Path) -> None:
    import agents

    from osmosis_ai.rollout.integrations.agents.openai_agents import (
        OsmosisAgent,
        OsmosisMemorySession,
        OsmosisRolloutModel,
    )

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async def work(ctx: Any) -> None:
        agent = OsmosisAgent(name="adder", model=OsmosisRolloutModel(), tools=[add])
        session = OsmosisMemorySession()
        config = agents.RunConfig(tracing_disabled=True)
        await agents.Runner.run(agent, ctx.prompt[0]["content"], session=session, run_config=config)

    def grade(ctx: Any) -> None:
        ctx.set_reward(float(ctx.sample.messages[-1]["content"][0]["text"] == ctx.label))

    with serving(local(work, grade)) as client:
        body = run(client, model.request())
        assert body["err_message"] is None
    assert body["sample"]["reward"] == 1.0
    kinds = [item.get("type") or item["role"] for item in body["sample"]["messages"]]
    assert kinds == ["user", "function_call", "function_call_output", "message"]
    assert {(each.headers["x-rollout-id"], each.headers["x-sample-id"]) for each in model.requests} == {
        ("r1", body["sample"]["id"])
    }
    assert normalised(traced(artifacts)) == STEPS


@with_agents
def test_a_run_without_the_rollouts_session_fails(model: Streaming) -> None:
    import agents

    from osmosis_ai.rollout.integrations.agents.openai_agents import (
        OsmosisAgent,
        OsmosisMemorySession,
        OsmosisRolloutModel,
    )

    outside = OsmosisMemorySession()

    async def without(ctx: Any) -> None:
        config = agents.RunConfig(tracing_disabled=True)
        await agents.Runner.run(OsmosisAgent(name="a", model=OsmosisRolloutModel()), "hi", run_config=config)

    with serving(local(without)) as client:
        assert "pass session=OsmosisMemorySession()" in run(client, model.request())["err_message"]
    with serving(local(lambda ctx: outside.get_items())) as client:
        assert "isn't the rollout's" in run(client, model.request())["err_message"]


@with_agents
@pytest.mark.anyio
async def test_a_session_outside_a_rollout_is_a_plain_one() -> None:
    from osmosis_ai.rollout.integrations.agents.openai_agents import (
        OsmosisLitellmModel,
        OsmosisMemorySession,
        OsmosisRolloutModel,
    )

    session = OsmosisMemorySession("notes")
    await session.add_items([{"role": "user", "content": str(n)} for n in range(3)])
    assert [item["content"] for item in await session.get_items(limit=2)] == ["1", "2"]
    assert await session.get_items(limit=0) == []
    assert (await session.pop_item())["content"] == "2"
    await session.clear_session()
    assert (await session.get_items(), await session.pop_item()) == ([], None)
    with pytest.raises(RuntimeError, match="needs a rollout"):
        OsmosisLitellmModel()
    with pytest.raises(NotImplementedError, match="placeholder"):
        await OsmosisRolloutModel().get_response()


@pytest.mark.parametrize(
    ("statement", "package", "extra"),
    [
        (f"import {STRANDS}", "strands", "strands"),
        (f"import {AGENTS}", "agents", "openai-agents"),
        # Where SDK 0.2 had it.
        ("from osmosis_ai.rollout import OsmosisStrandsAgent", "strands", "strands"),
    ],
)
def test_a_missing_extra_is_named(statement: str, package: str, extra: str) -> None:
    # None in sys.modules makes Python treat a package as missing.
    code = f"import sys; sys.modules[{package!r}] = None\n{statement}"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert failed.stderr.splitlines()[-1].endswith(f"isn't installed: pip install 'osmosis-ai[{extra}]'")
    assert "ModuleNotFoundError" in failed.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'mine'", name="mine"),
        ModuleNotFoundError("No module named 'strands.absent'", name="strands.absent"),
        ImportError("cannot import name 'Agent'"),
    ],
)
def test_other_import_errors_stay_as_they_are(error: ImportError) -> None:
    with pytest.raises(ImportError) as raised, needs_extra("strands", "strands"):
        raise error
    assert raised.value is error


def test_an_import_error_caused_by_a_missing_package_of_the_extra_names_the_extra() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"osmosis-ai\[openai-agents\]"),
        needs_extra("openai-agents", "litellm"),
    ):
        raise ImportError("litellm is required") from ModuleNotFoundError("no litellm", name="litellm")


def test_chat_messages_become_blocks() -> None:
    blocks = [{"role": "user", "content": [{"text": "2 + 2"}]}]
    assert map_initial_messages_to_content_blocks(PROMPT) == blocks
    assert map_initial_messages_to_content_blocks(blocks) == blocks


class Tools:
    """A rollout's tools, as its driver provides them."""

    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({arguments})"


@pytest.mark.anyio
async def test_a_workflow_calls_the_repositorys_tools_if_there_are_any() -> None:
    from osmosis_ai.rollout import AgentWorkflowContext

    ctx = AgentWorkflowContext(PROMPT)
    assert ctx.tools == []
    with pytest.raises(OsmosisRolloutError, match="add can't be called: this rollout has no MCP tools"):
        await ctx.call_tool("add")
    with RolloutContext(tools=Tools()):  # type: ignore[call-arg]
        assert [tool["function"]["name"] for tool in ctx.tools] == ["add"]
        assert await ctx.call_tool("add", {"a": 1}) == "add({'a': 1})"
