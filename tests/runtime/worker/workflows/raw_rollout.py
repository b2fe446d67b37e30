"""A rollout server as users write it, for every released SDK since 0.2.23: raw HTTP, no agent framework.

The last user message says what the workflow does: `raise`, `sleep`, `block`, `exit`, or else two model calls.
"""

import asyncio
import os
import time

import httpx
import uvicorn

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    Grader,
    LocalBackend,
    RolloutSample,
    get_rollout_context,
)
from osmosis_ai.rollout.context import SampleSource
from osmosis_ai.rollout.server import create_rollout_server


class Messages(SampleSource):
    def __init__(self, messages):
        self.messages = messages

    async def get_sample(self, name=None):
        return RolloutSample(messages=self.messages, **({} if name is None else {"id": name}))


class Workflow(AgentWorkflow):
    async def run(self, ctx):
        rollout = get_rollout_context()
        messages = list(ctx.prompt)
        task = messages[-1]["content"]
        if task == "raise":
            raise RuntimeError("the workflow broke")
        if task == "sleep":
            await asyncio.sleep(3600)
        if task == "block":
            time.sleep(3600)  # noqa: ASYNC251 - this is what it is for
        if task == "exit":
            os._exit(3)
        headers = {
            "Authorization": f"Bearer {rollout.api_key}",
            "x-rollout-id": rollout.rollout_id,
            "x-sample-id": "main",
        }
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            for turn in range(2):
                if turn:
                    messages.append({"role": "user", "content": "Are you sure?"})
                body = {"model": "openai/osmosis-rollout", "messages": messages, "stream": False}
                answer = await client.post(f"{rollout.chat_completions_url}/chat/completions", json=body)
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
        if hasattr(rollout, "register_sample_source"):
            rollout.register_sample_source("main", Messages(messages))
        else:
            rollout.set_sample_source(Messages(messages))


class Exact(Grader):
    async def grade(self, ctx):
        if hasattr(ctx, "set_reward"):
            ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label))
        else:
            for name, sample in ctx.get_samples().items():
                ctx.set_sample_reward(name, float(sample.messages[-1]["content"] == ctx.label))


if __name__ == "__main__":
    backend = LocalBackend(workflow=Workflow, workflow_config=AgentWorkflowConfig(name="raw"), grader=Exact)
    port = int(os.environ["_OSMOSIS_ROLLOUT_PORT"])
    uvicorn.run(create_rollout_server(backend=backend), host="127.0.0.1", port=port, log_level="warning")
