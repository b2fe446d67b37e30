"""Work out products with a tool, with the OpenAI Agents SDK."""

import os
import re

import uvicorn
from agents import Runner, function_tool

from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowConfig, Grader, LocalBackend
from osmosis_ai.rollout.integrations.agents.openai_agents import (
    OsmosisAgent,
    OsmosisMemorySession,
    OsmosisRolloutModel,
)
from osmosis_ai.rollout.server import create_rollout_server


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


class Products(AgentWorkflow):
    async def run(self, ctx):
        system, user = ctx.prompt
        agent = OsmosisAgent(
            name="products", instructions=system["content"], model=OsmosisRolloutModel(), tools=[multiply]
        )
        # The session's items become the sample.
        await Runner.run(agent, user["content"], session=OsmosisMemorySession())


class LastNumber(Grader):
    async def grade(self, ctx):
        numbers = re.findall(r"-?\d+", text_of(ctx.sample.messages[-1]))
        ctx.set_reward(float(numbers[-1:] == [ctx.label]))


def text_of(item):
    """Return the text of a message, whose content is a list of parts."""
    content = item.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


backend = LocalBackend(workflow=Products, workflow_config=AgentWorkflowConfig(name="products"), grader=LastNumber)
app = create_rollout_server(backend=backend)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000")), log_level="warning")
