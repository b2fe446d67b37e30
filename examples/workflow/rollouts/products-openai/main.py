"""Work out products with a tool, in a loop around OpenAI's client."""

import json
import os
import re

import uvicorn
from openai import AsyncOpenAI

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowOutput,
    Grader,
    LocalBackend,
    get_rollout_context,
)
from osmosis_ai.rollout.server import create_rollout_server

MAX_TURNS = 8
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def multiply(a, b):
    return a * b


class Products(AgentWorkflow):
    async def run(self, ctx):
        rollout = get_rollout_context()
        client = AsyncOpenAI(base_url=rollout.chat_completions_url, api_key=rollout.api_key)
        messages, calls = list(ctx.prompt), 0
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(
                model="openai/osmosis-rollout", messages=messages, tools=[MULTIPLY]
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                calls += 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call.function)})
        if ctx.artifacts_dir is not None:
            (ctx.artifacts_dir / "calls.txt").write_text(f"{calls}\n")
        return AgentWorkflowOutput(messages=messages, metrics={"tool_calls": calls})


def result_of(call):
    try:
        return str(multiply(**json.loads(call.arguments)))
    except (TypeError, ValueError) as error:
        # The model may correct itself.
        return f"Error: {error}"


class LastNumber(Grader):
    async def grade(self, ctx):
        numbers = re.findall(r"-?\d+", ctx.sample.messages[-1].get("content") or "")
        ctx.set_reward(float(numbers[-1:] == [ctx.label]))


backend = LocalBackend(workflow=Products, workflow_config=AgentWorkflowConfig(name="products"), grader=LastNumber)
app = create_rollout_server(backend=backend)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000")), log_level="warning")
