"""One loop for everything a loop can do wrong: the first word of the prompt says what, after its first model call."""

import asyncio
import os
import sys
import time

import state

from osmosis_ai.rollout import RolloutAgentLoop


class Misbehaving(RolloutAgentLoop):
    name = "misbehaving"

    def get_tools(self, request):
        word = request.messages[-1]["content"].split()[0] if request.messages else ""
        if word == "no-tools":
            raise LookupError("these tools can't be found")
        if word == "none-tools":
            return None
        if word == "exit-tools":
            os._exit(5)
        return []

    async def run(self, ctx):
        messages = list(ctx.request.messages)
        word = messages[-1]["content"].split()[0]
        state.note(word)
        reply = await ctx.chat(messages)
        messages.append(reply.message)
        action = getattr(self, word.replace("-", "_"), None)
        if action is not None:
            result = await action(ctx, messages)
            if result is not Ellipsis:
                return result
        return ctx.complete(messages)

    async def edit(self, ctx, messages):
        messages[1]["content"] = "something else"
        await ctx.chat(messages)

    async def edit_again(self, ctx, messages):
        messages[1] = {**messages[1], "content": "something else"}
        messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages)

    async def throw(self, ctx, messages):
        raise ValueError("this loop is broken")

    async def report(self, ctx, messages):
        return ctx.error("it did not work out", messages)

    async def hang(self, ctx, messages):
        await asyncio.sleep(3600)

    async def cling(self, ctx, messages):
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def wrong(self, ctx, messages):
        return {"messages": messages}

    async def unsendable(self, ctx, messages):
        return ctx.complete([*messages, {"role": "user", "content": object()}])

    async def binary(self, ctx, messages):
        return ctx.complete([*messages, {"role": "user", "content": b"\xff"}])

    async def leave(self, ctx, messages):
        sys.exit(3)

    async def exit(self, ctx, messages):
        os._exit(7)

    async def block(self, ctx, messages):
        time.sleep(3600)

    async def endless(self, ctx, messages):
        while True:
            messages.append({"role": "user", "content": "more"})
            messages.append((await ctx.chat(messages)).message)

    async def twice(self, ctx, messages):
        for _ in range(2):
            messages.append({"role": "user", "content": "more"})
            messages.append((await ctx.chat(messages)).message)
        return ctx.complete(messages)

    async def odd_reward(self, ctx, messages):
        return ctx.complete(messages, reward=float("nan"))


agent = Misbehaving()
count = 3


class Unnamed:
    pass


def make():
    return Misbehaving()
