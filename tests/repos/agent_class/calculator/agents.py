"""An agent loop as a class, in a package: tools as dicts, results by hand, a reward of its own."""

import json

from osmosis_ai.rollout.core.base import RolloutAgentLoop

from .arithmetic import TOOLS

SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
    "$defs": {"number": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^[0-9]+$"}]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class CalculatorAgent(RolloutAgentLoop):
    name = "calculator-agent"

    def get_tools(self, request):
        level = request.metadata.get("level", "any")
        return [
            {
                "type": "function",
                "function": {"name": name, "description": f"{name}, level {level}", "parameters": SCHEMA},
            }
            for name in TOOLS
        ]

    async def run(self, ctx):
        messages = [dict(message) for message in ctx.request.messages]
        while True:
            reply = await ctx.chat(messages, temperature=0.5)
            messages = [*messages, reply.message]
            if not reply.tool_calls:
                break
            for call in reply.tool_calls:
                arguments = json.loads(call["function"]["arguments"])
                value = TOOLS[call["function"]["name"]](**arguments)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(value)})
        right = reply.content.strip() == ctx.request.metadata["ground_truth"]
        ctx.log_event("finished", right=right)
        return ctx.complete(messages, finish_reason="answered", reward=1.0 if right else 0.25)
