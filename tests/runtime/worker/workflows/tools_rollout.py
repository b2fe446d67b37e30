"""A workflow on our own SDK that calls the repository's tools; it gets the highest count as its reward. Not a test."""

import json
import os

import httpx
import uvicorn

from osmosis_ai.rollout import AgentWorkflow, Grader, LocalBackend, create_rollout_server, get_rollout_context


class Workflow(AgentWorkflow):
    async def run(self, ctx):
        rollout = get_rollout_context()
        tools = getattr(ctx, "tools", None) or []
        assert sorted(tool["function"]["name"] for tool in tools) == ["count", "divide"]
        messages = list(ctx.prompt)
        await ctx.call_tool("count")
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {rollout.api_key}"}) as client:
            while messages[-1].get("tool_calls") or messages[-1]["role"] != "assistant":
                for call in messages[-1].get("tool_calls") or ():
                    function = call["function"]
                    content = await ctx.call_tool(function["name"], json.loads(function["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                body = {"model": "any", "messages": messages, "tools": tools}
                answer = await client.post(f"{rollout.chat_completions_url}/chat/completions", json=body)
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
        return messages


class Count(Grader):
    async def grade(self, ctx):
        results = [message["content"] for message in ctx.sample.messages if message["role"] == "tool"]
        ctx.set_reward(max(float(result) for result in results if result.isdecimal()))


if __name__ == "__main__":
    app = create_rollout_server(backend=LocalBackend(workflow=Workflow, grader=Count))
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["_OSMOSIS_ROLLOUT_PORT"]), log_level="warning")
