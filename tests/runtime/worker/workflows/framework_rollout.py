"""Workflows of agent frameworks, for every released SDK that integrates them. Not a test.

The last user message says which: `strands` or `agents`. Each agent adds two numbers with a tool.
"""

import os

import agents
import strands
import uvicorn

from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowConfig, Grader, LocalBackend
from osmosis_ai.rollout.integrations.agents import openai_agents
from osmosis_ai.rollout.integrations.agents import strands as osmosis_strands
from osmosis_ai.rollout.server import create_rollout_server


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Workflow(AgentWorkflow):
    async def run(self, ctx):
        task = ctx.prompt[-1]["content"]
        if task == "strands":
            model = osmosis_strands.OsmosisRolloutModel(params={"temperature": 0.5})
            agent = osmosis_strands.OsmosisStrandsAgent(model=model, tools=[strands.tool(add)], callback_handler=None)
            await agent.invoke_async(task)
        else:
            agent = openai_agents.OsmosisAgent(
                name="adder", model=openai_agents.OsmosisRolloutModel(), tools=[agents.function_tool(add)]
            )
            await agents.Runner.run(agent, task, session=openai_agents.OsmosisMemorySession())


class Exact(Grader):
    async def grade(self, ctx):
        # Whatever form the framework keeps its messages in.
        ctx.set_reward(float(ctx.label in str(ctx.sample.messages[-1])))


if __name__ == "__main__":
    backend = LocalBackend(workflow=Workflow, workflow_config=AgentWorkflowConfig(name="agents"), grader=Exact)
    port = int(os.environ["_OSMOSIS_ROLLOUT_PORT"])
    uvicorn.run(create_rollout_server(backend=backend), host="127.0.0.1", port=port, log_level="warning")
