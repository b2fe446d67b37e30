"""An agent loop as an instance: tools as schemas, limits and parameters from the request."""

from osmosis_ai.rollout import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    RolloutAgentLoop,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
    create_tool_error_result,
    create_tool_result,
    execute_tool_calls,
    get_tool_call_info,
    serialize_tool_result,
)

NUMBER = OpenAIFunctionPropertySchema(type="number", description="A number")
ADD = OpenAIFunctionToolSchema(
    type="function",
    function=OpenAIFunctionSchema(
        name="add",
        description="Add two numbers",
        parameters=OpenAIFunctionParametersSchema(
            type="object", properties={"a": NUMBER, "b": NUMBER}, required=["a", "b"]
        ),
    ),
)


async def run_tool(tool_call):
    call_id, name, arguments = get_tool_call_info(tool_call)
    if name != "add":
        return create_tool_error_result(call_id, f"there is no tool {name}")
    print("adding", arguments)
    return create_tool_result(call_id, serialize_tool_result(arguments["a"] + arguments["b"]))


class CalculatorLoop(RolloutAgentLoop):
    name = "calculator"

    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        return [ADD]

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        for _turn in range(ctx.request.max_turns):
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(result.message)
            if not result.has_tool_calls:
                return ctx.complete(messages, finish_reason="stop")
            tool_results = await execute_tool_calls(result.tool_calls, run_tool)
            for _ in tool_results:
                ctx.record_tool_call(latency_ms=1.0)
            messages.extend(tool_results)
        return ctx.complete(messages, finish_reason="max_turns")


agent_loop = CalculatorLoop()
